#!/bin/sh
# `make release' refuses a tree with changes, and makes of a clean one what CONTRIBUTING.md lists, with checksums
# that are right, programs that need no shared library, and the version of Cargo.toml everywhere. It works on a
# clone, which shares what is built with this tree.
set -eu
cd "$(dirname "$0")/../.."
. tests/packages/common.sh

needs 'no release is tried' git dpkg-buildpackage dh readelf sha256sum
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
git clone --quiet . "$scratch/clone"
mkdir -p target/release-trial
ln -s "$PWD/target/release-trial" "$scratch/clone/target"
made=$scratch/clone/target/published
rm -rf "$made"

echo >>"$scratch/clone/README.md"
if ${MAKE:-make} -C "$scratch/clone" release >"$scratch/said" 2>&1; then fail 'a changed tree is released'; fi
grep -q 'the tree has changes' "$scratch/said" || fail "another reason: $(cat "$scratch/said")"
[ ! -e "$made" ] || fail 'a changed tree was built'
git -C "$scratch/clone" checkout --quiet README.md

${MAKE:-make} -C "$scratch/clone" release >"$scratch/said" 2>&1 || fail "$(tail -n 20 "$scratch/said")"
(cd "$made" && sha256sum --check --quiet SHA256SUMS) || fail 'a checksum is wrong'
for name in beanstalkd-"$version"-*-linux-* beanstalkctl-"$version"-*-linux-* "beanstalkd_*+server$version-*.deb" \
	beanstalkd-server-"$version"-*.oci.tar beanstalkd-server-"$version".crate; do
	# shellcheck disable=SC2086 # A pattern.
	set -- "$made"/$name
	[ $# = 1 ] && [ -s "$1" ] || fail "no single file is $name: $(ls "$made")"
	grep -q "  $(basename "$1")\$" "$made/SHA256SUMS" || fail "no checksum of $1"
done
for program in "$made"/beanstalkd-"$version"-*-linux-* "$made"/beanstalkctl-*; do
	"$program" -v | grep -q "$version" || fail "$program has another version"
	if readelf -l "$program" | grep -q INTERP; then fail "$program needs shared libraries"; fi
done
echo "a release of $version has $(ls "$made" | wc -l) files"
