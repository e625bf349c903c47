#!/bin/sh
# Drives the given server with a real client library, greenstalk for Python, in a Python
# environment that .ci/run prepares in target/clients. Without it this is skipped, visibly.
set -eu
server=$1
python=target/clients/bin/python
if ! "$python" -c 'import greenstalk' 2>/dev/null; then
	python=python3
	if ! "$python" -c 'import greenstalk' 2>/dev/null; then
		echo 'SKIPPED: greenstalk is not installed, no client library is tried'
		exit 0
	fi
fi
exec "$python" tests/clients/greenstalk_test.py "$server"
