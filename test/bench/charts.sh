# The scripts of this folder source this file. They set here and cache. It builds the program that draws charts
# (KVEPP_CHARTS), and names their folder (OUT).
OUT=${OUT:-$here/../../bin/bench}
KVEPP_CHARTS=$cache/bench-charts
export OUT KVEPP_CHARTS
(cd "$here/../.." && go build -o "$KVEPP_CHARTS" ./test/bench/charts)
