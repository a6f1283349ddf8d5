#!/usr/bin/env python3
"""A helper in Python for helper_mode persistent: it stays, and answers each line on standard input with one on standard output.

What it writes to standard error is logged with the name of the node it is asked about. An exception fails that node's
attempt only. It ends when its input does.
"""

import json
import os
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


if os.environ.get("CHORIA_PROVISIONER_HELPER") != "persistent/1":
    sys.exit("this helper needs helper_mode: persistent")

for line in sys.stdin:
    request = json.loads(line)
    answer = {"id": request["id"]}
    try:
        answer["reply"] = configure(request["node"])
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    # On one line, and sent at once.
    print(json.dumps(answer), flush=True)
