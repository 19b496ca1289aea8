#!/bin/sh
# Builds the root file system of kvepp's image: rootfs.sh DIR. It holds one program without libraries, the certificates
# of authorities for TLS, and the name of a user who is not root. The Dockerfile and import.sh make images of it.
# /app/epp and /bin/sleep are links to kvepp, which looks at the name by which it is called.
#
# GOARCH is the processor: amd64 or arm64; default: this machine's. VERSION is that of a release; default: none.
# COMMIT is the git commit that `kvepp version` prints; default: that of the sources, if they are in a git repository.
# LIBZMQ is the folder of a static libzmq (libzmq.sh); default: the script builds one in the cache.
# PROGRAM is the folder of the program; default: cmd/kvepp. The stand-in engine of examples/compose is examples/engine.
set -eu
root=${1:?usage: rootfs.sh DIR}
source=$(CDPATH= cd -- "$(dirname -- "$0")/../.." && pwd)
here=$source/manifests/image
processor=${GOARCH:-$(go env GOHOSTARCH)}
program=${PROGRAM:-cmd/kvepp}
triplet=""
if [ "$processor" != "$(go env GOHOSTARCH)" ]; then
	case $processor in
	amd64) triplet=x86_64-linux-gnu ;;
	arm64) triplet=aarch64-linux-gnu ;;
	*) echo "GOARCH=$processor: give amd64 or arm64" >&2; exit 1 ;;
	esac
fi
if [ -z "${LIBZMQ:-}" ]; then
	LIBZMQ=${KVEPP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvepp}/libzmq-$(cksum <"$here/libzmq.sh" | cut -d' ' -f1)${triplet:+-$processor}
	"$here/libzmq.sh" "$LIBZMQ" $triplet
fi
authorities=/etc/ssl/certs/ca-certificates.crt
[ -e "$authorities" ] || { echo "missing: $authorities; install ca-certificates, then run this again." >&2; exit 1; }

mkdir -p "$root/etc/ssl/certs"
cp "$authorities" "$root$authorities"
echo 'kvepp:x:65532:65532::/:' >"$root/etc/passwd"
echo 'kvepp:x:65532:' >"$root/etc/group"
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"
# The program contains time zones, so that TZ works: templates of models print dates. glibc's linker warns about lookups
# of users and hosts, which need libraries that the image does not have. libzmq looks up hosts by files and DNS, which
# the program contains. CGO_LDFLAGS repeats pkg-config's output, because Go's build cache does not call pkg-config again
# if only PKG_CONFIG_PATH changes.
cd "$source"
: "${COMMIT:=$(git describe --always --abbrev=40 --dirty=-modified --exclude='*' 2>/dev/null || true)}"
PKG_CONFIG_PATH=$LIBZMQ/lib/pkgconfig CGO_CFLAGS="-O2 -g -I$LIBZMQ/include" CGO_LDFLAGS="-O2 -g -L$LIBZMQ/lib" CGO_ENABLED=1 GOARCH=$processor CC=${triplet:+$triplet-}gcc CXX=${triplet:+$triplet-}g++ go build -trimpath -buildvcs=false -tags netgo,osusergo,timetzdata \
	-ldflags "-s -w -X main.commit=$COMMIT -X main.release=${VERSION:-} -linkmode external -extldflags '-static -lstdc++ -lm'" -o "$root/${program##*/}" "./$program" 2>"$root.log" ||
	{ cat "$root.log" >&2; rm -f "$root.log"; exit 1; }
rm -f "$root.log"
if [ "$program" = cmd/kvepp ]; then   # the names by which KServe calls llm-d's picker and its preStop hook
	mkdir -p "$root/app" "$root/bin"
	ln -sfn ../kvepp "$root/app/epp"
	ln -sfn ../kvepp "$root/bin/sleep"
fi
