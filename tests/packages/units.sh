#!/bin/sh
# The units of systemd in dist/systemd: systemd finds no fault with them, the service may do little
# (a score of 1.5 or lower), and its command line, with the defaults of dist/default, serves the
# sockets that it is given. Needs no systemd that runs; with one, tests/packages/deb.sh starts them.
#
#     units.sh SERVER
set -eu
server=$(realpath "$1")
highest_score=15

. tests/packages/common.sh

needs 'the units are not checked' systemd-analyze systemd-socket-activate man python3

# systemd-analyze looks for the program and the pages: those of this tree, not those that happen
# to be installed.
mkdir -p "$scratch/units" "$scratch/man/man1" "$scratch/man/man7"
cp man/beanstalkd.1 "$scratch/man/man1"
cp man/beanstalkd-protocol.7 "$scratch/man/man7"
sed "s|^ExecStart=/usr/bin/beanstalkd |ExecStart=$server |" dist/systemd/beanstalkd.service \
	>"$scratch/units/beanstalkd.service"
cp dist/systemd/beanstalkd.socket "$scratch/units"
grep -q "^ExecStart=$server " "$scratch/units/beanstalkd.service" || fail 'ExecStart has changed its form'

# Its exit status means nothing: its output is checked.
verify() {
	MANPATH="$scratch/man" systemd-analyze verify --man=yes "$@" 2>&1
}
said=$(verify "$scratch/units/beanstalkd.service" "$scratch/units/beanstalkd.socket")
[ -z "$said" ] || fail "$said"
# A fault that is there has to be found, or nothing was shown.
mkdir "$scratch/faulty"
sed 's/^PrivateTmp=/PrivateTemp=/' "$scratch/units/beanstalkd.service" >"$scratch/faulty/beanstalkd.service"
[ -n "$(verify "$scratch/faulty/beanstalkd.service")" ] || fail 'systemd-analyze overlooks a wrong setting'

scored=$(systemd-analyze security --no-pager --offline=true --threshold="$highest_score" \
	"$scratch/units/beanstalkd.service") || fail "$scored"
echo "$scored" | sed -n 's/.*\(Overall exposure level.*: [0-9.]*\).*/\1/p'

# What is not set in the defaults file is set in the unit, to the same.
for variable in $(sed -n 's/^#*\(BEANSTALKD_[A-Z_]*\)=.*/\1/p' dist/default/beanstalkd); do
	grep -q "^Environment=$variable=" dist/systemd/beanstalkd.service || fail "the unit does not know $variable"
done
for setting in $(grep '^BEANSTALKD_' dist/default/beanstalkd); do
	grep -q "^Environment=$setting\$" dist/systemd/beanstalkd.service || fail "the unit has another default: $setting"
done

# The command line of the unit, as systemd reads it: one argument for ${...}, words for $....
command_line=$(sed -n 's/^ExecStart=//p' "$scratch/units/beanstalkd.service" | sed 's/\(\${[A-Z_]*}\)/"\1"/g')
. dist/default/beanstalkd
BEANSTALKD_EXTRA="-V -b $scratch/jobs"
mkdir "$scratch/jobs"
port=$(free_port)
eval "start '$scratch/log' systemd-socket-activate -l '$scratch/socket' -l 127.0.0.1:$port $command_line"
python3 tests/packages/jobs.py - "unix:$scratch/socket" try
work "$port"
end TERM || fail "the service did not stop in good order: $(cat "$scratch/log")"
echo 'units: sound, and both inherited sockets are served'
