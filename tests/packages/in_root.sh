#!/bin/sh
# A machine of its own inside this one, as far as a package can see: a root, with namespaces for
# processes, mounts, network, names and control groups, in which the given command is process 1. What it
# starts ends with it, and nothing outside changes: /proc/sys and /sys are read-only.
#
#     unshare --mount in_root.sh ROOT COMMAND...
set -eu

if [ "${IN_ROOT:-}" != yes ]; then
	# systemd makes control groups: below one of their own, which goes afterwards.
	groups=$(mktemp -d)
	mount --make-rprivate /
	mount -t cgroup2 cgroup2 "$groups"
	own=$groups/beanstalkd-check.$$
	mkdir "$own"
	echo $$ >"$own/cgroup.procs"
	IN_ROOT=yes unshare --mount --pid --net --uts --ipc --cgroup --fork --kill-child "$0" "$@" || true
	echo $$ >"$groups/cgroup.procs"
	# The last of its processes may take a moment to go.
	tries=0
	until find "$own" -depth -type d -exec rmdir {} + 2>/dev/null || [ "$tries" -gt 100 ]; do
		tries=$((tries + 1))
		sleep 0.05
	done
	umount "$groups"
	rmdir "$groups"
	exit 0
fi

root=$1
shift
# There is no loopback device to talk over until it is up: SIOCSIFFLAGS with IFF_UP and IFF_RUNNING.
python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 0x41))'
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom; do
	: >"$root/dev/$device"
	mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm" "$root/run/lock"
mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
cd "$root"
mkdir -p old-root
pivot_root . old-root
umount -l /old-root
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"
