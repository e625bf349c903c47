#!/bin/sh
# Builds the Debian package in target/deb from a binary, with beanstalkctl next to it. debhelper works on a tree that has only the
# installed files, and this directory as its debian/.
#
#     build.sh BINARY
#
# FEATURES=etcd is set if the binary was built with that feature. The version of the package ends in
# +etcd then. The copyright file has the crates of the usual binary only, so that this package is for
# your own machines.
#
# The binary links the system's C library dynamically, so that Debian's security updates apply. The
# package depends on the library versions that it was built with, or newer.
set -eu
cd "$(dirname "$0")/../.."
binary=$1
features=${FEATURES:-}

for tool in dpkg-buildpackage dh; do
	if ! command -v "$tool" >/dev/null; then
		echo "SKIPPED: $tool is not installed (packages dpkg-dev and debhelper), no package is built"
		if [ "${CI:-}" = true ]; then exit 1; fi
		exit 0
	fi
done

# The version in the changelog of the package must be that of Cargo.toml.
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
stands_in_for=$("$binary" -v | sed 's/^beanstalkd \([0-9.]*\) .*/\1/')
package_version=$(sed -n '1s/^beanstalkd (\(.*\)) .*/\1/p' dist/debian/changelog)
case $package_version in
"$stands_in_for+server$version-"*) ;;
*)
	echo "dist/debian/changelog has $package_version, not $stands_in_for+server$version-1"
	exit 1
	;;
esac
# The copyright file must name every crate that is linked into the usual binary.
for crate in $(cargo tree --edges normal --prefix none --format '{p}' | sed 's/ .*//' | sort -u); do
	if [ "$crate" != beanstalkd-server ] && ! grep -q "^Files: crates/$crate/\*\$" dist/debian/copyright; then
		echo "dist/debian/copyright does not name $crate"
		exit 1
	fi
done

tree=target/deb/beanstalkd-$stands_in_for+server$version
rm -rf target/deb/*.deb target/deb/*.buildinfo target/deb/*.changes "$tree"
mkdir -p "$tree/defaults" "$tree/completions"
cp -R dist/debian "$tree/debian"
rm "$tree/debian/build.sh"
cp dist/systemd/beanstalkd.service dist/systemd/beanstalkd.socket "$tree/debian"
cp dist/default/beanstalkd "$tree/defaults"
for completion in dist/completions/*; do
	if [ -e "$completion" ]; then cp "$completion" "$tree/completions"; fi
done
cp -R man README.md CHANGELOG.md "$binary" "$(dirname "$binary")/beanstalkctl" "$tree"
if [ -n "$features" ]; then
	package_version=$package_version+$features
	sed -i "1s/(.*)/($package_version)/" "$tree/debian/changelog"
fi

if ! (cd "$tree" && dpkg-buildpackage --build=binary --no-sign --no-pre-clean) >target/deb/build.log 2>&1; then
	tail -n 30 target/deb/build.log
	exit 1
fi
echo "target/deb/beanstalkd_${package_version}_$(dpkg --print-architecture).deb"
