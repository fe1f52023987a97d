#!/bin/sh
# Does nftctl work here? One reward service, five steps on two ranks, a checkpoint, and two steps more: about a minute
# on two CPU cores. Every command below ends this script with its own exit code if it fails; with jq, the JSON answers
# are looked at as well.
#
#   docs/ci.sh [FOLDER]      answers and run stay in FOLDER; left out: a temporary one that is removed
set -eu

# In the environment, so that every command sees the same values. Two ranks are the fewest.
export NFTCTL_PROFILE=tiny_t2i_cpu
export NFTCTL_RL__GROUP_SIZE=2
export NFTCTL_DATA__ROWS_PER_STEP=2
export NFTCTL_EVAL__SAMPLES_PER_PROMPT=1
export NFTCTL_SAMPLES__PROMPTS=0

if [ "$#" -gt 0 ]; then
    folder=$1
    mkdir -p "$folder"
else
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
fi
cd "$folder"

# expect NAME CONDITION: the answer NAME.json meets the condition, where there is jq to say so.
expect() {
    if command -v jq >/dev/null && ! jq -e "$2" "$1.json" >/dev/null; then
        echo "ci: $1.json is not as expected: $2" >&2
        exit 1
    fi
    echo "ci: $1 is fine"
}

nftctl reward-ping --json >ping.json
expect ping '.ok and (.services | length) == 1'

nftctl validate --json >validate.json
expect validate '.ok and .diagnostics == []'

nftctl launch --steps 5 --name ci --json >launch.json
expect launch '.ok and .summary.steps == {"from": 0, "to": 5, "total": 5}'

nftctl inspect-checkpoint ci --verify --json >inspect.json
expect inspect '.ok and .complete and .verified and .checkpoint.step == 5'

nftctl resume ci --steps 7 --json >resume.json
expect resume '.ok and .summary.steps == {"from": 5, "to": 7, "total": 7}'
