#!/bin/sh
# Asks each shell what it completes:
#
#   completions.sh DIRECTORY     where beanstalkd.bash, _beanstalkd, beanstalkd.fish and those of beanstalkctl are
#
# Which flags there are is compared in tests/tidy.rs; here it is whether the shells understand the
# files, and what they make of arguments.
set -eu
cd "$(dirname "$0")/../.."
files=$(realpath "$1")
. tests/packages/common.sh
mkdir -p "$scratch/home" "$scratch/here/jobs"
: >"$scratch/here/journal"
# Instead of a tube it names the server that it was given. `odd' has tubes whose names need quotes.
mkdir "$scratch/bin"
cat >"$scratch/bin/beanstalkctl" <<-'SH'
	#!/bin/sh
	case $1$2 in
	-sodd) printf '%s\n' 'a;b1' 'a;b2' 'a$c' ;;
	-s*) echo "of-$2" ;;
	--server=*) echo "of-${1#*=}" ;;
	*) echo of-default ;;
	esac
SH
chmod +x "$scratch/bin/beanstalkctl"
cd "$scratch/here"
HOME=$scratch/home PATH=$scratch/bin:$PATH
export HOME PATH

# Asks what is completed of a line, and expects these words in any order: offers TYPED WORD...
offers() {
	typed=$1
	program=${typed%% *}
	shift
	ask "$typed"
	printf '%s\n' "$@" | sort | grep . >"$scratch/expected" || true
	sort -u "$scratch/offered" | grep . >"$scratch/sorted" || true
	diff "$scratch/expected" "$scratch/sorted" >&2 || fail "$shell: to \`$typed' it offers the above"
}

# What is asked of each shell: the line that is typed, and what must be offered.
conversations() {
	while IFS='|' read -r typed words <&3; do
		# shellcheck disable=SC2086
		offers "$typed" $words
	done 3<<-'LINES'
		beanstalkctl --ti|--timeout
		beanstalkctl dr|drain
		beanstalkctl jobs mail --state re|ready reserved
		beanstalkctl put mail --ke|--key
		beanstalkctl --timeout 3 dr|drain
		beanstalkctl --timeout 3 flush |of-default
		beanstalkctl -s 127.0.0.9:11301 flush |of-127.0.0.9:11301
		beanstalkctl --server=127.0.0.9:11301 flush |of-127.0.0.9:11301
		beanstalkd --m|--max-connections --max-job-size --max-memory --metrics --metrics-tubes
		beanstalkd --log-format |json text
		beanstalkd -V --log-format j|json
		beanstalkd -b j|jobs/
		beanstalkd -b etc|etcd:// etcds://
		beanstalkd --etcd-|--etcd-ca --etcd-cert --etcd-key --etcd-quota
		beanstalkd --etcd-ca jou|journal
		beanstalkd --import j|jobs/
		beanstalkd --binlog-dir j|jobs/
		beanstalkd -u roo|root
		beanstalkd --socket-mode 66|660 666
		beanstalkd -l 127|127.0.0.1
		beanstalkd --ch|--check
		beanstalkd -p |
	LINES
}

