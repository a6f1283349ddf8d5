#!/usr/bin/env python3
"""A helper that signs the certificate request of each node with openssl, with features.pki. Its argument is the CA's folder:

    helper: /etc/choria-provisioner/helper /etc/choria-provisioner/ca

A CA for a laboratory, in a folder that only the daemon's user can read:

    openssl req -x509 -newkey rsa:3072 -noenc -days 3650 -subj "/CN=Provisioning CA" -keyout ca.key -out ca.pem

No list is kept of what was signed, so many can run at once. The daemon has checked that each request is for the node that sent
it, is signed by the node's key and asks for no name on the deny list.
"""

import json
import os.path
import secrets
import subprocess
import sys
import tempfile

DOMAIN = "example.net"
BROKER = "nats://broker.example.net:4222"
DAYS = "365"


def sign(csr, identity, ca):
    # Of what a request wishes we take its key and its name; everything else is ours to say.
    extensions = f"""
basicConstraints = critical, CA:false
keyUsage = critical, digitalSignature, keyEncipherment
extendedKeyUsage = clientAuth, serverAuth
subjectAltName = DNS:{identity}
"""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(extensions)
        file.flush()
        command = ["openssl", "x509", "-req", "-sha256", "-days", DAYS, "-extfile", file.name]
        command += ["-CA", os.path.join(ca, "ca.pem"), "-CAkey", os.path.join(ca, "ca.key")]
        # Always of the same length, and never twice.
        command += ["-set_serial", str(1 << 126 | secrets.randbits(126))]
        signed = subprocess.run(command, input=csr, capture_output=True, text=True)
    if signed.returncode != 0:
        # Logged with the node's name. When all is well openssl writes there, too.
        sys.exit(signed.stderr)
    return signed.stdout


def configure(node, ca):
    identity = node["identity"]
    if not identity.endswith("." + DOMAIN):
        # Anyone who holds a provisioning token can claim any name. What we don't know we leave alone.
        return {"defer": True, "msg": f"{identity} is not in {DOMAIN}"}
    if node["csr"] is None:
        sys.exit("this helper needs features.pki")

    with open(os.path.join(ca, "ca.pem"), encoding="ascii") as file:
        authority = file.read()
    # The node writes these files here, whatever we say.
    directory = node["csr"]["ssldir"]
    return {
        "certificate": sign(node["csr"]["csr"], identity, ca),
        "ca": authority,
        # Every value is a text. Without plugin.choria.server.provision the node would provision again after its restart.
        "configuration": {
            "identity": identity,
            "collectives": "mcollective",
            "loglevel": "info",
            "logfile": "/var/log/choria.log",
            "plugin.choria.middleware_hosts": BROKER,
            "plugin.choria.server.provision": "0",
            "plugin.security.provider": "file",
            "plugin.security.file.certificate": os.path.join(directory, "certificate.pem"),
            "plugin.security.file.key": os.path.join(directory, "private.pem"),
            "plugin.security.file.ca": os.path.join(directory, "ca.pem"),
        },
    }


if len(sys.argv) != 2:
    sys.exit("this helper needs the folder of the CA as its argument")
json.dump(configure(json.load(sys.stdin), sys.argv[1]), sys.stdout)
