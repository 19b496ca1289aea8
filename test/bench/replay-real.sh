#!/bin/sh
# Prints what each policy gives on a recorded TRACE (format mooncake unless FORMAT says otherwise) at three loads:
# docs/routing.md has the table. POLICIES: names, by default those that docs/routing.md compares.
set -eu
kvepp=${KVEPP:-bin/kvepp}
[ -r "${TRACE:-}" ] || { echo "set TRACE to a trace, as docs/routing.md#a-real-trace says" >&2; exit 2; }
compare=
for policy in ${POLICIES:-time llm-d preble-e2 lmetric}; do compare="$compare --compare $policy=--router-policy=$policy"; done
echo '| load | policy | cached, % | TTFT mean, ms | p90 | p99 | end to end, s | goodput % |'
echo '|---|---|---|---|---|---|---|---|'
load() { # NAME FLAGS
    name=$1
    shift
    # shellcheck disable=SC2086
    "$kvepp" replay "$TRACE" --format "${FORMAT:-mooncake}" "$@" $compare 2>/dev/null | awk -v load="$name" '
        { sub(/^ *as given/, "dynamo") }
        NF == 12 && $2 + 0 == $2 { first[$1] = $2 " | " $3 " | " $5 " | " $6; goodput[$1] = $8 }
        NF == 11 && $2 + 0 == $2 { printf "| %s | %s | %s | %s | %s |\n", load, $1, first[$1], $7, goodput[$1] }'
}
load '4 workers, `--speed 2`' --workers 4 --blocks 8192 --speed 2
load '8 workers, `--speed 4`' --workers 8 --blocks 16384 --speed 4
load '16 workers, `--speed 6`' --workers 16 --blocks 16384 --speed 6
