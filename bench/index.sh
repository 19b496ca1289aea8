#!/bin/sh
# Measures kvepp's index beside Dynamo's; README.md says what and how. Builds what that needs into the cache folder first
# (once, some minutes).
#
#   index.sh                   tree1m, trace and micro
#   index.sh tree10m ...       these; tree10m takes 4 GiB of memory and some minutes
#
# ROUNDS: measurements of each kind (default 5). KVEPP_CACHE moves the cache (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp).
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
cache=${KVEPP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvepp}
say() { printf '%s\n' "$*" >&2; }

command -v cargo >/dev/null || { say "bench/index.sh: cargo (Rust) is needed to build Dynamo's crate; see https://rustup.rs"; exit 1; }
[ "$#" -gt 0 ] || set -- tree1m trace micro

target=$cache/bench-index-rs
[ -d "$target/release" ] || say "building dynamo-kv-router (a few minutes, once)"
CARGO_TARGET_DIR=$target cargo build --release --locked --quiet --manifest-path "$here/index-rs/Cargo.toml"
go=$cache/bench-index-go
(cd "$here/.." && go build -o "$go" ./bench/index-go)
exec python3 "$here/index.py" --go "$go" --rs "$target/release/index-rs" --rounds "${ROUNDS:-5}" "$@"
