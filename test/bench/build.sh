# index.sh and events.sh source this file. They set here and part. It builds their programs in the cache folder, and sets rs
# (the program of Dynamo's crate) and go (the program of kvepp, bench/$part), and what charts.sh sets.
cache=${KVEPP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvepp}
say() { printf '%s\n' "$*" >&2; }

command -v cargo >/dev/null || { say "bench/$part.sh: cargo (Rust) is needed to build Dynamo's crate; see https://rustup.rs"; exit 1; }
target=$cache/bench-index-rs
[ -d "$target/release" ] || say "building dynamo-kv-router (a few minutes, once)"
CARGO_TARGET_DIR=$target cargo build --release --locked --quiet --manifest-path "$here/index/rs/Cargo.toml"
rs=$target/release/index-rs
go=$cache/bench-$part
(cd "$here/../.." && go build -o "$go" "./test/bench/$part")
. "$here/charts.sh"
