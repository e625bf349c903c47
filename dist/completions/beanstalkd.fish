# Completion of the flags of beanstalkd(1) and of their arguments for fish.

# Prints the given addresses, and paths of Unix sockets.
function __beanstalkd_addresses
    printf '%s\n' $argv unix:
    set -l path (string match -r '^(?:-l|--listen=|--metrics=)?unix:(.*)' -- (commandline -ct))[2]
    and printf 'unix:%s\n' (__fish_complete_path $path | string replace -r '\t.*' '')
end

complete -c beanstalkd -f
complete -c beanstalkd -s b -l binlog-dir -x -a '(__fish_complete_directories) etcd:// etcds://' -d 'Keep jobs in a binlog, in this directory or etcd'
complete -c beanstalkd -s f -l fsync-ms -x -d 'Sync the binlog at most this many ms after a write'
complete -c beanstalkd -s F -l no-fsync -d 'Never sync the binlog'
complete -c beanstalkd -s l -l listen -x -a '(__beanstalkd_addresses 127.0.0.1 ::1 localhost)' -d 'Listen on this address or path'
complete -c beanstalkd -s p -l port -x -d 'Listen on this TCP port'
complete -c beanstalkd -s s -l binlog-file-size -x -d 'Size of a binlog file in bytes'
complete -c beanstalkd -l binlog-limit -x -d 'Limit the size of the binlog in bytes'
complete -c beanstalkd -l lease-ttl -x -d 'Seconds until another server becomes active'
complete -c beanstalkd -l etcd-quota -x -d 'Quota of etcd in bytes'
complete -c beanstalkd -l etcd-ca -r -F -d 'Trust these certificate authorities'
complete -c beanstalkd -l etcd-cert -r -F -d 'Client certificate for etcd'
complete -c beanstalkd -l etcd-key -r -F -d 'Private key of the client certificate'
complete -c beanstalkd -l import -x -a '(__fish_complete_directories)' -d 'Copy this binlog into etcd'
complete -c beanstalkd -l export -x -a '(__fish_complete_directories)' -d 'Copy the binlog in etcd into this directory'
complete -c beanstalkd -l leave -r -F -d 'End the lease of a killed server'
complete -c beanstalkd -l socket-mode -x -a '600 660 666' -d 'Permissions of Unix sockets'
complete -c beanstalkd -s u -l user -x -a '(__fish_complete_users)' -d 'Become this user after binding'
complete -c beanstalkd -s z -l max-job-size -x -d 'Size of the largest job allowed in bytes'
complete -c beanstalkd -l bury-after -x -d 'Bury a job that came back this often'
complete -c beanstalkd -l body-cache -x -d 'Limit the memory of bodies in bytes'
complete -c beanstalkd -l max-memory -x -d 'Limit the memory of jobs in bytes'
complete -c beanstalkd -l max-connections -x -d 'Limit the number of clients'
complete -c beanstalkd -l metrics -x -a '(__beanstalkd_addresses 127.0.0.1:)' -d 'Serve metrics and a status page over HTTP'
complete -c beanstalkd -l metrics-tubes -x -d 'Number of tubes in the metrics'
complete -c beanstalkd -l log-format -x -a 'text json' -d 'Format of log lines'
complete -c beanstalkd -l check -d 'Check the binlog and print a summary'
complete -c beanstalkd -l dump -d 'Print the jobs of the binlog'
complete -c beanstalkd -s c -d 'Ignored'
complete -c beanstalkd -s n -d 'Ignored'
complete -c beanstalkd -s v -l version -d 'Print the version'
complete -c beanstalkd -s V -l verbose -d 'Increase verbosity'
complete -c beanstalkd -s h -l help -d 'Print all flags'
