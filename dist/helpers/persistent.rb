#!/usr/bin/env ruby
# A helper in Ruby for helper_mode persistent: it stays, and answers each line on standard input with one on standard output.
#
# What it writes to standard error is logged with the name of the node it is asked about. An exception fails that node's
# attempt only. It ends when its input does.

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

abort "this helper needs helper_mode: persistent" unless ENV["CHORIA_PROVISIONER_HELPER"] == "persistent/1"

# Each line is sent at once.
$stdout.sync = true

$stdin.each_line do |line|
  request = JSON.parse(line)
  answer = {"id" => request["id"]}
  begin
    answer["reply"] = configure(request["node"])
  rescue StandardError => e
    answer["error"] = "#{e.class}: #{e.message}"
  end
  puts JSON.generate(answer)
end
