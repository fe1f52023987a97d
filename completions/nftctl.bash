_nftctl_completion() {
    local IFS=$'
'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" \
                   COMP_CWORD=$COMP_CWORD \
                   _NFTCTL_COMPLETE=complete_bash $1 ) )
    return 0
}

complete -o default -F _nftctl_completion nftctl
