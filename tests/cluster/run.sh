#!/bin/sh
# Tests a queue in etcd: the parts of these tests, then each case of check.py.
#
#   tests/cluster/run.sh SERVER [CASE...]
set -eu
PATH=$PATH:/usr/sbin
. tests/packages/common.sh

needs 'no cluster is tried' etcd haproxy openssl python3 strace
python3 -B tests/cluster/checker_test.py
python3 -B tests/cluster/proxies_test.py
python3 -B tests/cluster/check.py "$@"
