#!/bin/sh
# Compares kvepp's tokenizer with others; README.md explains the figures. The first run installs and builds programs in the
# cache folder, which takes some minutes.
#
#   tokenizers.sh              all six models
#   tokenizers.sh qwen3 ...    the named models
#
# ROUNDS       measurements of each kind (default 7)
# OUT          the folder for charts of the tables, in SVG (default bin/bench)
# KVEPP_CACHE  the cache folder (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp)
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
cache=${KVEPP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvepp}
say() { printf '%s\n' "$*" >&2; }

command -v cargo >/dev/null || { say "test/bench/tokenizers.sh: cargo (Rust) is needed to build the peers; see https://rustup.rs"; exit 1; }
[ "$#" -gt 0 ] || set -- llama3_1 qwen3 gptoss deepseek_v3 gemma3 llama2
pairs=""
for name; do
	folder=$("$here/../tools/models.sh" "$name")
	pairs="$pairs
$name=$folder"
done

target=$cache/bench-tokenizers-rs
[ -d "$target/release" ] || say "building tokenizers and fastokens (a few minutes, once)"
CARGO_TARGET_DIR=$target cargo build --release --locked --quiet --manifest-path "$here/tokenizers/rs/Cargo.toml"
go=$cache/bench-tokenizers
(cd "$here/../.." && go build -o "$go" ./test/bench/tokenizers)

. "$here/charts.sh"
python=$("$here/../tools/install.sh" oracles)/bin/python # has tokenizers

IFS='
'
exec "$python" "$here/compare.py" --go "$go" --rs "$target/release/tokenizers-rs" --rounds "${ROUNDS:-7}" $pairs
