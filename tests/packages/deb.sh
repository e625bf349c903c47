#!/bin/sh
# The package of Debian, as an operator meets it, in machines of its own (see in_root.sh): one that runs
# systemd and one that does not.
#
# It proves: lintian finds nothing. A fresh installation serves. With jobs of all kinds in the binlog of
# Debian's C beanstalkd, and options of the operator's own, an upgrade restarts the service, leaves the
# options as they are, asks nothing, and every job is there; so does the way back. What is enabled or disabled stays
# so. The hardened unit serves with what the pages promise, and gives up where they say so. A socket that
# is enabled stays open in an upgrade. Removing keeps the jobs, purging takes all.
#
# The root is made with debootstrap, once, from the mirror that apt uses, and kept in target/deb.
set -eu

. tests/packages/common.sh

[ "$(id -u)" = 0 ] || skip_all 'not root, the package is not tried'
needs 'the package is not tried' debootstrap lintian dpkg-buildpackage dh unshare nsenter python3

place=$PWD/target/deb
ours=$(ls "$place"/beanstalkd_*+server*.deb)
port=11300
keeper=
trap 'stop_machine; rm -rf "$place/machine"; tidy_up' EXIT

step() { echo "  $1"; }

fail() {
	echo "FAILED: $*" >&2
	[ -z "$keeper" ] || inside sh -c 'journalctl --no-pager -u beanstalkd -n 30 2>/dev/null
		tail -n 20 /var/log/beanstalkd.log 2>/dev/null' || true
	exit 1
}

# ---- What is needed: a root, and Debian's package ----

