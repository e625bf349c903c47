#!/bin/sh
# The units of systemd in dist/systemd: systemd finds no fault with them, the service may do little
# (a score of 1.5 or lower), and its command line, with the defaults of dist/default, serves the
# sockets that it is given. Needs no systemd that runs; with one, tests/packages/deb.sh starts them.
#
#     units.sh SERVER
set -eu
server=$(realpath "$1")
highest_score=15

for tool in systemd-analyze systemd-socket-activate python3; do
	if ! command -v "$tool" >/dev/null; then
		echo "SKIPPED: $tool is not installed, the units are not checked"
		if [ "${CI:-}" = true ]; then exit 1; fi
		exit 0
	fi
done

room=$(mktemp -d)
pid=
finish() {
	if [ -n "$pid" ]; then kill "$pid" 2>/dev/null || true; fi
	rm -rf "$room"
}
trap finish EXIT
trap 'exit 1' HUP INT TERM

fail() {
	echo "$1"
	exit 1
}

# systemd-analyze looks for the program and the pages: those of this tree, not those that happen
# to be installed.
mkdir -p "$room/units" "$room/man/man1" "$room/man/man7"
cp man/beanstalkd.1 "$room/man/man1"
cp man/beanstalkd-protocol.7 "$room/man/man7"
sed "s|^ExecStart=/usr/bin/beanstalkd |ExecStart=$server |" dist/systemd/beanstalkd.service \
	>"$room/units/beanstalkd.service"
cp dist/systemd/beanstalkd.socket "$room/units"
grep -q "^ExecStart=$server " "$room/units/beanstalkd.service" || fail 'ExecStart has changed its form'

man=yes
if ! command -v man >/dev/null; then man=no; fi
# Its exit status tells nothing: what it says does.
verify() {
	MANPATH="$room/man" systemd-analyze verify --man="$man" "$@" 2>&1
}
said=$(verify "$room/units/beanstalkd.service" "$room/units/beanstalkd.socket")
[ -z "$said" ] || fail "$said"
# A fault that is there has to be found, or nothing was shown.
mkdir "$room/faulty"
sed 's/^PrivateTmp=/PrivateTemp=/' "$room/units/beanstalkd.service" >"$room/faulty/beanstalkd.service"
[ -n "$(verify "$room/faulty/beanstalkd.service")" ] || fail 'systemd-analyze overlooks a wrong setting'

scored=$(systemd-analyze security --no-pager --offline=true --threshold="$highest_score" \
	"$room/units/beanstalkd.service") || fail "$scored"
echo "$scored" | sed -n 's/.*\(Overall exposure level.*: [0-9.]*\).*/\1/p'

# What is not set in the defaults file is set in the unit, to the same.
variables=$(sed -n 's/^#*\(BEANSTALKD_[A-Z_]*\)=.*/\1/p' dist/default/beanstalkd)
for variable in $variables; do
	grep -q "^Environment=$variable=" dist/systemd/beanstalkd.service || fail "the unit does not know $variable"
done
for setting in $(grep '^BEANSTALKD_' dist/default/beanstalkd); do
	grep -q "^Environment=$setting\$" dist/systemd/beanstalkd.service || fail "the unit has another default: $setting"
done

# The command line of the unit, as systemd reads it: one argument for ${...}, words for $....
command_line=$(sed -n 's/^ExecStart=//p' "$room/units/beanstalkd.service" | sed 's/\(\${[A-Z_]*}\)/"\1"/g')
. dist/default/beanstalkd
BEANSTALKD_EXTRA="-V -b $room/jobs"
mkdir "$room/jobs"
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
eval "exec systemd-socket-activate -l '$room/socket' -l 127.0.0.1:$port $command_line" 2>"$room/log" &
pid=$!
python3 tests/packages/jobs.py - "unix:$room/socket" try
python3 tests/packages/jobs.py - "127.0.0.1:$port" try
kill "$pid"
wait "$pid" || fail "the service did not stop in good order: $(cat "$room/log")"
pid=
echo 'units: sound, and both inherited sockets are served'
