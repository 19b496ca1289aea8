#!/bin/sh
# Measures what kvepp costs a request behind a real Envoy; README.md says what and how. Installs and builds what that needs into
# the cache folder first (once, some minutes).
#
#   path.sh                    everything (about twelve minutes)
#   path.sh -only streams      one part: bodies, chats or streams
#
# ROUNDS: measurements of each kind (default 5). KVEPP_CACHE moves the cache (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp).
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
cache=${KVEPP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvepp}
tools=$("$here/../e2e/tools/install.sh" tools)
model=$("$here/../e2e/tools/models.sh" qwen3)
(cd "$here/.." && go build -o "$cache/bench-path-go" ./bench/path-go && go build -o "$cache/bench-path-kvepp" ./cmd/kvepp)
exec "$cache/bench-path-go" -root "$here/.." -kvepp "$cache/bench-path-kvepp" -envoy "$tools/bin/envoy" -model "$model" -rounds "${ROUNDS:-5}" "$@"
