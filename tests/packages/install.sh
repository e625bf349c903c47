#!/bin/sh
# Proves that `make install' puts exactly what it promises where it promises, with the right modes
# whatever the mask, that it works there, and that `make uninstall' leaves nothing of it.
set -eu
cd "$(dirname "$0")/../.."
. tests/packages/common.sh
make=${MAKE:-make}

# Files below a directory with their modes: files DIRECTORY
files() {
	(cd "$1" && find . ! -type d -printf '%m %P\n' | sort -k 2)
}

(umask 077 && $make --no-print-directory install DESTDIR="$scratch/root" PREFIX=/opt/queue >/dev/null)
cat >"$scratch/promised" <<-'FILES'
	755 opt/queue/bin/beanstalkctl
	755 opt/queue/bin/beanstalkd
	644 opt/queue/lib/systemd/system/beanstalkd.service
	644 opt/queue/lib/systemd/system/beanstalkd.socket
	644 opt/queue/share/bash-completion/completions/beanstalkctl
	644 opt/queue/share/bash-completion/completions/beanstalkd
	644 opt/queue/share/doc/beanstalkd-server/LICENSE
	644 opt/queue/share/fish/vendor_completions.d/beanstalkctl.fish
	644 opt/queue/share/fish/vendor_completions.d/beanstalkd.fish
	644 opt/queue/share/man/man1/beanstalkctl.1
	644 opt/queue/share/man/man1/beanstalkd.1
	644 opt/queue/share/man/man5/beanstalkd-binlog.5
	644 opt/queue/share/man/man7/beanstalkd-cluster.7
	644 opt/queue/share/man/man7/beanstalkd-monitoring.7
	644 opt/queue/share/man/man7/beanstalkd-protocol.7
	644 opt/queue/share/zsh/site-functions/_beanstalkctl
	644 opt/queue/share/zsh/site-functions/_beanstalkd
FILES
files "$scratch/root" | diff "$scratch/promised" - || fail 'other files are installed'
"$scratch/root/opt/queue/bin/beanstalkd" -v
unit=$scratch/root/opt/queue/lib/systemd/system/beanstalkd.service
grep -q '^ExecStart=/opt/queue/bin/beanstalkd ' "$unit" || fail 'the unit starts another program'
if grep -q '/usr/bin' "$unit"; then fail 'the unit names /usr/bin'; fi
start "$scratch/log" "$scratch/root/opt/queue/bin/beanstalkd" -V -l 127.0.0.1 -p 0
work "$(port "$scratch/log")"
"$scratch/root/opt/queue/bin/beanstalkctl" -s "127.0.0.1:$(port "$scratch/log")" check
end TERM || fail "it ended with $status"

mkdir -p "$scratch/names"
share=$scratch/root/opt/queue/share
for name in beanstalkd beanstalkctl; do
	cp "$share/bash-completion/completions/$name" "$scratch/names/$name.bash"
	cp "$share/zsh/site-functions/_$name" "$share/fish/vendor_completions.d/$name.fish" "$scratch/names"
done
sh tests/packages/completions.sh "$scratch/names"

$make --no-print-directory uninstall DESTDIR="$scratch/root" PREFIX=/opt/queue >/dev/null
[ -z "$(files "$scratch/root")" ] || fail "this is left: $(files "$scratch/root")"
[ ! -e "$scratch/root/opt/queue/share/doc/beanstalkd-server" ] || fail 'a directory of its own is left'
$make --no-print-directory uninstall DESTDIR="$scratch/root" PREFIX=/opt/queue >/dev/null

# Each place can be named by itself.
$make --no-print-directory install DESTDIR="$scratch/other" PREFIX=/usr UNITDIR=/etc/systemd/system \
	BINDIR=/usr/sbin >/dev/null
grep -q '^ExecStart=/usr/sbin/beanstalkd ' "$scratch/other/etc/systemd/system/beanstalkd.service" ||
	fail 'BINDIR does not reach the unit'
[ -x "$scratch/other/usr/sbin/beanstalkd" ] || fail 'BINDIR is not heeded'
echo 'installed and uninstalled, nothing more and nothing less'
