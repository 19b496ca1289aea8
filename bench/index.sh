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
part=index
. "$here/build.sh"
[ "$#" -gt 0 ] || set -- tree1m trace micro
exec python3 "$here/index.py" --go "$go" --rs "$rs" --rounds "${ROUNDS:-5}" "$@"
