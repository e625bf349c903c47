#!/bin/sh
# Builds what is published of a version, from a clean tree only: the static programs, the Debian package, the
# archive of the container image, the crate, and their checksums.
#
#     build.sh DIRECTORY     is made anew
set -eu
cd "$(dirname "$0")/../.."
directory=$1
make=${MAKE:-make}
cargo=${CARGO:-cargo}

changed=$(git status --porcelain)
if [ -n "$changed" ]; then
	echo "$changed" >&2
	echo 'release: the tree has changes or new files; commit or remove them first' >&2
	exit 1
fi
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
# Archives have the time of the commit, so that another build of it gives the same.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

$make static deb image
$cargo package --no-verify --quiet

rm -rf "$directory"
mkdir -p "$directory"
target=$(cat target/static/beanstalkd.target)
for program in beanstalkd beanstalkctl; do
	cp "target/static/$program" "$directory/$program-$version-$target"
done
cp target/deb/beanstalkd_*.deb "$directory"
cp target/image/beanstalkd.oci.tar "$directory/beanstalkd-server-$version-$(uname -m).oci.tar"
cp "target/package/beanstalkd-server-$version.crate" "$directory"
(cd "$directory" && sha256sum -- * >SHA256SUMS)

commit=$(git rev-parse --short HEAD)
[ "$(git describe --exact-match 2>/dev/null)" = "v$version" ] ||
	echo "release: commit $commit has no tag v$version; this is a trial"
if grep -q "^## $version (unreleased)" CHANGELOG.md; then
	echo "release: CHANGELOG.md has no date for $version; this is a trial"
fi
echo "$directory: version $version of commit $commit"
cat "$directory/SHA256SUMS"
