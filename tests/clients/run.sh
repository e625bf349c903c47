#!/bin/sh
# Drives the given server with real client libraries: greenstalk for Python, in a Python environment
# that .ci/run prepares in target/clients, and pheanstalk for PHP with the examples of dist/php. What
# is not installed is skipped, visibly; in .ci/run, which sets CI, it fails.
set -eu
server=$1

skip() {
	if [ -n "${CI-}" ]; then
		echo "$1" >&2
		exit 1
	fi
	echo "SKIPPED: $1"
}

python=target/clients/bin/python
if ! "$python" -c 'import greenstalk' 2>/dev/null; then
	python=python3
fi
if "$python" -c 'import greenstalk' 2>/dev/null; then
	"$python" -B tests/clients/greenstalk_test.py "$server"
	"$python" -B tests/clients/batches_test.py "$server"
else
	skip 'greenstalk is not installed, no Python client is tried'
fi

if command -v php >/dev/null && [ -e /usr/share/php/Pheanstalk/autoload.php ]; then
	php tests/clients/pheanstalk_test.php "$server"
else
	skip 'PHP or pheanstalk is not installed, no PHP client is tried'
fi
