#!/usr/bin/env ruby
# A helper in Ruby: one JSON object on standard input, one on standard output.
#
# What it writes to standard error is logged with the node's name, and any other exit status than zero, such as that of an
# exception, fails the attempt.

require "json"

DOMAIN = "example.net"
BROKER = "nats://broker.example.net:4222"

def configure(node)
  identity = node["identity"]
  unless identity.end_with?(".#{DOMAIN}")
    # Anyone who holds a provisioning token can claim any name. What we don't know we leave alone.
    return {"defer" => true, "msg" => "#{identity} is not in #{DOMAIN}"}
  end

  # The inventory is a text that holds JSON of its own.
  facts = JSON.parse(node["inventory"]).fetch("facts", {})
  collectives = ["choria"]
  collectives << facts["location"] if facts["location"].is_a?(String)

  {
    # Every value is a text. Without plugin.choria.server.provision the node would provision again after its restart.
    "configuration" => {
      "identity" => identity,
      "collectives" => collectives.join(","),
      "loglevel" => "info",
      "logfile" => "/var/log/choria.log",
      "plugin.choria.middleware_hosts" => BROKER,
      "plugin.choria.server.provision" => "0"
    }
  }
end

puts JSON.generate(configure(JSON.parse($stdin.read)))
