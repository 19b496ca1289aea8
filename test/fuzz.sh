#!/bin/sh
# Runs each fuzz target of the module for FUZZTIME (default 1s), two at once, each on one processor. A package is built
# once for all of its targets.
set -eu
cd "$(dirname "$0")/.."

# fuzz PROGRAM PACKAGE TARGET: runs one target.
if [ $# -gt 0 ]; then
	log=$1.$3.log
	cd "$2"
	# By default, Go may spend a minute on minimizing each input that reaches new code.
	if "$1" -test.run '^$' -test.fuzz "^$3\$" -test.fuzztime "${FUZZTIME:-1s}" -test.fuzzminimizetime 1s -test.parallel 1 \
		-test.fuzzcachedir "$(go env GOCACHE)/fuzz/kvepp/$2" >"$log" 2>&1; then
		echo "$2 $3: $(tail -n 2 "$log" | head -n 1)"
		exit
	fi
	echo "$2 $3 failed:"
	cat "$log"
	# On a busy machine the program sometimes reports the end of the time, or a process that was slow to end, as a failure.
	# Then no line of a test says what is wrong, and neither the input that the program saved nor a seed fails again.
	if grep -Eq 'context deadline exceeded|hung or terminated unexpectedly' "$log" &&
		! grep -Eq 'panic|DATA RACE|_test\.go:[0-9]' "$log" && "$1" -test.run "^$3\$" -test.timeout 1m; then
		sed -n 's/.*Failing input written to //p' "$log" | xargs -r rm -v
		echo "$3: no input fails when it runs again"
		exit
	fi
	exit 1
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for package in $(grep -rl --include='*_test.go' '^func Fuzz' . | xargs -n 1 dirname | sort -u); do
	program=$work/$(echo "$package" | tr / _).test
	go test -c -fuzz . -o "$program" "$package"
	grep -ho '^func Fuzz[A-Za-z0-9_]*' "$package"/*_test.go | sed "s|func |$program $package |" >>"$work/targets"
done
xargs -P 2 -n 3 test/fuzz.sh <"$work/targets"
