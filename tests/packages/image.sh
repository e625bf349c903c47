#!/bin/sh
# Proves what is promised of the image for containers:
#
#   image.sh ARCHIVE
#
# - skopeo and umoci take it, and its configuration is what dist/README.md says;
# - what docker loads is the same as what the others do;
# - unpacked, it serves as its user, with jobs in its volume, and as the first process of a
#   container it ends with 143 on SIGTERM;
# - built again, elsewhere and with another mask, it is the same byte for byte.
set -eu
cd "$(dirname "$0")/../.."
archive=$(realpath "$1")
. tests/packages/common.sh

[ "$(id -u)" = 0 ] || skip_all 'not root, the image is not checked'
needs 'the image is not checked' python3 skopeo umoci unshare
unshare --pid --fork true 2>/dev/null || skip_all 'no process can be the first here, the image is not checked'

mkdir "$scratch/layout"
tar -xf "$archive" -C "$scratch/layout"

skopeo_takes_it() {
	skopeo inspect "oci-archive:$archive:$version" >"$scratch/inspected"
	# It checks digests and sizes on the way.
	skopeo copy --quiet "oci-archive:$archive" "dir:$scratch/copied"
	skopeo copy --quiet "docker-archive:$archive" "dir:$scratch/loaded"
	echo "skopeo $(skopeo --version | awk '{ print $3 }') takes it, as docker load does"
}

unpack() {
	umoci unpack --image "$scratch/layout:$version" "$scratch/bundle" >/dev/null
	echo 'umoci takes it'
	root=$scratch/bundle/rootfs
	chmod 755 "$scratch/bundle" "$root"
	(cd "$root" && find . -mindepth 1 -printf '%M %U:%G %p\n' | sort -k 3) >"$scratch/files"
	cat >"$scratch/promised" <<-'FILES'
		drwxr-xr-x 0:0 ./etc
		-rw-r--r-- 0:0 ./etc/group
		-rw-r--r-- 0:0 ./etc/hosts
		-rw-r--r-- 0:0 ./etc/passwd
		drwxr-xr-x 0:0 ./usr
		drwxr-xr-x 0:0 ./usr/bin
		-rwxr-xr-x 0:0 ./usr/bin/beanstalkctl
		-rwxr-xr-x 0:0 ./usr/bin/beanstalkd
		drwxr-xr-x 0:0 ./usr/share
		drwxr-xr-x 0:0 ./usr/share/doc
		drwxr-xr-x 0:0 ./usr/share/doc/beanstalkd-server
		-rw-r--r-- 0:0 ./usr/share/doc/beanstalkd-server/LICENSE
		drwxr-xr-x 0:0 ./var
		drwxr-xr-x 0:0 ./var/lib
		drwxr-xr-x 11300:11300 ./var/lib/beanstalkd
	FILES
	diff "$scratch/promised" "$scratch/files" || fail 'other files are in it'
}

# The server in the root of the image, as a runtime would start it: in_container FLAGS...
in_container() {
	start "$scratch/log" chroot --userspec=11300:11300 --groups= "$root" /usr/bin/beanstalkd \
		-V -l 127.0.0.1 -p 0 "$@"
}

serves() {
	in_container -b /var/lib/beanstalkd -z 1000000
	work "$(port "$scratch/log")"
	work "$(port "$scratch/log")" leave
	[ "$(stat -c %u "$root/var/lib/beanstalkd/binlog.1")" = 11300 ] || fail 'jobs are not its own'
	end KILL || true
	in_container -b /var/lib/beanstalkd -u beanstalkd
	work "$(port "$scratch/log")" take
	end TERM || fail "it ended with $status"
	echo 'it serves as its user and keeps jobs in its volume'
}

ends_as_the_first_process() {
	start "$scratch/log" unshare --pid --fork --kill-child \
		chroot --userspec=11300:11300 --groups= "$root" /usr/bin/beanstalkd -V -l 127.0.0.1 -p 0
	work "$(port "$scratch/log")"
	kill -TERM "$(cat "/proc/$pid/task/$pid/children")"
	wait_until has_ended
	status=0
	wait "$pid" || status=$?
	[ "$status" = 143 ] || fail "as the first process it ended with $status on SIGTERM"
	echo 'as the first process it ends with 143 on SIGTERM'
}

is_reproducible() {
	mkdir "$scratch/elsewhere"
	(
		umask 077
		export SOURCE_DATE_EPOCH=1700000000
		for number in 1 2; do
			TMPDIR=$scratch/elsewhere TZ=Asia/Tokyo sh dist/image/build.sh target/static/beanstalkd \
				"$scratch/again$number" >/dev/null
			umask 022
		done
	)
	cmp "$scratch/again1" "$scratch/again2" || fail 'built twice it is not the same'
	sh dist/image/build.sh target/static/beanstalkd "$scratch/again" >/dev/null
	cmp "$archive" "$scratch/again" || fail 'built again it is not the same'
	echo 'built again it is the same'
}

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
skopeo_takes_it
unpack
python3 tests/packages/image.py "$scratch" "$version"
serves
ends_as_the_first_process
is_reproducible
echo "$(wc -c <"$archive") bytes"
