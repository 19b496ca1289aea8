#!/bin/sh
# Runs every fuzz target of the module for a while: FUZZTIME each (default 20s).
set -eu
cd "$(dirname "$0")/.."
for package in $(go list ./...); do
	for target in $(go test -list '^Fuzz' "$package" | grep '^Fuzz' || true); do
		echo "fuzzing $package $target for ${FUZZTIME:-20s}"
		go test -run '^$' -fuzz "^$target\$" -fuzztime "${FUZZTIME:-20s}" "$package"
	done
done
