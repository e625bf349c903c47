#!/bin/sh
# Moving from C beanstalkd to this server and back, over a binlog, by the very commands that
# README.md shows: they are taken from there and run. Every job of C has to be there as it was,
# whatever it is (ready, delayed, buried, in the hands of a worker, with bytes of any kind), and
# back in C all that was done meanwhile.
#
#     moving_in.sh SERVER [C_BEANSTALKD]
set -eu
new=$1
old=${2:-/usr/bin/beanstalkd}
jobs=tests/packages/jobs.py

skip() {
	echo "SKIPPED: $1, moving in is not tried"
	if [ "${CI:-}" = true ]; then exit 1; fi
	exit 0
}
command -v python3 >/dev/null || skip 'python3 is not installed'
case $("$old" -v 2>/dev/null || true) in
*beanstalkd-server* | '') skip "$old is not C beanstalkd" ;;
beanstalkd*) ;;
*) skip "$old is not C beanstalkd" ;;
esac

room=$(mktemp -d)
pid=
clients=
finish() {
	if [ -n "$pid" ]; then kill "$pid" 2>/dev/null || true; fi
	for client in $clients; do kill "$client" 2>/dev/null || true; done
	rm -rf "$room"
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

# The block of shell after this line of README.md.
block_after() {
	sed -n "/^$1\$/,/^\`\`\`\$/p" README.md | sed '1,/^```sh$/d; /^```$/d' >"$room/block"
	if [ ! -s "$room/block" ]; then
		echo "README.md has no block of shell after: $1"
		exit 1
	fi
	. "$room/block"
}

# A client that stays until its server ends, as the worker of a reserved job.
stay() {
	python3 "$jobs" "$room/manifest" "127.0.0.1:$port" "$1" >"$room/$1" &
	clients="$clients $!"
	tries=0
	while [ ! -s "$room/$1" ]; do
		tries=$((tries + 1))
		if [ "$tries" -gt 1200 ] || ! kill -0 "$!" 2>/dev/null; then
			echo "$1: the client has ended, or has not done its work within a minute"
			exit 1
		fi
		sleep 0.05
	done
}

expect() {
	python3 "$jobs" "$room/manifest" "127.0.0.1:$port" expect
}

directory=$room/jobs
mkdir "$directory"
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$old" -l 127.0.0.1 -p "$port" -b "$directory" &
pid=$!
stay fill

block_after 'To this server:'
expect
stay work

block_after 'And back:'
expect
echo 'moving in: every job was there, in both directions'
