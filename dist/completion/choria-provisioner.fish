# Made by choria-provisioner --completion fish; changes are lost.
complete -c choria-provisioner -f
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a run -d 'Runs the daemon.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a status -d 'Says what the daemon does, and what is wrong.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a nodes -d 'Lists nodes.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a pause -d 'Has the daemon begin nothing new until it is resumed.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a resume -d 'Has a paused daemon begin again.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a retry -d 'Has a node tried now, whatever it waits for.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a discover -d 'Has the fleet asked now who is there.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a deny -d 'Has a node left alone until it is allowed again.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a allow -d 'Takes back that a node is left alone.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a check -d 'Looks for all that would keep the daemon from working, and changes nothing.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a reload -d 'Has the daemon read its settings again: all take effect, or none and it says why.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a step-down -d 'Has the leader finish its nodes and let another lead.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from run status nodes pause resume retry discover deny allow check reload step-down try' -a try -d 'Looks what would be done to a node: verifies it, runs the helper, and sends nothing of what comes out.'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from status nodes pause resume retry discover deny allow check reload step-down try' -l config -r -F
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from status nodes pause resume retry discover deny allow check reload step-down try' -l choria-config -r -F
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from status nodes pause resume retry discover deny allow check reload step-down try' -l pid -r -F
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from status nodes pause resume retry discover deny allow check reload step-down try' -l completion -x -a 'bash zsh fish'
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from status nodes pause resume retry discover deny allow check reload step-down try' -l debug
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from status nodes pause resume retry discover deny allow check reload step-down try' -l no-debug
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from status nodes pause resume retry discover deny allow check reload step-down try' -l version
complete -c choria-provisioner -n 'not __fish_seen_subcommand_from status nodes pause resume retry discover deny allow check reload step-down try' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from status' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from status' -l socket -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from status' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from status' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from status' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from nodes' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from nodes' -l socket -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from nodes' -l state -x -a 'all stuck working queued waiting settling denied'
complete -c choria-provisioner -n '__fish_seen_subcommand_from nodes' -l sort -x -a 'name failures next seen'
complete -c choria-provisioner -n '__fish_seen_subcommand_from nodes' -l limit -x
complete -c choria-provisioner -n '__fish_seen_subcommand_from nodes' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from nodes' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from nodes' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from pause' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from pause' -l socket -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from pause' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from pause' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from pause' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from resume' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from resume' -l socket -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from resume' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from resume' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from resume' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from retry' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from retry' -l socket -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from retry' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from retry' -l all
complete -c choria-provisioner -n '__fish_seen_subcommand_from retry' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from retry' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from discover' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from discover' -l socket -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from discover' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from discover' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from discover' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from deny' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from deny' -l socket -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from deny' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from deny' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from deny' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from allow' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from allow' -l socket -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from allow' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from allow' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from allow' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from check' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from check' -l choria-config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from check' -l pid -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from check' -l offline
complete -c choria-provisioner -n '__fish_seen_subcommand_from check' -l moving
complete -c choria-provisioner -n '__fish_seen_subcommand_from check' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from check' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from check' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from reload' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from reload' -l socket -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from reload' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from reload' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from reload' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from step-down' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from step-down' -l socket -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from step-down' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from step-down' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from step-down' -l help
complete -c choria-provisioner -n '__fish_seen_subcommand_from try' -l config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from try' -l choria-config -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from try' -l helper -r -F
complete -c choria-provisioner -n '__fish_seen_subcommand_from try' -l timeout -x
complete -c choria-provisioner -n '__fish_seen_subcommand_from try' -l json
complete -c choria-provisioner -n '__fish_seen_subcommand_from try' -l version
complete -c choria-provisioner -n '__fish_seen_subcommand_from try' -l help
