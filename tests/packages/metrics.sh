#!/bin/sh
# Checks metrics, dashboard and alerts with the tools that read them, a minute at most:
#
#     metrics.sh SERVER
#
# - promtool accepts the alerts, and runs their unit tests;
# - the dashboard has the types that Grafana publishes (dashboard.py);
# - a real Prometheus, which comes with promtool in Debian's package, scrapes the server (metrics.py).
set -eu
server=$1
. tests/packages/common.sh
needs 'metrics are not tried with Prometheus' promtool prometheus python3

promtool check rules dist/prometheus/beanstalkd.rules.yml dist/prometheus/cluster.rules.yml
(cd dist/prometheus && promtool test rules beanstalkd.rules.test.yml cluster.rules.test.yml)

if has npm; then
	home=target/grafana
	if [ ! -x "$home/node_modules/.bin/tsc" ]; then
		mkdir -p "$home"
		echo '{"private": true}' >"$home/package.json"
		npm install --silent --no-audit --no-fund --prefix "$home" @grafana/schema@11.6.16 typescript@5.9.3
	fi
	python3 -B tests/packages/dashboard.py >"$home/dashboard.ts"
	"$home/node_modules/.bin/tsc" --noEmit --strict --skipLibCheck --target es2022 --module esnext \
		--moduleResolution bundler "$home/dashboard.ts"
	echo 'the dashboard has the types of @grafana/schema'
else
	skip 'npm is not installed, the dashboard is not compared with the types of Grafana'
fi

timeout 150 python3 -B tests/packages/metrics.py "$server"
