#!/bin/sh
# Runs the blocks of shell in README.md and the pages of dist, see pages.py, in a network and with processes of
# their own, so that no other program has the ports of the pages. As root, `make install' there changes a
# copy of /usr/local.
#
#     pages.sh DIRECTORY [WITH...]
set -eu
. tests/packages/common.sh

needs 'the blocks of shell in the pages are not run' python3 bash nc curl unshare openssl stunnel
if [ "${IN_OWN_NETWORK:-}" != yes ]; then
	as_root=
	[ "$(id -u)" = 0 ] || as_root='--user --map-root-user'
	own="unshare $as_root --mount --net --pid --mount-proc --fork --kill-child"
	$own true 2>/dev/null || skip_all 'no network of its own is allowed, the blocks of shell in the pages are not run'
	IN_OWN_NETWORK=yes $own timeout 1500 sh "$0" "$@" || exit 1
	exit 0
fi

# The loopback device is down until SIOCSIFFLAGS sets IFF_UP and IFF_RUNNING.
python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 0x41))'
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
