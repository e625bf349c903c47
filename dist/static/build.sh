#!/bin/sh
# Builds the server as one static binary, and beanstalkctl next to it:
#
#   build.sh BINARY
#
# with musl if Rust has that target installed (rustup target add), otherwise with glibc, for the
# architecture of this machine. STATIC_TARGET names another target. It needs a stable Rust, and for
# glibc the static library of Debian's libc6-dev.
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

# Optimises for size instead of speed, which costs about 0.05 us a command.
CARGO_PROFILE_RELEASE_OPT_LEVEL=s
# Packed relocations take a hundredth of the size. glibc reads them since 2.36, and so does the musl
# of Rust.
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
	$cargo build --release --bins --target "$target" --target-dir target
mkdir -p "$(dirname "$binary")"
cp "target/$target/release/beanstalkd" "$binary.new"
mv "$binary.new" "$binary"
cp "target/$target/release/beanstalkctl" "$(dirname "$binary")"
echo "$target" >"$binary.target"
echo "$binary: $(wc -c <"$binary") bytes, for $target"
