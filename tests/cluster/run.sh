#!/bin/sh
# Tests a queue in etcd: the parts of these tests, then each case of check.py.
#
#   tests/cluster/run.sh SERVER [CASE...]
#
# Where etcd, HAProxy, openssl or Python is not installed, this is skipped, visibly; in
# .ci/run, which sets CI, it fails.
set -eu
PATH=$PATH:/usr/sbin
here=$(dirname "$0")

for program in etcd haproxy openssl python3 strace; do
	if ! command -v "$program" >/dev/null; then
		echo "SKIPPED: $program is not installed, no cluster is tried"
		[ "${CI:-}" != true ] || exit 1
		exit 0
	fi
done
python3 -B "$here/checker_test.py"
python3 -B "$here/proxies_test.py"
exec python3 -B "$here/check.py" "$@"
