# Completion of beanstalkctl(1) for bash: commands, options, and names of tubes of the server.

_beanstalkctl() {
	local commands='status check top failed jobs job retry move delete flush pause resume drain export
		import workers bench put tubes'
	local flags='-s --server --json -n --dry-run --yes --timeout -h --help -v --version'
	local with_value='@(-s|--server|--timeout|--state|--after|--limit|--within|--tube|--jobs|--connections|--size'
	with_value+='|--pri|--delay|--ttr|--key|--con)'
	local word=${COMP_WORDS[COMP_CWORD]} command= server=() index option value
	COMPREPLY=()
	for ((index = 1; index < COMP_CWORD; index++)); do
		option=${COMP_WORDS[index]}
		if [[ $option == $with_value ]]; then
			# If `=' and `:' break words, the value consists of several of them.
			[[ ${COMP_WORDS[index + 1]} != = ]] || index=$((index + 1))
			value=${COMP_WORDS[index + 1]}
			index=$((index + 1))
			while [[ ${COMP_WORDS[index + 1]} == : ]]; do
				value+=:${COMP_WORDS[index + 2]}
				index=$((index + 2))
			done
			[[ $option != -s && $option != --server ]] || server=(-s "$value")
		elif [[ $option == --server=* ]]; then
			server=(-s "${option#*=}")
		elif [[ $option != -* && -z $command ]]; then
			command=$option
		fi
	done
	option=${COMP_WORDS[COMP_CWORD - 1]}
	if [[ $option == --state ]]; then
		COMPREPLY=($(compgen -W 'ready reserved delayed buried any' -- "$word"))
		return
	elif [[ $option == $with_value && $option != --tube ]]; then
		return
	fi
	case $command in
	failed) flags+=' --limit' ;;
	jobs) flags+=' --state --after --limit' ;;
	job) flags+=' --body' ;;
	retry) flags+=' --all --limit --delayed' ;;
	move) flags+=' --state --limit' ;;
	flush) flags+=' --buried' ;;
	pause | resume) flags+=' --all' ;;
	drain) flags+=' --held --within' ;;
	export) flags+=' --take' ;;
	import) flags+=' --tube' ;;
	bench) flags+=' --jobs --connections --size' ;;
	put) flags+=' --pri --delay --ttr --key --con' ;;
	esac
	if [[ $word == -* ]]; then
		COMPREPLY=($(compgen -W "$flags" -- "$word"))
	elif [[ -z $command ]]; then
		COMPREPLY=($(compgen -W "$commands" -- "$word"))
	elif [[ " failed jobs retry move flush pause resume drain export import workers put " == *" $command "* ]]; then
		# Names may contain what a shell would interpret, but no quote and no backslash.
		local name plain=${word//[\'\"\\]/}
		while IFS= read -r name; do
			[[ $name == "$plain"* ]] || continue
			case $word in
			\'*) COMPREPLY+=("$name") ;;
			\"*) COMPREPLY+=("${name//\$/\\\$}") ;;
			*) COMPREPLY+=("$(printf %q "$name")") ;;
			esac
		done < <(beanstalkctl "${server[@]}" --timeout 1 tubes 2>/dev/null)
	fi
}

complete -F _beanstalkctl beanstalkctl
