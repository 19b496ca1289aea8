#!/bin/sh
# timed.sh NAME COMMAND...: runs a command, prints how long it took, and appends that to the file KVEPP_TIMES if it is set.
name=$1
shift
began=$(date +%s)
"$@"
status=$?
took=$(($(date +%s) - began))
printf '%5d s  %s%s\n' "$took" "$name" "$([ $status = 0 ] || echo "  failed")" | tee -a "${KVEPP_TIMES:-/dev/null}"
exit $status
