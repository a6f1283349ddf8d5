#!/usr/bin/env python3
"""A helper for nodes of an organization issuer, with features.ed25519. Its argument is the issuer's public key:

    helper: /etc/choria-provisioner/helper 03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8

The daemon signs a server JWT for each node, with the wishes in server_claims; the node writes it beside its key.
"""

import json
import os.path
import sys

DOMAIN = "example.net"
BROKER = "nats://broker.example.net:4222"


def configure(node, issuer):
    identity = node["identity"]
    if not identity.endswith("." + DOMAIN):
        # Anyone who holds a provisioning token can claim any name. What we don't know we leave alone.
        return {"defer": True, "msg": f"{identity} is not in {DOMAIN}"}
    if node["ed25519_pubkey"] is None:
        sys.exit("this helper needs features.ed25519")

    # The node writes its seed and its JWT here, whatever we say.
    directory = node["ed25519_pubkey"]["directory"]
    # The inventory is a text that holds JSON of its own.
    facts = json.loads(node["inventory"]).get("facts", {})
    collectives = ["choria"]
    if isinstance(facts.get("location"), str):
        collectives.append(facts["location"])

    return {
        # Every value is a text. Without plugin.choria.server.provision the node would provision again after its restart.
        "configuration": {
            "identity": identity,
            "collectives": ",".join(collectives),
            "loglevel": "info",
            "logfile": "/var/log/choria.log",
            "plugin.choria.middleware_hosts": BROKER,
            "plugin.choria.server.provision": "0",
            "plugin.security.provider": "choria",
            "plugin.security.choria.token_file": os.path.join(directory, "server.jwt"),
            "plugin.security.choria.seed_file": os.path.join(directory, "server.seed"),
            "plugin.security.issuer.names": "choria",
            "plugin.security.issuer.choria.public": issuer,
        },
        # What the node may do beside answering requests.
        "server_claims": {"collectives": collectives, "permissions": {"streams": True, "submission": True}},
    }


if len(sys.argv) != 2:
    sys.exit("this helper needs the issuer's public key as its argument")
json.dump(configure(json.load(sys.stdin), sys.argv[1]), sys.stdout)
