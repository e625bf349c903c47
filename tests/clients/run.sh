#!/bin/sh
# Drives the given server with real client libraries: greenstalk for Python, in a Python environment
# that .ci/run prepares in target/clients, and pheanstalk for PHP with the examples of dist/php. What
# is not installed is skipped, visibly; in .ci/run, which sets CI, it fails.
set -eu
server=$1
. tests/packages/common.sh

python=target/clients/bin/python
[ -x "$python" ] || python=python3
if "$python" -c 'import greenstalk' 2>/dev/null; then
	timeout 120 "$python" -B tests/clients/greenstalk_test.py "$server"
else
	skip 'greenstalk is not installed, no Python client is tried'
fi

libraries=/usr/share/php
if has php && [ -e $libraries/Pheanstalk/autoload.php ] && [ -e $libraries/Illuminate/Queue/autoload.php ] &&
	[ -e $libraries/Symfony/Component/Messenger/autoload.php ]; then
	python3 -B tests/harness/server.py "$server" php tests/clients/pheanstalk_test.php
else
	skip 'PHP, pheanstalk or a queue of Laravel or Symfony is not installed, no PHP client is tried'
fi
