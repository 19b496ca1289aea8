#!/bin/sh
# Measures what kvepp adds to a request behind a real Envoy; README.md explains the figures. The first run installs and builds
# programs in the cache folder, which takes some minutes.
#
#   path.sh                    everything (about twelve minutes)
#   path.sh -only streams      one part: bodies, chats or streams; page runs only so
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
	# The last release that has the whole picker. Build it in its module's folder, with the versions that its go.mod names.
	module=sigs.k8s.io/gateway-api-inference-extension@v1.5.0
	gaie=$cache/bench-gaie-${module##*@}
	if [ ! -e "$gaie/complete" ]; then
		printf '%s\n' "building the Gateway API's endpoint picker ${module##*@} into $gaie (minutes, once)" >&2
		mkdir -p "$gaie/crds"
		dir=$(cd / && GOFLAGS=-mod=mod GOWORK=off go mod download -json "$module" | sed -n 's/^	"Dir": "\(.*\)",$/\1/p')
		[ -n "$dir" ] || { printf '%s\n' "test/bench/path.sh: $module could not be fetched" >&2; exit 1; }
		cp "$dir"/config/crd/bases/*.yaml "$gaie/crds"
		chmod u+w "$gaie/crds"/*
		(cd "$dir" && GOFLAGS= GOWORK=off CGO_ENABLED=0 nice go build -mod=readonly -trimpath -buildvcs=false -o "$gaie/epp" ./cmd/epp) >&2
		touch "$gaie/complete"
	fi
	set -- "$@" -gaie "$gaie" -kube "$("$here/../tools/install.sh" kube)"
	;;
*)
	printf '%s\n' "test/bench/path.sh: PEER is gaie or nothing, not $PEER" >&2
	exit 1
	;;
esac
(cd "$here/../.." && go build -o "$cache/bench-path" ./test/bench/path && go build -o "$cache/bench-path-kvepp" ./cmd/kvepp)
exec "$cache/bench-path" -out "${OUT:-$here/../../bin/bench}" -root "$here/../.." -kvepp "$cache/bench-path-kvepp" -envoy "$tools/bin/envoy" -model "$model" -rounds "${ROUNDS:-5}" "$@"
