#!/bin/sh
# Feeds targets with what libFuzzer makes of their seeds, one after the other:
#
#   run.sh 'TARGET ...' SECONDS
#
# Each run writes the seeds again, and keeps what libFuzzer adds to them for the next run. All of it is below
# target/fuzz. Ends with 1 when a target has failed.
set -eu
cd "$(dirname "$0")/../.."
targets=$1
seconds=$2
cargo=${CARGO:-cargo}
home=${CARGO_TARGET_DIR:-target}/fuzz

skip() {
	echo "SKIPPED: $1; \`make fuzz' needs a nightly Rust (rustup toolchain install nightly)," \
		"cargo-fuzz (cargo install cargo-fuzz) and a C++ compiler"
	[ "${CI:-}" != true ] || exit 1
	exit 0
}
$cargo +nightly --version >/dev/null 2>&1 || skip 'there is no nightly Rust'
$cargo fuzz --version >/dev/null 2>&1 || skip 'cargo-fuzz is not installed'
command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
	skip 'there is no C++ compiler'

mkdir -p "$home"
home=$(cd "$home" && pwd)
FUZZ_SEEDS=$home/seeds $cargo test --quiet --test fuzz_smoke -- --ignored --exact write_seeds
host=$(rustc +nightly -vV | sed -n 's/^host: //p')

# Nothing that targets reach is unsafe: a sanitizer would find nothing, and take most of the time.
$cargo +nightly fuzz build --fuzz-dir tests/fuzz --target-dir "$home/build" --sanitizer none targets

status=0
for target in $targets; do
	mkdir -p "$home/corpus/$target" "$home/failed"
	echo "$target: $seconds seconds"
	# A record may claim a length of one gigabyte. The target must not allocate it.
	if (
		ulimit -v 1000000
		TARGET=$target exec nice "$home/build/$host/release/targets" \
			-max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
			-artifact_prefix="$home/failed/$target-" "$home/corpus/$target" "$home/seeds/$target"
	) >"$home/$target.log" 2>&1; then
		grep -E 'DONE|number_of_executed_units' "$home/$target.log"
	else
		status=1
		tail -40 "$home/$target.log"
		echo "$target has failed; the input is the newest file in $home/failed, to be fed with"
		echo "  FUZZ_INPUT=FILE cargo test --test fuzz_smoke $target"
	fi
done
exit $status
