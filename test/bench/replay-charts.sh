#!/bin/sh
# Makes the trace that ships, and the charts of docs/replay.md (of that trace) and of docs/routing.md (of the traffic
# `chat` of test/bench/replay-table.sh, seed 101). All are the same for the same kvepp.
set -eu
kvepp=${KVEPP:-bin/kvepp}
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
mkdir -p examples/replay docs/charts
"$kvepp" replay --generate chat --requests 2000 --rate 16 --trace-block-size 64 | gzip -9n >examples/replay/chat.jsonl.gz
"$kvepp" replay examples/replay/chat.jsonl.gz --format mooncake-delta --trace-block-size 64 --blocks 3000 \
    --compare 'in-turn=--router-mode=round-robin' --compare 'scale-8=--router-prefill-load-scale=8' \
    --compare 'time=--router-policy=time' --compare 'sessions=--router-session-affinity-ttl-secs=600' \
    --svg "$work/replay" 2>/dev/null
"$kvepp" replay --generate chat --rate 72 --requests 8000 --seed 101 --trace-block-size 64 >"$work/trace"
"$kvepp" replay "$work/trace" --seed 101 --format mooncake-delta --trace-block-size 64 --workers 16 --block-size 32 \
    --blocks 7800 --prefill-ms 0,0.035,1e-6 --decode-ms 6,11,0 --svg "$work/routing" \
    --compare 'time=--router-policy=time' --compare 'llm-d=--router-policy=llm-d' \
    --compare 'preble-e2=--router-policy=preble-e2' --compare 'lmetric=--router-policy=lmetric' \
    --compare 'least-loaded=--router-mode=least-loaded' 2>/dev/null
for chart in cached ttft balance; do
    cp "$work/replay/$chart.svg" "docs/charts/replay-$chart.svg"
done
for chart in cached ttft e2e; do
    cp "$work/routing/$chart.svg" "docs/charts/routing-$chart.svg"
done
