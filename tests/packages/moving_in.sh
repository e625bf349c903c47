#!/bin/sh
# Moving from C beanstalkd to this server and back, over a binlog, by the very commands that
# README.md shows: they are taken from there and run. Every one of 10,000 jobs of C has to be there as
# it was, whatever it is (ready, delayed, buried, in the hands of a worker, with bytes of any kind), and
# back in C all that was done meanwhile.
#
#     moving_in.sh SERVER
set -eu
new=$1
old=${C_BEANSTALKD:-/usr/bin/beanstalkd}
. tests/packages/common.sh

needs 'moving in is not tried' python3
"$old" -v 2>/dev/null | grep -qx 'beanstalkd [0-9.]*' || skip_all "$old is not C beanstalkd, moving in is not tried"

directory=$scratch/jobs
mkdir "$directory"
# A quarter of them is deleted before the way back.
export JOBS=14000
port=$(free_port)
"$old" -l 127.0.0.1 -p "$port" -b "$directory" &
pid=$!
trap 'kill "$pid" 2>/dev/null || true; tidy_up' EXIT
stay fill

# The commands use $directory, $port, $new and $old, and set $pid.
block README.md 'To this server:'
. "$scratch/block"
client expect
stay work
block README.md 'And back:'
. "$scratch/block"
client expect
echo 'moving in: every job was there, in both directions'
