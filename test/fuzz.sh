#!/bin/sh
# Runs each fuzz target of the module for FUZZTIME (default 4s).
set -eu
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for package in $(go list ./...); do
	for target in $(go test -list '^Fuzz' "$package" | grep '^Fuzz' || true); do
		echo "fuzzing $package $target for ${FUZZTIME:-4s}"
		# By default, Go may spend a minute on minimizing each input that reaches new code.
		if go test -run '^$' -fuzz "^$target\$" -fuzztime "${FUZZTIME:-4s}" -fuzzminimizetime 1s "$package" >"$log" 2>&1; then
			tail -n 2 "$log"
			continue
		fi
		cat "$log"
		# On a busy machine the go command sometimes reports the end of -fuzztime itself as a failure. A real failure names
		# the input that it saved, or the seed that failed.
		if grep -q 'context deadline exceeded' "$log" && ! grep -Eq 'Failing input written|seed#|panic|DATA RACE' "$log"; then
			echo "$target: the time was over; no input failed"
			continue
		fi
		exit 1
	done
done
