#!/bin/sh
# Runs the trial of dist/README.md, "A cluster on one machine": the very commands that start etcd, two
# servers and HAProxy, with the ports that they have there. They run in a network and with processes
# of their own, so that no other program has these ports, and that all of them end with the check.
# trial.py then asks a real Prometheus the dashboard and the alerts for clusters.
#
#     trial.sh SERVER     a server with the feature `etcd'
set -eu
server=$(realpath "$1")
. tests/packages/common.sh

needs 'the trial of the cluster is not run' etcd haproxy prometheus python3 unshare
in_own_network 300 'the trial of the cluster is not run' "$server"

block dist/README.md '### A cluster on one machine'
[ "$(wc -l <"$scratch/block")" = 5 ] || fail 'dist/README.md has no five commands for one machine'
sed -n 1p "$scratch/block" | grep -q '^sudo apt install etcd-server haproxy ' ||
	fail 'the first command does not install etcd and HAProxy'
[ "$(sed -n 2p "$scratch/block")" = 'make etcd' ] || fail 'the second command is not make etcd'
sed -n '3,$p' "$scratch/block" >"$scratch/start.sh"

# The same files as in the project, with no data of an earlier trial.
mkdir -p "$scratch/project/target/etcd/release"
ln -s "$PWD/dist" "$scratch/project/dist"
ln -s "$server" "$scratch/project/target/etcd/release/beanstalkd"
(cd "$scratch/project" && . "$scratch/start.sh") >"$scratch/log" 2>&1
python3 -B tests/packages/trial.py || {
	tail -n 30 "$scratch/log" >&2
	exit 1
}
