#!/bin/sh
# Runs `make e2e-aigw`: this folder's tests, with Envoy AI Gateway, in network and mount namespaces of their own, because the
# gateway's ports are fixed and its Envoy looks up the names of Services. The tests get all arguments.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
KVEPP_AIGW=$("$here/../tools/install.sh" aigw)
export KVEPP_AIGW
cd "$here"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "127.0.0.1 localhost a.test a-buffered.test b.test kvepp-a.default.svc kvepp-b.default.svc" >"$work/hosts"
nice go test -c -o "$work/aigw.test" .
unshare --map-root-user --net --mount --pid --fork --kill-child --mount-proc sh -c 'ip link set lo up; mount --bind "$0" /etc/hosts; exec nice "$@"' \
	"$work/hosts" "$work/aigw.test" -test.v -test.timeout 15m "$@"
