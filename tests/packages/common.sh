# Functions of the scripts in this folder. Source it with the working directory at the root of
# the project; makes $scratch, a directory that goes when the script ends, and ends by then whatever
# was started through it.
scratch=$(mktemp -d)
started=
tidy_up() {
	for pid in $started; do
		kill -9 "$pid" 2>/dev/null || true
	done
	rm -rf "$scratch"
}
trap tidy_up EXIT
trap 'exit 1' INT TERM HUP
# A process that changes its user must have access.
chmod 755 "$scratch"

fail() {
	echo "FAILED: $*" >&2
	exit 1
}

# What is told as skipped on a machine that lacks something is a failure where everything is
# installed.
skip() {
	[ "${CI:-}" != true ] || fail "$*"
	echo "SKIPPED: $*"
}

# The same, where nothing is left to be done.
skip_all() {
	skip "$1"
	exit 0
}

has() {
	command -v "$1" >/dev/null
}

# Skips all if a tool is missing: needs 'what is not tested then' TOOL...
needs() {
	untested=$1
	shift
	for tool in "$@"; do
		has "$tool" || skip_all "$tool is not installed, $untested"
	done
}

# Runs the rest of the script with a network, processes and mounts of its own, so that no other program has its
# ports and all that it starts ends with it: needs SECONDS 'what is not tested then' and the script's arguments
in_own_network() {
	patience=$1
	untested=$2
	shift 2
	if [ "${IN_OWN_NETWORK:-}" = yes ]; then
		# The loopback device is down until SIOCSIFFLAGS sets IFF_UP and IFF_RUNNING.
		python3 -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 0x41))'
		return
	fi
	as_root=
	[ "$(id -u)" = 0 ] || as_root='--user --map-root-user'
	own="unshare $as_root --mount --net --pid --mount-proc --fork --kill-child"
	$own true 2>/dev/null || skip_all "no network of its own is allowed, $untested"
	IN_OWN_NETWORK=yes $own timeout "$patience" sh "$0" "$@" || exit 1
	exit 0
}

# Waits until a command succeeds, for a minute at most.
wait_until() {
	tries=1200
	until "$@" 2>/dev/null; do
		tries=$((tries - 1))
		[ "$tries" -gt 0 ] || fail "after a minute this still fails: $*"
		sleep 0.05
	done
}

# Runs a command in the background, with its standard error in a file: start LOG COMMAND...
# Its process is $pid.
start() {
	log=$1
	shift
	# What an earlier one has logged must not be taken for this one's.
	: >"$log"
	"$@" </dev/null >/dev/null 2>"$log" &
	pid=$!
	started="$started $pid"
}

# Returns whether what was started last has ended.
has_ended() {
	[ ! -e "/proc/$pid" ] || grep -q '^State:.Z' "/proc/$pid/status"
}

# Ends what was started last and returns its status: end SIGNAL
end() {
	kill -"$1" "$pid"
	wait_until has_ended
	status=0
	wait "$pid" 2>/dev/null || status=$?
	# Its number may be another's from now on.
	started=$(echo "$started" | sed "s/ $pid\>//")
	return "$status"
}

# The port that a server under -V has logged: port LOG
port() {
	wait_until grep -q 'listening on ' "$1"
	sed -n 's/.*listening on .*:\([0-9]*\)$/\1/p' "$1" | head -1
}

# One job from its put to its delete, through the server at a port of 127.0.0.1; or only the first half
# of that way, or the second: work PORT [leave | take]
work() {
	python3 tests/packages/jobs.py - "127.0.0.1:$1" "${2:-try}"
}

# What jobs.py prints, with the manifest of this script: client WHAT. The server is at 127.0.0.1:$port.
client() {
	python3 tests/packages/jobs.py "$scratch/manifest" "127.0.0.1:$port" "$1"
}

# A client that does its work and stays until its server ends, as the worker of a reserved job: stay WHAT
stay() {
	rm -f "$scratch/said"
	client "$1" >"$scratch/said" 2>&1 &
	started="$started $!"
	wait_until test -s "$scratch/said"
	grep -q 'ed$' "$scratch/said" || fail "$1: $(cat "$scratch/said")"
}

# Writes the block of shell after a line of a page to $scratch/block: block PAGE LINE
block() {
	sed -n "/^$2\$/,/^\`\`\`\$/p" "$1" | sed '1,/^```sh$/d; /^```$/d' >"$scratch/block"
	[ -s "$scratch/block" ] || fail "$1 has no block of shell after: $2"
}

# A port that no process has: free_port
free_port() {
	python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
