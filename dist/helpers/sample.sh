#!/bin/sh
# A helper in plain sh, without any other program than sed and cat.
#
# It gets one JSON object on standard input and answers with one on standard output. What it writes to standard error is
# logged with the node's name, and any other exit status than zero fails the attempt.
set -eu

domain=example.net
broker=nats://broker.example.net:4222

# `identity` is always the first key of the only line; a name with other characters than these is none of ours.
identity=$(sed -n '1s/^{"identity":"\([A-Za-z0-9._-]*\)",.*/\1/p')

case $identity in
*."$domain") ;;
'')
    echo "cannot read an identity from the input" >&2
    exit 1
    ;;
*)
    # Anyone who holds a provisioning token can claim any name. What we don't know we leave alone.
    printf '{"defer": true, "msg": "%s is not in %s"}\n' "$identity" "$domain"
    exit
    ;;
esac

# Every value is a text. Without plugin.choria.server.provision the node would provision again after its restart.
cat <<ANSWER
{
  "configuration": {
    "identity": "$identity",
    "collectives": "choria",
    "loglevel": "info",
    "logfile": "/var/log/choria.log",
    "plugin.choria.middleware_hosts": "$broker",
    "plugin.choria.server.provision": "0"
  }
}
ANSWER