make_root() {
	. /etc/os-release
	suite=$VERSION_CODENAME
	root=$place/root-$suite.tar
	if [ -e "$root" ]; then return; fi
	mirror=$(apt-get indextargets --format '$(SITE) $(CODENAME)' 'Created-By: Packages' 'Origin: Debian' |
		sed -n "s/ $suite\$//p" | head -n 1)
	[ -n "$mirror" ] || skip_all "apt has no mirror of $suite"
	http_proxy=${http_proxy:-}
	eval "$(apt-config shell http_proxy Acquire::http::Proxy)"
	export http_proxy
	rm -rf "$place/root"
	debootstrap --variant=minbase --include=adduser,lsb-base,netbase,systemd,init-system-helpers \
		"$suite" "$place/root" "$mirror" >"$place/debootstrap.log" 2>&1 ||
		{ tail -n 5 "$place/debootstrap.log"; exit 1; }
	rm -rf "$place"/root/var/cache/apt/archives/*.deb
	# What would look at the machine rather than at this root, or wait for a terminal.
	for unit in console-getty.service getty.target systemd-logind.service dev-hugepages.mount \
		sys-kernel-debug.mount sys-kernel-tracing.mount sys-fs-fuse-connections.mount \
		systemd-modules-load.service systemd-sysctl.service systemd-remount-fs.service \
		systemd-networkd.service systemd-timesyncd.service apt-daily.timer apt-daily-upgrade.timer; do
		ln -sf /dev/null "$place/root/etc/systemd/system/$unit"
	done
	tar -C "$place/root" -cf "$root.new" .
	mv "$root.new" "$root"
	rm -rf "$place/root"
}

get_debian_package() {
	mkdir -p "$place/c"
	theirs=$(ls "$place"/c/beanstalkd_*.deb 2>/dev/null | head -n 1)
	if [ -z "$theirs" ]; then
		(cd "$place/c" && chmod 777 . && apt-get download beanstalkd >/dev/null 2>&1) ||
			skip_all "Debian's package cannot be downloaded"
		theirs=$(ls "$place"/c/beanstalkd_*.deb)
	fi
	case $theirs in *+server*) fail "$theirs is no package of Debian's" ;; esac
}

# ---- Machines ----

# A fresh copy of the root, with this as its first process.
start_machine() {
	rm -rf "$place/machine"
	mkdir "$place/machine"
	tar -C "$place/machine" -xf "$root"
	mkdir "$place/machine/packages"
	cp "$theirs" "$place/machine/packages/theirs.deb"
	cp "$ours" "$place/machine/packages/ours.deb"
	unshare --mount tests/packages/in_root.sh "$place/machine" "$@" >"$scratch/machine.log" 2>&1 </dev/null &
	keeper=$!
	first=
	wait_until machine_is_up
	[ -n "$first" ] || fail "the machine has ended: $(cat "$scratch/machine.log")"
}

# Process 1 of the machine, by the number that it has out here: the child of unshare, which is the child
# of in_root.sh. The packages are in its root once that is the machine's.
machine_is_up() {
	kill -0 "$keeper" || return 0
	for parent in $(cat "/proc/$keeper/task/$keeper/children"); do
		first=$(cat "/proc/$parent/task/$parent/children" 2>/dev/null | tr -d ' ') || first=
	done
	[ -n "$first" ] && [ -e "/proc/$first/root/packages/ours.deb" ]
}

stop_machine() {
	if [ -n "$keeper" ]; then
		if [ -n "$first" ]; then kill -KILL "$first" 2>/dev/null || true; fi
		wait "$keeper" 2>/dev/null || true
		keeper=
	fi
}

inside() {
	nsenter --target "$first" --mount --pid --net --uts --ipc --cgroup -- \
		env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive LC_ALL=C "$@"
}

# No terminal answers questions.
apt_install() {
	inside apt-get -y -q install "$@" >"$scratch/apt.log" 2>&1 </dev/null ||
		fail "apt-get install $*: $(cat "$scratch/apt.log")"
}
install_ours() {
	apt_install "$@" /packages/ours.deb
	inside beanstalkd -v | grep -q beanstalkd-server || fail 'the binary is not ours'
}
install_theirs() {
	apt_install --allow-downgrades /packages/theirs.deb
	if inside beanstalkd -v | grep -q beanstalkd-server; then fail 'the binary is not theirs'; fi
}

client() {
	nsenter --target "$first" --net -- python3 -B tests/packages/jobs.py "$scratch/manifest" "127.0.0.1:$port" "$1"
}

expect_jobs() {
	client expect >"$scratch/said" 2>&1 || fail "jobs are not as they were: $(cat "$scratch/said")"
	step "$1: $(cat "$scratch/said")"
}

set_options() {
	printf 'BEANSTALKD_LISTEN_ADDR=%s\nBEANSTALKD_LISTEN_PORT=11300\nBEANSTALKD_EXTRA="%s"\n' "$1" "$2" \
		>"$place/machine/etc/default/beanstalkd"
}
keep_options() { cp "$place/machine/etc/default/beanstalkd" "$scratch/options"; }
expect_options() {
	cmp "$scratch/options" "$place/machine/etc/default/beanstalkd" || fail 'the options have changed'
}

upgrade() {
	stay fill
	install_ours
	expect_jobs 'upgrade'
	expect_options
}
downgrade() {
	install_theirs
	expect_jobs 'downgrade'
	expect_options
}

# The job with 65535 bytes is one that C reads only so.
binlog='-b /var/lib/beanstalkd -z 65537'

# ---- The machine without systemd ----

init() { inside /etc/init.d/beanstalkd "$1"; }

try_without_systemd() {
	echo 'without systemd:'
	start_machine sh -c 'while :; do sleep 1; done'

	printf '#!/bin/sh\nexit 101\n' >"$place/machine/usr/sbin/policy-rc.d"
	chmod 755 "$place/machine/usr/sbin/policy-rc.d"
	install_ours
	[ "$(inside stat -c '%U:%G %a' /var/lib/beanstalkd)" = 'beanstalkd:beanstalkd 750' ] || fail 'the directory of the jobs'
	for file in /etc/default/beanstalkd /lib/systemd/system/beanstalkd.service /lib/systemd/system/beanstalkd.socket \
		/usr/bin/beanstalkctl /usr/share/man/man1/beanstalkctl.1.gz \
		/usr/share/man/man1/beanstalkd.1.gz /usr/share/man/man5/beanstalkd-binlog.5.gz \
		/usr/share/man/man7/beanstalkd-cluster.7.gz /usr/share/man/man7/beanstalkd-monitoring.7.gz \
		/usr/share/man/man7/beanstalkd-protocol.7.gz /usr/share/doc/beanstalkd/copyright; do
		inside test -s "$file" || fail "there is no $file"
	done
	if inside test -e /run/beanstalkd.pid; then fail 'it started against the policy'; fi
	for action in start status start; do
		init "$action" >"$scratch/said" 2>&1 || fail "the init script, $action: $(cat "$scratch/said")"
	done
	client try || fail 'it does not serve'
	user=$(inside sh -c 'stat -c %U /proc/$(cat /run/beanstalkd.pid)')
	[ "$user" = beanstalkd ] || fail "it runs as $user"
	init stop >/dev/null || fail 'the init script does not stop it'
	if init status >/dev/null; then fail 'it runs on'; fi
	step 'fresh installation: starts, serves and stops'

	set_options 127.0.0.1 '--no-such-flag'
	if init start >/dev/null 2>&1; then fail 'a wrong option is no failure'; fi
	grep -q 'unknown flag: --no-such-flag' "$place/machine/var/log/beanstalkd.log" || fail 'the log does not say why'
	step 'a wrong option: start fails, and the log says why'

	inside cp /usr/share/beanstalkd/default /etc/default/beanstalkd
	# There is no runlevel here, so a start must be allowed explicitly.
	printf '#!/bin/sh\nexit 0\n' >"$place/machine/usr/sbin/policy-rc.d"
	install_theirs
	grep -q 'init script' "$place/machine/etc/default/beanstalkd" || fail 'their settings are not there'
	init stop >/dev/null
	set_options 127.0.0.1 "$binlog"
	keep_options
	init start >/dev/null
	upgrade
	stay work
	downgrade
	init stop >/dev/null
	remove_and_purge
	stop_machine
}

remove_and_purge() {
	install_ours
	inside apt-get -y -q remove beanstalkd >/dev/null 2>&1 </dev/null || fail 'remove'
	inside sh -c 'test -e /var/lib/beanstalkd/lock && test -e /etc/default/beanstalkd' || fail 'remove took the jobs or the options'
	if inside sh -c 'cat /proc/[0-9]*/comm | grep -q beanstalkd'; then fail 'it runs although it was removed'; fi
	inside apt-get -y -q purge beanstalkd >/dev/null 2>&1 </dev/null || fail 'purge'
	left=$(inside sh -c 'ls -d /etc/systemd/system/beanstalkd* /var/lib/beanstalkd* /etc/default/beanstalkd* /etc/init.d/beanstalkd* /run/beanstalkd* \
		/usr/share/beanstalkd* /var/log/beanstalkd* /etc/systemd/system/*/beanstalkd* /etc/rc?.d/*beanstalkd 2>/dev/null;
		getent passwd beanstalkd; getent group beanstalkd' || true)
	[ -z "$left" ] || fail "purge left $left"
	step 'remove keeps jobs and options, purge takes all'
}

# ---- The machine with systemd ----

shows() { inside systemctl show --value --property "$1" "${2:-beanstalkd.service}"; }
is_active() { [ "$(shows ActiveState "${1:-beanstalkd.service}")" = active ]; }
has_failed() { [ "$(shows ActiveState)" = failed ]; }
is_booted() { inside systemctl is-system-running 2>/dev/null | grep -q -e running -e degraded; }

# Starts the service again, with other options if some are given: restart WHAT [ADDRESS EXTRA]
restart() {
	[ $# = 1 ] || set_options "$2" "$3"
	inside systemctl reset-failed
	inside systemctl restart beanstalkd || fail "it does not start with: $1"
	is_active || fail "it is not active with: $1"
	step "it starts with: $1"
}

# Another start mends nothing, so there is none.
gives_up_with() {
	set_options "$2" "$3"
	inside systemctl reset-failed
	if inside systemctl restart beanstalkd 2>/dev/null; then fail "it starts with $3"; fi
	has_failed || fail "with $3 it is tried again"
	[ "$(shows ExecMainStatus)" = "$1" ] || fail "with $3 its status is $(shows ExecMainStatus)"
	step "$3: status $1, and no other start"
}

try_upgrade_with_systemd() {
	install_theirs
	set_options 127.0.0.1 "$binlog"
	keep_options
	user=$(inside id beanstalkd)
	inside systemctl restart beanstalkd
	upgrade
	is_active || fail 'the service is not active'
	[ "$(shows Type) $(shows NeedDaemonReload) $(shows NRestarts)" = 'notify no 0' ] || fail 'the unit is not ours'
	[ "$(inside id beanstalkd)" = "$user" ] || fail 'the user has changed'
	inside systemctl is-enabled --quiet beanstalkd.service || fail 'the service is not enabled any more'
	if inside systemctl is-enabled --quiet beanstalkd.socket; then fail 'the socket is enabled'; fi
	step "the service says: $(shows StatusText)"
}

try_options() {
	process=$(shows MainPID)
	inside sh -c "kill -KILL $process"
	wait_until eval 'is_active && [ "$(shows MainPID)" != "$process" ]'
	expect_jobs 'killed, and back by itself'

	restart '-u beanstalkd' 127.0.0.1 "$binlog -u beanstalkd"
	expect_jobs '-u beanstalkd'
	inside sh -c 'systemctl stop beanstalkd && mv /var/lib/beanstalkd /srv/moved && ln -s /srv/moved /var/lib/beanstalkd'
	install_ours --reinstall
	restart 'a directory that is a symbolic link'
	expect_jobs 'the directory is a symbolic link'
	inside sh -c 'systemctl stop beanstalkd && rm /var/lib/beanstalkd && mv /srv/moved /var/lib/beanstalkd'
	inside rm /etc/systemd/system/beanstalkd.service.d/state-directory.conf
	inside systemctl daemon-reload
	restart 'a Unix socket in /run/beanstalkd' unix:/run/beanstalkd/jobs.sock '--socket-mode 660 -u beanstalkd'
	[ "$(inside stat -c '%F %U:%G %a' /run/beanstalkd/jobs.sock)" = 'socket beanstalkd:beanstalkd 660' ] || fail 'the socket is another'
	inside install -d -o beanstalkd -g beanstalkd /srv/jobs
	restart 'a binlog elsewhere, and a host name' localhost '-b /srv/jobs'
	client try
	inside test -e /srv/jobs/lock || fail 'the binlog is not there'
	inside rm /etc/default/beanstalkd
	restart 'no defaults file'
	client try

	# An address that is not there yet.
	set_options 192.0.2.1 ''
	if inside systemctl restart beanstalkd 2>/dev/null; then fail 'it has an address that is not there'; fi
	wait_until eval '[ "$(shows NRestarts)" -gt 1 ]'
	step 'an address that is not there: tried again and again'

	gives_up_with 5 127.0.0.1 --no-such-flag
	gives_up_with 10 127.0.0.1 '-b /usr'
	gives_up_with 33 127.0.0.1 '-u nobody-of-that-name'
	gives_up_with 34 127.0.0.1 '-u root'
	restart 'what there was' 127.0.0.1 "$binlog"
}

try_socket() {
	# As README.Debian describes.
	inside systemctl stop beanstalkd
	inside systemctl enable --quiet --now beanstalkd.socket
	inside systemctl start beanstalkd
	before=$(shows InvocationID beanstalkd.socket)
	install_ours --reinstall
	is_active || fail 'the service is not active'
	[ "$(shows InvocationID beanstalkd.socket)" = "$before" ] || fail 'the socket was closed in the upgrade'
	expect_jobs 'upgrade with the socket enabled'
	inside systemctl stop beanstalkd 2>/dev/null
	expect_jobs 'stopped, and started by a client'
	inside systemctl disable --quiet --now beanstalkd.socket
	restart 'no socket'
	stay work
}

try_with_systemd() {
	echo 'with systemd:'
	start_machine /lib/systemd/systemd --log-target=journal --show-status=no
	wait_until is_booted
	try_upgrade_with_systemd
	try_options
	try_socket
	downgrade
	is_active || fail 'the service is not active'
	inside systemctl disable --quiet --now beanstalkd
	install_ours
	if is_active || inside systemctl is-enabled --quiet beanstalkd; then fail 'it was disabled and is not now'; fi
	step 'what is disabled and stopped stays so'
	remove_and_purge
	stop_machine
}

lintian --allow-root --fail-on error,warning "$ours" || fail 'lintian'
echo "lintian: nothing to say about $(basename "$ours"), $(stat -c %s "$ours") bytes"
make_root
get_debian_package
unshare --mount --pid --net --uts --ipc --cgroup --fork true 2>/dev/null || skip_all 'namespaces cannot be had here'
try_without_systemd
try_with_systemd
echo "the package takes the place of $(basename "$theirs"), and gives it back"
