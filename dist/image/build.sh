#!/bin/sh
# Packs a static binary of the server into a container image: an archive in the layout of the Open
# Container Initiative, with a second manifest for older tools:
#
#   build.sh BINARY ARCHIVE
#
# The image contains only the binary, beanstalkctl next to it, the licence, a user and a directory for jobs. The script needs
# no container daemon, only sh, tar, gzip, sha256sum and, for the version, the files of this project.
# The same binary and the same SOURCE_DATE_EPOCH (by default the time of the last commit) give the
# same archive, byte for byte.
set -eu
cd "$(dirname "$0")/../.."
binary=$1
archive=$2

# The user of the server in the image, and its directory for jobs.
user=11300
jobs=var/lib/beanstalkd

version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
title=$(sed -n 's/^name = "\(.*\)"/\1/p' Cargo.toml | head -1)
description=$(sed -n 's/^description = "\(.*\)"/\1/p' Cargo.toml)
licence=$(sed -n 's/^license = "\(.*\)"/\1/p' Cargo.toml)
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
created=$(date -u -d "@$epoch" +%Y-%m-%dT%H:%M:%SZ)

# The name of the architecture in the Go language, which image manifests use.
variant=
target=$(cat "$binary.target")
case $target in
x86_64-*) architecture=amd64 ;;
i?86-*) architecture=386 ;;
aarch64-*) architecture=arm64 variant=v8 ;;
armv7*) architecture=arm variant=v7 ;;
arm*) architecture=arm variant=v6 ;;
riscv64*) architecture=riscv64 ;;
powerpc64le-*) architecture=ppc64le ;;
s390x-*) architecture=s390x ;;
loongarch64-*) architecture=loong64 ;;
*)
	echo "build.sh: no image has a name for $target" >&2
	exit 1
	;;
esac
[ -z "$variant" ] || variant=",\"variant\":\"$variant\""

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' INT TERM HUP

# Packs reproducibly: sorted, with numeric owners, and with one modification time.
pack() (
	cd "$1"
	shift
	tar --format=ustar --sort=name --mtime="@$epoch" --numeric-owner --mode=a+rX,u+w,go-w \
		--create --file=- "$@"
)

digest() {
	sha256sum "$1" | cut -d ' ' -f 1
}

# ---- The root ----

root=$scratch/root
umask 022
mkdir -p "$root/usr/bin" "$root/usr/share/doc/beanstalkd-server" "$root/etc"
install -m 755 "$binary" "$root/usr/bin/beanstalkd"
install -m 755 "$(dirname "$binary")/beanstalkctl" "$root/usr/bin/beanstalkctl"
install -m 644 LICENSE "$root/usr/share/doc/beanstalkd-server/LICENSE"
# The server needs only the numbers. With names, -u accepts them and tools show them.
printf 'root:x:0:0:root:/:\nbeanstalkd:x:%s:%s:beanstalkd:/%s:\n' $user $user $jobs \
	>"$root/etc/passwd"
printf 'root:x:0:\nbeanstalkd:x:%s:\n' $user >"$root/etc/group"
# Most container runtimes replace this file; it is for those that do not.
printf '127.0.0.1\tlocalhost\n::1\tlocalhost\n' >"$root/etc/hosts"
pack "$root" --owner=0 --group=0 etc usr >"$scratch/files.tar"
mkdir -p "$scratch/jobs/$jobs"
pack "$scratch/jobs" --owner=0 --group=0 --no-recursion var var/lib >"$scratch/above.tar"
pack "$scratch/jobs" --owner=$user --group=$user --no-recursion $jobs >"$scratch/jobs.tar"
# --concatenate drops the two zero blocks at the end of each archive except the last.
layer=$scratch/layer.tar
tar --create --file="$layer" --files-from=/dev/null
tar --concatenate --file="$layer" "$scratch/files.tar"
tar --concatenate --file="$layer" "$scratch/above.tar"
tar --concatenate --file="$layer" "$scratch/jobs.tar"
layer_id=$(digest "$layer")
gzip -9 -n <"$layer" >"$layer.gz"

# ---- Metadata ----

labels="\"org.opencontainers.image.title\":\"$title\",\
\"org.opencontainers.image.description\":\"$description\",\
\"org.opencontainers.image.version\":\"$version\",\
\"org.opencontainers.image.licenses\":\"$licence\",\
\"org.opencontainers.image.created\":\"$created\""

cat >"$scratch/config" <<JSON
{"created":"$created","architecture":"$architecture"$variant,"os":"linux",\
"config":{"User":"$user:$user","ExposedPorts":{"11300/tcp":{}},\
"Entrypoint":["/usr/bin/beanstalkd"],"Volumes":{"/$jobs":{}},"WorkingDir":"/",\
"Labels":{$labels},"StopSignal":"SIGTERM"},\
"rootfs":{"type":"layers","diff_ids":["sha256:$layer_id"]},\
"history":[{"created":"$created","created_by":"dist/image/build.sh"}]}
JSON

# Moves a file to the blobs and sets $added to its digest and $length to its length: blob FILE
blobs=$scratch/image/blobs/sha256
mkdir -p "$blobs"
blob() {
	added=$(digest "$1")
	length=$(wc -c <"$1")
	mv "$1" "$blobs/$added"
}

oci=application/vnd.oci.image
blob "$layer.gz"
layer_digest=$added
layer_entry="{\"mediaType\":\"$oci.layer.v1.tar+gzip\",\"digest\":\"sha256:$added\",\"size\":$length}"
blob "$scratch/config"
config_digest=$added
config_entry="{\"mediaType\":\"$oci.config.v1+json\",\"digest\":\"sha256:$added\",\"size\":$length}"
cat >"$scratch/manifest" <<JSON
{"schemaVersion":2,"mediaType":"$oci.manifest.v1+json","config":$config_entry,\
"layers":[$layer_entry],"annotations":{$labels}}
JSON
blob "$scratch/manifest"
cat >"$scratch/image/index.json" <<JSON
{"schemaVersion":2,"mediaType":"$oci.index.v1+json","manifests":[\
{"mediaType":"$oci.manifest.v1+json","digest":"sha256:$added","size":$length,\
"platform":{"architecture":"$architecture"$variant,"os":"linux"},\
"annotations":{"org.opencontainers.image.ref.name":"$version"}}]}
JSON
printf '{"imageLayoutVersion":"1.0.0"}\n' >"$scratch/image/oci-layout"
# `docker load' before version 25 reads this one only.
cat >"$scratch/image/manifest.json" <<JSON
[{"Config":"blobs/sha256/$config_digest","RepoTags":["beanstalkd-server:$version"],\
"Layers":["blobs/sha256/$layer_digest"]}]
JSON

mkdir -p "$(dirname "$archive")"
pack "$scratch/image" --owner=0 --group=0 blobs index.json manifest.json oci-layout >"$archive.new"
mv "$archive.new" "$archive"
echo "$archive: $(wc -c <"$archive") bytes, $architecture, sha256:$added"
