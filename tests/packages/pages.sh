#!/bin/sh
# Runs the blocks of shell in README.md and the pages of dist, see pages.py, in a network and with processes of
# their own, so that no other program has the ports of the pages. As root, `make install' there changes a
# copy of /usr/local.
#
#     pages.sh DIRECTORY [WITH...]
set -eu
. tests/packages/common.sh

needs 'the blocks of shell in the pages are not run' python3 bash nc curl unshare openssl stunnel
in_own_network 1500 'the blocks of shell in the pages are not run' "$@"
# What the examples write into /tmp and install into /usr/local is in memory, and seen here only.
layers=$scratch/layers
mkdir "$layers"
mount -t tmpfs tmpfs "$layers"
for place in usr/local tmp; do
	name=$(basename $place)
	mkdir "$layers/$name" "$layers/$name.work"
	mount -t overlay overlay -o "lowerdir=/$place,upperdir=$layers/$name,workdir=$layers/$name.work" /$place
done
python3 -B tests/packages/pages.py "$@"
