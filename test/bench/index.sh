#!/bin/sh
# Compares kvepp's index with Dynamo's; README.md explains the figures. The first run builds programs in the cache folder,
# which takes some minutes.
#
#   index.sh                   tree1m, trace, micro and hybrid
#   index.sh tree10m ...       the named workloads; tree10m takes 4 GiB of memory and some minutes
#
# ROUNDS       measurements of each kind (default 5)
# OUT          the folder for charts of the tables, in SVG (default bin/bench)
# KVEPP_CACHE  the cache folder (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp)
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
part=index
. "$here/build.sh"
[ "$#" -gt 0 ] || set -- tree1m trace micro hybrid
exec python3 "$here/index.py" --go "$go" --rs "$rs" --rounds "${ROUNDS:-5}" "$@"
