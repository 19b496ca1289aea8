#!/bin/sh
# Measures what kvepp adds to a request behind a real Envoy; README.md explains the figures. The first run installs and builds
# programs in the cache folder, which takes some minutes.
#
#   path.sh                    everything (about twelve minutes)
#   path.sh -only streams      one part: bodies, chats or streams; page and shadow run only so
#
# PEER=gaie    also measures the Gateway API's endpoint picker, which needs a Kubernetes API server. The first such run compiles
#              both, which takes about 15 minutes
# ROUNDS       measurements of each kind (default 5)
# OUT          the folder for charts of the tables, in SVG (default bin/bench)
# KVEPP_CACHE  the cache folder (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp)
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
cache=${KVEPP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvepp}
tools=$("$here/../tools/install.sh" tools)
model=$("$here/../tools/models.sh" qwen3)
case ${PEER:-} in
"") ;;
gaie)
	set -- "$@" -gaie "$("$here/../tools/install.sh" gaie)" -kube "$("$here/../tools/install.sh" kube)"
	;;
*)
	printf '%s\n' "test/bench/path.sh: PEER is gaie or nothing, not $PEER" >&2
	exit 1
	;;
esac
(cd "$here/../.." && go build -o "$cache/bench-path" ./test/bench/path && go build -o "$cache/bench-path-kvepp" ./cmd/kvepp)
exec "$cache/bench-path" -out "${OUT:-$here/../../bin/bench}" -root "$here/../.." -kvepp "$cache/bench-path-kvepp" -envoy "$tools/bin/envoy" -model "$model" -rounds "${ROUNDS:-5}" "$@"
