#!/bin/sh
# A helper in plain sh for helper_mode persistent: it stays, and answers each line on standard input with one on standard
# output. It starts no other program.
#
# What it writes to standard error is logged with the name of the node it is asked about. It ends when its input does.
set -eu

domain=example.net
broker=nats://broker.example.net:4222

if [ "${CHORIA_PROVISIONER_HELPER:-}" != persistent/1 ]; then
    echo "this helper needs helper_mode: persistent" >&2
    exit 1
fi

while IFS= read -r line; do
    # `id` is always the first key, then comes `node` with `identity` as its first key.
    id=${line#'{"id":"'}
    id=${id%%\"*}
    identity=${line#*'"node":{"identity":"'}
    identity=${identity%%\"*}

    case $identity in
    '' | *[!A-Za-z0-9._-]*)
        printf '{"id":"%s","error":"cannot read the identity"}\n' "$id"
        ;;
    *."$domain")
        # Every value is a text. Without plugin.choria.server.provision the node would provision again after its restart.
        configuration='"identity":"'$identity'","collectives":"choria","loglevel":"info","logfile":"/var/log/choria.log"'
        configuration=$configuration',"plugin.choria.middleware_hosts":"'$broker'","plugin.choria.server.provision":"0"'
        printf '{"id":"%s","reply":{"configuration":{%s}}}\n' "$id" "$configuration"
        ;;
    *)
        # Anyone who holds a provisioning token can claim any name. What we don't know we leave alone.
        printf '{"id":"%s","reply":{"defer":true,"msg":"%s is not in %s"}}\n' "$id" "$identity" "$domain"
        ;;
    esac
done
