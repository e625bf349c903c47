# Completion of beanstalkctl(1) for fish: commands, options, and names of tubes of the server.

# Prints the names of tubes.
function __beanstalkctl_tubes
    set -l words (commandline -opc)
    set -l at (contains -i -- -s $words; or contains -i -- --server $words)
    set -l server (string replace --filter --regex -- '^--server=' '' $words)
    if test -n "$at"
        set server $words[(math $at + 1)]
    end
    type -q beanstalkctl; and beanstalkctl (string replace --regex -- '^' '--server=' $server) --timeout 1 tubes 2>/dev/null
end

set -l commands status check top failed jobs job retry move delete flush pause resume drain export import workers bench put tubes
set -l with_tubes failed jobs retry move flush pause resume drain export workers put

complete -c beanstalkctl -f
complete -c beanstalkctl -n "not __fish_seen_subcommand_from $commands" -a "$commands"
complete -c beanstalkctl -n "__fish_seen_subcommand_from $with_tubes" -a '(__beanstalkctl_tubes)'
complete -c beanstalkctl -s s -l server -x -d 'The server: HOST:PORT or unix:PATH'
complete -c beanstalkctl -l json -d 'Print one JSON object a line'
complete -c beanstalkctl -s n -l dry-run -d 'Change nothing'
complete -c beanstalkctl -l yes -d 'Do not ask'
complete -c beanstalkctl -l timeout -x -d 'Time to connect, and for each reply'
complete -c beanstalkctl -s h -l help -d 'Print all commands'
complete -c beanstalkctl -s v -l version -d 'Print the version'
complete -c beanstalkctl -n '__fish_seen_subcommand_from jobs move' -l state -x -a 'ready reserved delayed buried any' -d 'Jobs in this state'
complete -c beanstalkctl -n '__fish_seen_subcommand_from jobs' -l after -x -d 'Jobs after this one'
complete -c beanstalkctl -n '__fish_seen_subcommand_from failed jobs retry move' -l limit -x -d 'At most this many jobs'
complete -c beanstalkctl -n '__fish_seen_subcommand_from job' -l body -d 'The body only'
complete -c beanstalkctl -n '__fish_seen_subcommand_from retry pause resume' -l all -d 'All jobs, or all tubes'
complete -c beanstalkctl -n '__fish_seen_subcommand_from retry' -l delayed -d 'The delayed jobs too'
complete -c beanstalkctl -n '__fish_seen_subcommand_from flush' -l buried -d 'The buried jobs only'
complete -c beanstalkctl -n '__fish_seen_subcommand_from drain' -l held -d 'Until no job is held'
complete -c beanstalkctl -n '__fish_seen_subcommand_from drain' -l within -x -d 'Give up after a time'
complete -c beanstalkctl -n '__fish_seen_subcommand_from export' -l take -d 'Delete what is exported'
complete -c beanstalkctl -n '__fish_seen_subcommand_from import' -l tube -x -a '(__beanstalkctl_tubes)' -d 'Put into this tube'
complete -c beanstalkctl -n '__fish_seen_subcommand_from bench' -l jobs -x -d 'Number of jobs'
complete -c beanstalkctl -n '__fish_seen_subcommand_from bench' -l connections -x -d 'Number of connections'
complete -c beanstalkctl -n '__fish_seen_subcommand_from bench' -l size -x -d 'Size of a body'
complete -c beanstalkctl -n '__fish_seen_subcommand_from put' -l pri -x -d Priority
complete -c beanstalkctl -n '__fish_seen_subcommand_from put' -l delay -x -d Delay
complete -c beanstalkctl -n '__fish_seen_subcommand_from put' -l ttr -x -d 'Time to run'
complete -c beanstalkctl -n '__fish_seen_subcommand_from put' -l key -x -d 'Key of a unique job'
complete -c beanstalkctl -n '__fish_seen_subcommand_from put' -l con -x -d 'Key of jobs that do not run at the same time'
