#!/bin/sh
# Prints, for each kind of traffic of `kvepp replay --generate`, the medians over SEEDS (default 3, from FROM, default
# 1) of each policy's ratio to Dynamo's: docs/routing.md has the table. POLICIES: more arguments of kvepp replay,
# --compare all by default. TRAFFIC: names of the lines below, all by default.
set -eu
kvepp=${KVEPP:-bin/kvepp}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
chat='--prefill-ms 0,0.035,1e-6 --decode-ms 6,11,0' # about an 8B model on one GPU
chatlow='--prefill-ms 0,0.035,1e-6 --decode-ms 6,53,0' # the same with more memory: the curve is by share of it
large='--prefill-ms 0,0.13,2.5e-6 --decode-ms 12,12,0' # about a 70B model on four
table() { # NAME GENERATE REPLAY
    case " ${TRAFFIC:-$1} " in *" $1 "*) ;; *) return 0 ;; esac
    for seed in $(seq "${FROM:-1}" $((${FROM:-1} + ${SEEDS:-3} - 1))); do
        # shellcheck disable=SC2086
        "$kvepp" replay --generate $2 --seed "$seed" --trace-block-size 64 >"$work/trace"
        # shellcheck disable=SC2086
        "$kvepp" replay "$work/trace" --seed "$seed" --format mooncake-delta --trace-block-size 64 $3 \
            ${POLICIES:---compare all} 2>/dev/null >"$work/table"
        awk '/infinite size/ {
                for (i = 1; i <= NF; i++) if ($i ~ /^[0-9.]+$/ && $(i + 1) == "%") possible = $i
            }
            { sub(/^ *as given/, "as-given") }
            NF == 12 && $2 + 0 == $2 { first[$1] = $0 }
            NF == 11 && $2 + 0 == $2 {
                split(first["as-given"], base); split(first[$1], row)
                if ($1 == "as-given") { given = $7; next }
                cached = possible > 0 ? 100 * row[2] / possible : 0
                print $1, cached, row[3] / base[3], row[5] / base[5], row[6] / base[6], row[7] / base[7], $7 / given, row[8]
            }' "$work/table"
    done | sort -k1,1 >"$work/rows"
    for policy in $(cut -d' ' -f1 "$work/rows" | uniq); do
        printf '| %s | %s |' "$1" "$policy"
        for column in 2 3 4 5 6 7 8; do
            awk -v p="$policy" -v c=$column '$1 == p { print $c }' "$work/rows" | sort -g |
                awk -v c=$column '{ v[NR] = $1 } END {
                    printf c == 2 || c == 8 ? " %.0f |" : " %.2f |", (v[int((NR + 1) / 2)] + v[int(NR / 2) + 1]) / 2
                }'
        done
        awk -v p="$policy" '$1 == p && $6 > worst { worst = $6 } END { printf " %.1f |\n", worst }' "$work/rows"
    done
}
echo '| traffic | policy | cached, % of possible | TTFT mean | p90 | p99 | max | end to end | goodput % | max of the worst seed |'
echo '|---|---|---|---|---|---|---|---|---|---|'
table chat 'chat --rate 72 --requests 8000' "--workers 16 --block-size 32 --blocks 7800 $chat"
table chat-low 'chat --rate 72 --requests 8000' "--workers 16 --block-size 32 --blocks 37500 $chatlow"
table agents 'agents --rate 8 --requests 4000' "--workers 8 --blocks 6000 $large"
table mixed 'mixed --rate 16 --requests 4000' "--workers 8 --blocks 4000 $chat"
table overload 'overload --rate 20 --requests 16000' "--workers 8 --blocks 1600 $large"
table unequal 'chat --rate 72 --requests 8000' \
    "--workers 16 --block-size 32 --blocks 7800 --engine-speeds 1,1,1,0.5 $chat"
table none 'none --rate 30 --requests 4000' '--workers 16 --blocks 3000'
table burst 'burst --rate 40 --requests 4000' '--workers 16 --blocks 3000'
table zipf 'zipf --rate 40 --requests 4000' '--workers 16 --blocks 3000'
