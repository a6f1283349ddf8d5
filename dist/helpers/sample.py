#!/usr/bin/env python3
"""A helper in Python: one JSON object on standard input, one on standard output.

What it writes to standard error is logged with the node's name, and any other exit status than zero, such as that of an
exception, fails the attempt.
"""

import json
import sys

DOMAIN = "example.net"
BROKER = "nats://broker.example.net:4222"


def configure(node):
    identity = node["identity"]
    if not identity.endswith("." + DOMAIN):
        # Anyone who holds a provisioning token can claim any name. What we don't know we leave alone.
        return {"defer": True, "msg": f"{identity} is not in {DOMAIN}"}

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
        }
    }


json.dump(configure(json.load(sys.stdin)), sys.stdout)
