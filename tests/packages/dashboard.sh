#!/bin/sh
# Proves that the dashboard is what Grafana takes: its parts fit together (dashboard.py), and, where
# there is npm, it is of the types that Grafana publishes in @grafana/schema.
set -eu
python3 -B tests/packages/dashboard.py
if ! command -v npm >/dev/null; then
	echo 'SKIPPED: npm is not installed, the dashboard is not compared with the types of Grafana'
	exit 0
fi
home=target/grafana
if [ ! -x "$home/node_modules/.bin/tsc" ]; then
	mkdir -p "$home"
	echo '{"private": true}' >"$home/package.json"
	npm install --silent --no-audit --no-fund --prefix "$home" @grafana/schema@11.6.16 typescript@5.9.3
fi
python3 -B tests/packages/dashboard.py --typescript >"$home/dashboard.ts"
"$home/node_modules/.bin/tsc" --noEmit --strict --skipLibCheck --target es2022 --module esnext \
	--moduleResolution bundler "$home/dashboard.ts"
echo 'the dashboard has the types of @grafana/schema'
