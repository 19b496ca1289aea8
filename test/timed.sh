#!/bin/sh
# timed.sh NAME COMMAND...: runs a command, prints how long it took and how much processor time, and appends that to the
# file KVEPP_TIMES if it is set.
name=$1
shift
computed=$(mktemp)
trap 'rm -f "$computed"' EXIT
began=$(date +%s)
"$@"
status=$?
took=$(($(date +%s) - began))
times >"$computed" # of the children; in a pipe, it would be those of a new shell
computing=$(awk -F '[ms ]+' 'NR == 2 { printf "%d", $1 * 60 + $2 + $3 * 60 + $4 }' "$computed")
printf '%5d s, %5d s of processors  %s%s\n' "$took" "$computing" "$name" "$([ $status = 0 ] || echo "  failed")" | tee -a "${KVEPP_TIMES:-/dev/null}"
exit $status
