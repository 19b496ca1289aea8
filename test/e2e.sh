#!/bin/sh
# Runs the end-to-end tests as two processes at once, because they mostly wait. Each process has its own programs and
# block of ports. Further arguments go to both, such as -v.
set -eu
cd "$(dirname "$0")/.."
# make storm, make test-image and others run these.
elsewhere='^Test(Image|APIServer|Release.*|Storm.*|Crowd.*)$'
go test -c -o bin/e2e.test ./e2e

# shard N: runs every second test, beginning with the Nth.
shard() {
	names=$(grep -ho '^func Test[A-Za-z0-9_]*' e2e/*_test.go | sed 's/func //' | grep -v '^TestMain$' | awk -v n="$1" 'NR % 2 == n % 2' | paste -sd '|')
	shift
	(cd e2e && ../bin/e2e.test -test.timeout 30m -test.run "^($names)\$" -test.skip "$elsewhere" "$@")
}
shard 1 "$@" >bin/e2e-1.log 2>&1 &
first=$!
status=0
shard 2 "$@" || status=1
wait $first || status=1
cat bin/e2e-1.log
exit $status
