# Made by choria-provisioner --completion bash; changes are lost.
_choria_provisioner() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command= flags at word
    # An equals sign is a word of its own.
    [[ $cur == = ]] && cur=
    [[ $prev == = ]] && prev=${COMP_WORDS[COMP_CWORD-2]}
    COMPREPLY=()
    case $prev in
    --choria-config)
        compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        return ;;
    --completion)
        mapfile -t COMPREPLY < <(compgen -W "bash zsh fish" -- "$cur")
        return ;;
    --config)
        compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        return ;;
    --helper)
        compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        return ;;
    --limit)
        :
        return ;;
    --pid)
        compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        return ;;
    --socket)
        compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        return ;;
    --sort)
        mapfile -t COMPREPLY < <(compgen -W "name failures next seen" -- "$cur")
        return ;;
    --state)
        mapfile -t COMPREPLY < <(compgen -W "all stuck working queued waiting settling denied" -- "$cur")
        return ;;
    --timeout)
        :
        return ;;
    esac
    for ((at = 1; at < COMP_CWORD; at++)); do
        word=${COMP_WORDS[at]}
        case $word in
        --choria-config|--completion|--config|--helper|--limit|--pid|--socket|--sort|--state|--timeout) [[ ${COMP_WORDS[at+1]} == = ]] && ((at++)); ((at++)) ;;
        run|status|nodes|pause|resume|retry|discover|deny|allow|check|reload|step-down|try) command=$word; break ;;
        esac
    done
    case $command in
    status) flags="--config --socket --json --version --help" ;;
    nodes) flags="--config --socket --state --sort --limit --json --version --help" ;;
    pause) flags="--config --socket --json --version --help" ;;
    resume) flags="--config --socket --json --version --help" ;;
    retry) flags="--config --socket --json --all --version --help" ;;
    discover) flags="--config --socket --json --version --help" ;;
    deny) flags="--config --socket --json --version --help" ;;
    allow) flags="--config --socket --json --version --help" ;;
    check) flags="--config --choria-config --pid --offline --moving --json --version --help" ;;
    reload) flags="--config --socket --json --version --help" ;;
    step-down) flags="--config --socket --json --version --help" ;;
    try) flags="--config --choria-config --helper --timeout --json --version --help" ;;
    *) flags="--config --choria-config --pid --completion --debug --no-debug --version --help" ;;
    esac
    if [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$cur")
    elif [[ -z $command ]]; then
        mapfile -t COMPREPLY < <(compgen -W "run status nodes pause resume retry discover deny allow check reload step-down try help" -- "$cur")
    fi
}
complete -F _choria_provisioner choria-provisioner
