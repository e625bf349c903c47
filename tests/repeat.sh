#!/bin/sh
# Runs `make check' RUNS times in a row (20 by default) while one endless loop for each processor
# core keeps the machine busy: tests that depend on the speed of the machine fail here. The first
# run that fails ends it, with the last lines of its log, which is kept as target/repeat/run-N.log.
set -u
cd "$(dirname "$0")/.." || exit 1
runs=${RUNS:-20}
case $runs in
'' | *[!0-9]* | 0)
	echo "RUNS=$runs: not a number of runs" >&2
	exit 2
	;;
esac
logs=target/repeat
rm -rf "$logs"
mkdir -p "$logs" || exit 1

loops=
check=
finish() {
	trap '' HUP INT TERM
	# The run has a process group of its own, once setsid has made it: all of it ends.
	if [ -n "$check" ]; then kill -s TERM -- "-$check" 2>/dev/null || kill "$check" 2>/dev/null; fi
	for loop in $loops; do kill "$loop" 2>/dev/null; done
	wait 2>/dev/null
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

cores=$(getconf _NPROCESSORS_ONLN)
core=0
while [ "$core" -lt "$cores" ]; do
	(while :; do :; done) &
	loops="$loops $!"
	core=$((core + 1))
done

run=1
while [ "$run" -le "$runs" ]; do
	log=$logs/run-$run.log
	start=$(date +%s)
	setsid "${MAKE:-make}" check >"$log" 2>&1 </dev/null &
	check=$!
	status=0
	wait "$check" || status=$?
	check=
	span="$(($(date +%s) - start)) s"
	if [ "$status" -ne 0 ]; then
		echo "run $run of $runs failed with status $status after $span; the end of $log:" >&2
		tail -n 60 "$log" >&2
		exit 1
	fi
	echo "run $run of $runs passed in $span"
	run=$((run + 1))
done
