# Completion of the flags of beanstalkd(1) and of their arguments for bash.

_beanstalkd() {
	local flags='-b --binlog-dir -f --fsync-ms -F --no-fsync -l --listen -p --port
		-s --binlog-file-size --binlog-limit --lease-ttl --etcd-quota --etcd-ca --etcd-cert
		--etcd-key --import --export --leave --socket-mode -u --user -z --max-job-size --body-cache --bury-after
		--max-memory --max-connections --metrics --metrics-tubes --log-format --check --dump -c -n
		-v --version -V --verbose -h --help'
	local word=${COMP_WORDS[COMP_CWORD]} index=$((COMP_CWORD - 1)) flag prefix=
	COMPREPLY=()

	# If `=' and `:' break words, the current argument may be split into several words.
	if [[ $word == : || $word == = ]]; then
		prefix=$word word=
	elif [[ ${COMP_WORDS[index]} == : || ${COMP_WORDS[index]} == = ]]; then
		prefix=${COMP_WORDS[index]} index=$((index - 1))
	fi
	if [[ $prefix == : ]]; then
		# Nothing else with a `:' has completions after it.
		[[ ${COMP_WORDS[index]} == unix ]] || return
		index=$((index - 1)) word=unix:$word
		if [[ ${COMP_WORDS[index]} == = ]]; then
			index=$((index - 1))
		fi
	fi
	flag=${COMP_WORDS[index]}
	# If they do not, the flag and its argument are one word.
	if [[ $word == --*=* ]]; then
		flag=${word%%=*} word=${word#*=}
		prefix=$flag=
	else
		prefix=
	fi

	case $flag in
	-b | --binlog-dir)
		mapfile -t COMPREPLY < <(compgen -d -- "$word")
		# As file names, they would have a backslash before the `:'.
		if [[ -n $word && etcds == "$word"* ]]; then
			compopt -o nospace 2>/dev/null
			COMPREPLY+=($(compgen -W 'etcd:// etcds://' -- "$word"))
		else
			compopt -o filenames 2>/dev/null
		fi
		;;
	--import | --export)
		compopt -o filenames 2>/dev/null
		mapfile -t COMPREPLY < <(compgen -d -- "$word")
		;;
	--etcd-ca | --etcd-cert | --etcd-key | --leave)
		compopt -o filenames 2>/dev/null
		mapfile -t COMPREPLY < <(compgen -f -- "$word")
		;;
	-u | --user)
		mapfile -t COMPREPLY < <(compgen -u -- "$word")
		;;
	-l | --listen | --metrics)
		if [[ $word == unix:* ]]; then
			compopt -o filenames 2>/dev/null
			mapfile -t COMPREPLY < <(compgen -f -- "${word#unix:}")
			# If `:' does not break words, the prefix is part of the completed word.
			if [[ ${COMP_WORDBREAKS-} != *:* ]]; then
				COMPREPLY=("${COMPREPLY[@]/#/${prefix}unix:}")
			fi
			return
		fi
		compopt -o nospace 2>/dev/null
		if [[ $flag == --metrics ]]; then
			mapfile -t COMPREPLY < <(compgen -W '127.0.0.1: unix:' -- "$word")
		else
			mapfile -t COMPREPLY < <(compgen -W '127.0.0.1 ::1 localhost unix:' -- "$word")
		fi
		;;
	--socket-mode)
		mapfile -t COMPREPLY < <(compgen -W '600 660 666' -- "$word")
		;;
	--log-format)
		mapfile -t COMPREPLY < <(compgen -W 'text json' -- "$word")
		;;
	-f | --fsync-ms | -p | --port | -s | --binlog-file-size | -z | --max-job-size | \
		--binlog-limit | --lease-ttl | --etcd-quota | --body-cache | --bury-after | --max-memory | --max-connections | --metrics-tubes)
		# A number has no completions.
		return
		;;
	*)
		mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$word")
		return
		;;
	esac
	COMPREPLY=("${COMPREPLY[@]/#/$prefix}")
}

complete -F _beanstalkd beanstalkd
