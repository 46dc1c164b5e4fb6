# Completion of `foldpipe` and of `python -m launcher` in bash; `foldpipe -sc install=bash` prints it.
# What there is to complete is asked of the program itself, as Hydra's own script does, which knows
# files behind python, but no -m.

_foldpipe_python=$(complete -p python 2> /dev/null | sed -n 's/.* -F \([^ ]*\) .*/\1/p')
[ "$_foldpipe_python" = _foldpipe_completion ] && _foldpipe_python=

_foldpipe_completion()
{
    local line=${COMP_LINE:0:COMP_POINT} word rest choices helper form
    form='^([^[:space:]]+)[[:space:]]+-m[[:space:]]+launcher[[:space:]](.*)$'
    word=${line##*[[:space:]]}
    if [[ $line =~ $form ]]; then
        helper="${BASH_REMATCH[1]} -m launcher" rest=${BASH_REMATCH[2]}
    elif [[ ${line%%[[:space:]]*} == *foldpipe ]]; then
        helper=${line%%[[:space:]]*} rest=${line#*[[:space:]]}
    else
        # Another use of python: whatever has completed it before.
        [ -n "$_foldpipe_python" ] && "$_foldpipe_python" "$@"
        return
    fi
    choices=$(COMP_POINT=$COMP_POINT COMP_LINE="foldpipe $rest" $helper -sc query=bash 2> /dev/null)
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
    if [[ $COMP_WORDBREAKS == *=* && $word == *=* ]]; then
        # Bash takes what stands behind the last = for the word.
        COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")
    fi
}

complete -o nospace -o default -o bashdefault -F _foldpipe_completion foldpipe python python3
