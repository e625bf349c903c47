#!/bin/sh
# Tests the simulation: plants each bug of this directory in a copy of the sources, and runs the
# simulation for one minute. It must find the bug in that time. A patch with a line `Test: PROGRAM
# NAME` is of a bug that this test must find instead.
#
#   tests/mutants/run.sh [NAME...]      all bugs, or these
#
# A bug is a patch; its first line describes the bug. A patch that does not apply or compile is an
# error too: it must be adapted to the sources.
set -eu
cd "$(dirname "$0")/../.."

cargo=${CARGO:-cargo}
work=target/mutants
mkdir -p "$work"
CARGO_TARGET_DIR=$(pwd)/$work/target
export CARGO_TARGET_DIR

# Copies the sources without bugs.
restore() {
	rm -rf "$work/tree"
	mkdir "$work/tree"
	cp -Rp Cargo.toml Cargo.lock clippy.toml src tests man README.md "$work/tree"
}

# Builds the simulation in the copy, and prints its path.
build() {
	(cd "$work/tree" && "$cargo" test --quiet --profile simulation --test simulation --no-run \
		--message-format=json 2>"../build.log") |
		sed -n 's/.*"executable":"\([^"]*simulation-[^"]*\)".*/\1/p'
}

# Runs the simulation PROGRAM for SECONDS. Fails when it finds a failure, or does not end.
simulate() {
	NO_SHRINK=1 FOR_SECONDS=$2 timeout $(($2 + 60)) "$1" simulate --ignored --nocapture \
		>"$work/simulation.log" 2>&1
}

# Runs the tests PROGRAM whose names have NAME. Fails when one of them fails.
run_test() {
	(cd "$work/tree" && timeout 120 "$cargo" test --quiet --profile simulation --test "$1" -- "$2") \
		>"$work/simulation.log" 2>&1
}

restore
# The last bug of an earlier run may be in the build, which is newer than the sources.
find "$work/tree/src" -name '*.rs' -exec touch {} +
program=$(build)
if ! simulate "$program" 5; then
	cat "$work/simulation.log"
	echo 'the simulation fails without a planted bug'
	exit 1
fi

if [ $# = 0 ]; then
	set -- $(cd tests/mutants && ls ./*.patch | sed 's|^\./||; s|\.patch$||')
fi
found=0
for name; do
	restore
	if ! patch -s -p1 -F3 -d "$work/tree" <"tests/mutants/$name.patch"; then
		echo "$name: DOES NOT APPLY"
		continue
	fi
	# The restored file is newer than the build: touch the patched one, so that cargo builds it again.
	sed -n 's|^+++ b/||p' "tests/mutants/$name.patch" | (cd "$work/tree" && xargs touch)
	began=$(date +%s)
	test=$(sed -n 's/^Test: //p' "tests/mutants/$name.patch")
	if [ -n "$test" ]; then
		# shellcheck disable=SC2086 # two words
		if ! run_test $test && grep -q panicked "$work/simulation.log"; then
			found=$((found + 1))
			echo "$name: found in $(($(date +%s) - began)) s: $(grep -m 1 panicked "$work/simulation.log" | cut -c 1-140)"
		else
			echo "$name: NOT FOUND: $(head -n 1 "tests/mutants/$name.patch")"
		fi
		continue
	fi
	program=$(build)
	if [ -z "$program" ]; then
		echo "$name: DOES NOT COMPILE"
		cat "$work/build.log"
		continue
	fi
	began=$(date +%s)
	status=0
	simulate "$program" 60 || status=$?
	if [ "$status" != 124 ] && ! grep -q 'SEED=' "$work/simulation.log"; then
		echo "$name: NOT FOUND: $(head -n 1 "tests/mutants/$name.patch")"
	else
		found=$((found + 1))
		echo "$name: found in $(($(date +%s) - began)) s: $(grep -m 1 -e panicked -A 1 -e '^SEED' "$work/simulation.log" | tail -n 1 | cut -c 1-140)"
	fi
done
echo "$found of $# bugs found"
[ "$found" = $# ]
