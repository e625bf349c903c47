#!/bin/sh
# Tests the random faults: plants each bug of this directory in a copy of the sources, and runs
# chaos.py for five minutes. It must find the bug in that time. A patch with a line `Case: NAME` is of a
# bug that this case of check.py must find instead.
#
#   tests/cluster/mutants/run.sh [NAME...]      all bugs, or these
#
# A bug is a patch; its first line describes the bug. A patch that does not apply or compile is an
# error too: it must be adapted to the sources.
set -eu
cd "$(dirname "$0")/../../.."

cargo=${CARGO:-cargo}
seconds=${FOR_SECONDS:-300}
work=target/cluster-mutants
mkdir -p "$work"
CARGO_TARGET_DIR=$(pwd)/$work/target
# A release build that takes less time.
CARGO_PROFILE_RELEASE_LTO=off
CARGO_PROFILE_RELEASE_CODEGEN_UNITS=256
CARGO_PROFILE_RELEASE_OPT_LEVEL=1
CARGO_INCREMENTAL=1
export CARGO_TARGET_DIR CARGO_PROFILE_RELEASE_LTO CARGO_PROFILE_RELEASE_CODEGEN_UNITS \
	CARGO_PROFILE_RELEASE_OPT_LEVEL CARGO_INCREMENTAL

# Copies the sources without bugs.
restore() {
	rm -rf "$work/tree"
	mkdir "$work/tree"
	cp -Rp Cargo.toml Cargo.lock clippy.toml src tests man README.md "$work/tree"
}

# Builds the server in the copy, and copies it to PROGRAM.
build() {
	(cd "$work/tree" && "$cargo" build --quiet --release --features etcd --bin beanstalkd) \
		2>"$work/build.log" && cp "$CARGO_TARGET_DIR/release/beanstalkd" "$1"
}

# Runs random faults for SECONDS with PROGRAM. Fails when they find a failure.
chaos() {
	python3 -B tests/cluster/chaos.py "$1" --seconds "$2" >"$work/chaos.log" 2>&1
}

restore
# The last bug of an earlier run may be in the build, which is newer than the sources.
find "$work/tree/src" -name '*.rs' -exec touch {} +
if ! build "$work/beanstalkd"; then
	cat "$work/build.log"
	exit 1
fi
if ! chaos "$work/beanstalkd" 60; then
	cat "$work/chaos.log"
	echo 'the random faults find a failure without a planted bug'
	exit 1
fi

if [ $# = 0 ]; then
	set -- $(cd tests/cluster/mutants && ls ./*.patch | sed 's|^\./||; s|\.patch$||')
fi
found=0
for name; do
	restore
	patch=tests/cluster/mutants/$name.patch
	if ! patch -s -p1 -F3 -d "$work/tree" <"$patch"; then
		echo "$name: DOES NOT APPLY"
		continue
	fi
	# The restored file is newer than the build: touch the patched one, so that cargo builds it again.
	sed -n 's|^+++ b/||p' "$patch" | (cd "$work/tree" && xargs touch)
	if ! build "$work/$name"; then
		echo "$name: DOES NOT COMPILE"
		cat "$work/build.log"
		continue
	fi
	began=$(date +%s)
	case=$(sed -n 's/^Case: //p' "$patch")
	if [ -n "$case" ]; then
		if python3 -B tests/cluster/check.py "$work/$name" "$case" >"$work/$name.log" 2>&1; then
			echo "$name: NOT FOUND: $(head -n 1 "$patch")"
		else
			found=$((found + 1))
			echo "$name: found in $(($(date +%s) - began)) s: $(grep -m 1 '^FAILED' "$work/$name.log" | cut -c 1-140)"
		fi
		continue
	fi
	chaos "$work/$name" "$seconds" || true
	cp "$work/chaos.log" "$work/$name.log"
	if grep -q '^FAILED with SEED=' "$work/chaos.log"; then
		found=$((found + 1))
		echo "$name: found in $(($(date +%s) - began)) s: $(grep -m 1 '^FAILED with' "$work/chaos.log" | cut -c 1-140)"
	else
		echo "$name: NOT FOUND: $(head -n 1 "$patch")"
	fi
done
echo "$found of $# bugs found"
[ "$found" = $# ]
