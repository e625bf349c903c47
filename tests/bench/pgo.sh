#!/bin/sh
# Builds target/pgo/release/beanstalkd, optimized for what a server does most: `make pgo`.
#
# The compiler counts which way each branch takes while `beanstalkctl bench` puts, reserves and deletes jobs, over
# one connection and over 50, with and without a binlog. Then it compiles again with these counts. It needs
# llvm-profdata of the compiler's own version: `rustup component add llvm-tools`.
set -eu
cd "$(dirname "$0")/../.."
cargo=${CARGO:-cargo}
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$work"' EXIT

profdata=$(find "$(rustc --print sysroot)" -name llvm-profdata | head -n 1)
if [ -z "$profdata" ]; then
    echo 'pgo: llvm-profdata is missing; install it with: rustup component add llvm-tools' >&2
    exit 1
fi

RUSTFLAGS="-Cprofile-generate=$work/counts" "$cargo" build --release --target-dir target/pgo-counts

# Runs the load on a server with these flags. The counts are written when the server ends.
serve() {
    target/pgo-counts/release/beanstalkd -l "unix:$work/socket" "$@" &
    server=$!
    until [ -S "$work/socket" ]; do sleep 0.1; done
    for connections in 1 50; do
        target/pgo-counts/release/beanstalkctl -s "unix:$work/socket" \
            bench --jobs 100000 --connections "$connections"
    done
    kill "$server"
    wait "$server"
    server=
    rm -f "$work/socket"
}
serve
mkdir "$work/binlog"
serve -b "$work/binlog"

"$profdata" merge -o "$work/merged" "$work"/counts/*.profraw
RUSTFLAGS="-Cprofile-use=$work/merged" "$cargo" build --release --bin beanstalkd --target-dir target/pgo
ls -l target/pgo/release/beanstalkd
