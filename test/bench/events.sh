#!/bin/sh
# Measures the CPU time of KV events, hashing and selection in kvepp; README.md explains the figures. The first run builds
# programs in the cache folder, which takes some minutes.
#
# ROUNDS       measurements of each kind (default 7)
# OUT          the folder for charts of the tables, in SVG (default bin/bench)
# KVEPP_CACHE  the cache folder (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp)
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
part=events
. "$here/build.sh"
(cd "$here/../.." && go build -o "$go-binding" ./test/bench/events/binding)
exec python3 "$here/events.py" --go "$go" --rs "$rs" --rounds "${ROUNDS:-7}"
