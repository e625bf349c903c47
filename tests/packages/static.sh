#!/bin/sh
# Proves what is promised of the static binary:
#
#   static.sh BINARY
#
# - it needs no shared library and no interpreter, and is no larger than its limit;
# - alone in an empty root, without /dev, /etc and /proc, it serves, as a user given by number, even with
#   descriptors 0 to 2 closed; image.sh shows that it keeps jobs;
# - for addresses and numbers it opens no file;
# - names are found where /etc/hosts and /etc/passwd are there, and what is missing is named;
# - it idles within its limit. The benchmark compares it with C beanstalkd (`--only empty').
set -eu
cd "$(dirname "$0")/../.."
binary=$(realpath "$1")
. tests/packages/common.sh

case $(cat "$binary.target") in
# 1.1 MB and 1.4 MiB of memory; 1.78 MB and 1.85 MiB of memory.
*-musl*) most_bytes=1100000 most_rss_kib=1434 ;;
*) most_bytes=1780000 most_rss_kib=1894 ;;
esac

alone() {
	if readelf -lW "$binary" | grep -q INTERP; then fail 'it has an interpreter'; fi
	if readelf -dW "$binary" | grep -q NEEDED; then fail 'it needs shared libraries'; fi
	echo 'no interpreter, no shared library'
	bytes=$(wc -c <"$binary")
	echo "$bytes bytes, of $most_bytes at most"
	[ "$bytes" -le "$most_bytes" ] || fail 'it is too large'
}

# A root with nothing but the server: $root
empty_root() {
	root=$scratch/root
	rm -rf "$root"
	mkdir "$root"
	chmod 755 "$root"
	cp "$binary" "$root/beanstalkd"
}

# One job through a server that must end in good order, and be this user: serves UID COMMAND...
serves() {
	expected=$1
	shift
	start "$scratch/log" "$@" -V -p 0
	work "$(port "$scratch/log")"
	[ "$(awk '/^Uid:/ { print $3 }' "/proc/$pid/status")" = "$expected" ] || fail "$*: it has not become the user"
	end TERM || fail "$*: it ended with $status"
}

in_an_empty_root() {
	empty_root
	serves 65532 chroot "$root" /beanstalkd -l 127.0.0.1 -u 65532
	[ "$(ls "$root")" = beanstalkd ] || fail 'it has left something in its root'
	echo 'alone in an empty root it serves, as a user given by number'
}

without_descriptors() {
	empty_root
	for closed in '<&-' '>&-' '2>&-' '<&- >&- 2>&-'; do
		free=$(free_port)
		sh -c "exec chroot '$root' /beanstalkd -l 127.0.0.1 -p $free $closed" &
		pid=$!
		started="$started $pid"
		work "$free"
		end TERM || fail "it ended with $status"
	done
	echo 'descriptors 0 to 2 may be closed, without /dev/null too'
}

opens_nothing() {
	for listen in 127.0.0.1 0.0.0.0; do
		start "$scratch/log" strace -f -e trace=file -o "$scratch/trace" \
			"$binary" -V -l "$listen" -p 0 -u 65532
		work "$(port "$scratch/log")"
		server=$(awk 'NR == 1 { print $1 }' "$scratch/trace")
		kill -TERM "$server"
		wait_until has_ended
		wait "$pid" || fail 'it does not end as it should'
		# Static glibc asks for its own name, to know where $ORIGIN would be.
		own=' execve\(| readlink\("/proc/self/exe"'
		if grep -vE "$own|^[0-9]+ +(\+\+\+|---)" "$scratch/trace"; then
			fail 'it looks at these files'
		fi
	done
	echo 'for addresses and numbers no file is opened'
}

# Expects that the server does not start in $root: refuses STATUS TEXT FLAGS...
refuses() {
	expected=$1
	text=$2
	shift 2
	status=0
	chroot "$root" /beanstalkd -p 0 "$@" 2>"$scratch/said" </dev/null || status=$?
	[ "$status" = "$expected" ] || fail "$*: it ended with $status: $(cat "$scratch/said")"
	grep -qF "$text" "$scratch/said" || fail "$*: it does not name $text: $(cat "$scratch/said")"
	echo "  $(cat "$scratch/said")"
}

names() {
	empty_root
	echo 'where files are missing it says'
	refuses 111 /etc/hosts -l localhost
	refuses 32 /etc/passwd -l 127.0.0.1 -u nobody
	mkdir "$root/etc"
	printf '127.0.0.1\tlocalhost here\n' >"$root/etc/hosts"
	printf 'root:x:0:0::/:\nnobody:x:54321:65432::/:\n' >"$root/etc/passwd"
	refuses 111 /etc/hosts -l there
	refuses 33 'no such user' -l 127.0.0.1 -u somebody
	serves 54321 chroot "$root" /beanstalkd -l here -u nobody
	echo 'and where they are there it takes names'
}

# The median of 20: one figure varies by 200 KiB.
idles() {
	for _ in $(seq 20); do
		start "$scratch/log" "$binary" -l 127.0.0.1 -p 0
		wait_until grep -q epoll "/proc/$pid/wchan"
		awk '/^VmRSS:/ { print $2 }' "/proc/$pid/status"
		end KILL || true
	done | sort -n >"$scratch/idle"
	idle_kib=$(sed -n 10p "$scratch/idle")
	echo "$idle_kib KiB while idle, of $most_rss_kib at most"
	[ "$idle_kib" -le "$most_rss_kib" ] || fail 'it idles with too much memory'
}

[ "$(id -u)" = 0 ] || skip_all 'only root may change the root and the user, the static binary is not tried'
needs 'the static binary is not tried' python3 readelf strace
alone
in_an_empty_root
without_descriptors
names
opens_nothing
idles
