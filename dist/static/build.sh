#!/bin/sh
# Builds the server as one static binary:
#
#   build.sh BINARY
#
# with musl where Rust has that target installed (rustup target add), else with glibc, for the
# machine's own architecture; STATIC_TARGET names another target. A plain stable Rust does, and for
# glibc its static library, which Debian has in libc6-dev.
set -eu
cd "$(dirname "$0")/../.."
binary=$1
cargo=${CARGO:-cargo}
rustc=${RUSTC:-rustc}

host=$($rustc -vV | sed -n 's/^host: //p')
target=${STATIC_TARGET:-}
if [ -z "$target" ]; then
	target=$(echo "$host" | sed 's/-linux-gnu/-linux-musl/')
	[ -d "$($rustc --print sysroot)/lib/rustlib/$target/lib" ] || target=$host
fi

# Much of it is the C library and what Rust brings along: what is left is made small rather than fast,
# which costs a twentieth of a microsecond a command.
CARGO_PROFILE_RELEASE_OPT_LEVEL=s
# Where its parts stand is decided when it starts. The list of places to put right is a hundredth of
# its size when packed, which glibc can read since 2.36, and the musl of Rust.
pack_relocations=yes
case $target in
*-gnu*)
	version=$(getconf GNU_LIBC_VERSION | sed -n 's/^glibc 2\.\([0-9]*\).*/\1/p')
	[ "${version:-0}" -ge 36 ] || pack_relocations=no
	;;
*-musl*) CARGO_PROFILE_RELEASE_OPT_LEVEL=z ;;
esac
export CARGO_PROFILE_RELEASE_OPT_LEVEL
flags='-C target-feature=+crt-static'
if [ "$pack_relocations" = yes ]; then
	flags="$flags -C link-arg=-Wl,-z,pack-relative-relocs"
fi
flags="$flags -C link-arg=-Wl,--no-eh-frame-hdr -C link-arg=-Wl,-T,$PWD/dist/static/discard.ld"

RUSTFLAGS="${RUSTFLAGS:-} $flags" \
	$cargo build --release --bin beanstalkd --target "$target" --target-dir target
mkdir -p "$(dirname "$binary")"
cp "target/$target/release/beanstalkd" "$binary.new"
mv "$binary.new" "$binary"
echo "$target" >"$binary.target"
echo "$binary: $(wc -c <"$binary") bytes, for $target"
