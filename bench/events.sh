#!/bin/sh
# Measures what KV events, hashing and choosing cost kvepp; README.md says what and how. Builds what that needs into the
# cache folder first (once, some minutes).
#
# ROUNDS: measurements of each kind (default 7). KVEPP_CACHE moves the cache (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp).
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
part=events
. "$here/build.sh"
exec python3 "$here/events.py" --go "$go" --rs "$rs" --rounds "${ROUNDS:-7}"
