#!/bin/sh
# Proves that Prometheus understands the page of --metrics: a real Prometheus scrapes the
# given server (promtool and prometheus come with Debian's package of that name), during a load
# and next to slow and silent connections. Every expression of the dashboard is asked there, and the
# alerts are tried with made-up figures. All on loopback, a minute at most.
set -eu
server=$1
missing() {
	echo "SKIPPED: $1 is not installed, metrics are not tried with Prometheus"
	[ "${CI:-}" = true ] && exit 1
	exit 0
}
for tool in promtool prometheus python3; do
	command -v "$tool" >/dev/null || missing "$tool"
done
promtool check rules dist/prometheus/beanstalkd.rules.yml dist/prometheus/cluster.rules.yml
(cd dist/prometheus && promtool test rules beanstalkd.rules.test.yml cluster.rules.test.yml)
sh tests/packages/dashboard.sh
exec timeout 150 python3 -B tests/packages/metrics.py "$server"
