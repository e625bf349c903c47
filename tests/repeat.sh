#!/bin/sh
# Runs `make check' RUNS times in a row (20 by default) while one endless loop for each processor
# core keeps the machine busy: tests that depend on the speed of the machine fail here. The first
# run that fails ends it, with the last lines of its log, which is kept as target/repeat/run-N.log.
set -eu
cd "$(dirname "$0")/.."
. tests/packages/common.sh

runs=${RUNS:-20}
logs=target/repeat
rm -rf "$logs"
mkdir -p "$logs"
for _ in $(seq "$(nproc)"); do
	start /dev/null sh -c 'while :; do :; done'
done
for run in $(seq "$runs"); do
	log=$logs/run-$run.log
	began=$(date +%s)
	"${MAKE:-make}" check >"$log" 2>&1 </dev/null || {
		tail -n 60 "$log" >&2
		fail "run $run of $runs; this is the end of $log"
	}
	echo "run $run of $runs passed in $(($(date +%s) - began)) s"
done