in_bash() {
	shell=bash
	bash -n "$files/beanstalkd.bash"
	bash -n "$files/beanstalkctl.bash"
	# The words are broken as bash itself does it at blanks; directories end in a slash on the line.
	cat >"$scratch/ask.bash" <<-'BASH'
		source "$1"
		[ -z "$3" ] || COMP_WORDBREAKS=$3
		read -r -a COMP_WORDS <<<"$2"
		[[ $2 != *' ' ]] || COMP_WORDS+=('')
		COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
		"_${COMP_WORDS[0]}"
		for reply in "${COMPREPLY[@]}"; do
			[ ! -d "$reply" ] || reply=$reply/
			printf '%s\n' "$reply"
		done
	BASH
	ask() {
		bash "$scratch/ask.bash" "$files/$program.bash" "$1" "$breaks" >"$scratch/offered"
	}
	breaks=
	conversations
	offers 'beanstalkctl --server = 127.0.0.9 : 11301 --timeout = 3 flush o' of-127.0.0.9:11301
	offers 'beanstalkd --log-format = j' json
	offers 'beanstalkd --log-format =' json text
	offers 'beanstalkd -l unix : j' jobs/ journal
	offers 'beanstalkd --listen = unix : jo' jobs/ journal
	offers 'beanstalkd -b etcd : '
	offers 'beanstalkctl -s odd flush a' 'a\$c' 'a\;b1' 'a\;b2'
	offers 'beanstalkctl -s odd flush a\;b' 'a\;b1' 'a\;b2'
	offers 'beanstalkctl -s odd flush a\;b1' 'a\;b1'
	offers 'beanstalkctl -s odd flush a\$' 'a\$c'
	offers "beanstalkctl -s odd flush 'a;b" 'a;b1' 'a;b2'
	offers 'beanstalkctl -s odd flush "a' 'a\$c' 'a;b1' 'a;b2'
	offers 'beanstalkctl -s odd flush x'
	# Each is one word.
	breaks=' '
	offers 'beanstalkd --log-format=j' --log-format=json
	offers 'beanstalkd -l unix:jou' unix:journal
	echo "bash $(bash -c 'echo "$BASH_VERSION"') completes"
}

in_fish() {
	shell=fish
	fish --no-execute "$files/beanstalkd.fish"
	fish --no-execute "$files/beanstalkctl.fish"
	ask() {
		fish --no-config --command "source $files/$program.fish; complete -C '$1'" |
			cut -f 1 >"$scratch/offered"
	}
	conversations
	offers 'beanstalkd --log-format=j' --log-format=json
	offers 'beanstalkd -l unix:jou' unix:journal
	echo "$(fish --version) completes"
}

# Its completion works on a terminal only: one is made with its own module for that, and what would
# be inserted or listed is read back.
in_zsh() {
	shell=zsh
	zsh -n "$files/_beanstalkd"
	zsh -n "$files/_beanstalkctl"
	cat >"$scratch/ask.zsh" <<-'ZSH'
		zmodload zsh/zpty
		zpty terminal zsh --no-rcs --interactive
		say() { zpty -w terminal "$1" }
		say "PROMPT= PS2= ; stty -echo; fpath=($1 \$fpath); autoload -Uz compinit && compinit -u -D"
		# What is offered goes to a file instead of the line.
		say 'compadd() {
			local -a found; local word
			if [[ "$*" == *-[OAD]* ]]; then builtin compadd "$@"; return; fi
			builtin compadd -O found "$@"
			for word in $found; do
				if [[ -d $word ]]; then word+=/; fi
				print -r -- $word >>$OFFERED
			done
			builtin compadd "$@"
		}'
		say 'finish() { : >$OFFERED; zle complete-word; : >$OFFERED.done; zle kill-buffer }'
		say 'zle -N finish; bindkey "^X" finish; setopt no_list_beep no_auto_list; : >$OFFERED.ready'
		while [[ ! -e $OFFERED.ready ]]; do zpty -r -t terminal _; sleep 0.02; done
		zpty -w -n terminal "$2"$'\x18'
		for (( tries = 500; tries; tries-- )); do
			[[ ! -e $OFFERED.done ]] || break
			zpty -r -t terminal _
			sleep 0.02
		done
		zpty -d terminal
	ZSH
	ask() {
		rm -f "$scratch/offered"*
		OFFERED=$scratch/offered timeout 20 zsh --no-rcs "$scratch/ask.zsh" "$files" "$1" ||
			fail "zsh does not answer"
	}
	conversations
	offers 'beanstalkd --log-format=j' json
	offers 'beanstalkd -l unix:jou' journal
	echo "$(zsh --version | cut -d ' ' -f 1,2) completes"
}

for wanted in bash fish zsh; do
	if has $wanted; then
		in_$wanted
	else
		skip "$wanted is not installed, its completion is not tried"
	fi
done
