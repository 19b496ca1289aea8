#!/bin/sh
# Builds libzmq as a static library from Debian's source package: libzmq.sh PREFIX [TRIPLET].
#
# TRIPLET, such as aarch64-linux-gnu, builds it for another processor with Debian's cross compiler.
#
# Debian's own libzmq.a needs Kerberos, NORM and libxml2, which Debian does not have as static libraries. kvepp needs
# only TCP and IPC, without CURVE and GSSAPI. Then libzmq needs only the C and C++ libraries. An existing library stays.
set -eu
prefix=${1:?usage: libzmq.sh PREFIX [TRIPLET]}
triplet=${2:-}
[ ! -e "$prefix/complete" ] || exit 0
die() { printf '%s\n' "$*" >&2; exit 1; }

missing=""
compiler=g++
cross=""
if [ -n "$triplet" ]; then
	compiler=$triplet-g++
	cross="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=${triplet%%-*} -DCMAKE_C_COMPILER=$triplet-gcc -DCMAKE_CXX_COMPILER=$triplet-g++"
fi
for program in cmake:cmake $compiler:g++${triplet:+-$(echo "$triplet" | tr _ -)} make:make pkg-config:pkg-config dpkg-source:dpkg-dev; do
	command -v "${program%%:*}" >/dev/null || missing="$missing ${program#*:}"
done
if [ -n "$missing" ]; then
	[ "$(id -u)" = 0 ] || die "missing:$missing. Install them, then run this again."
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } >&2
fi

# Uses the system's package sources, for source packages, in separate lists: the system's own lists do not change.
mkdir -p "$prefix"
prefix=$(CDPATH= cd -- "$prefix" && pwd)
work=$prefix/build.$$
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/parts" "$work/lists/partial"
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
	case $file in
	*.sources) sed 's/^Types:.*/Types: deb-src/' "$file" >"$work/parts/${file##*/}" ;;
	*.list) [ ! -e "$file" ] || sed -n 's/^deb /deb-src /p' "$file" >"$work/parts/${file##*/}" ;;
	esac
done
apt="apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts=$work/parts -o Dir::State::lists=$work/lists -o APT::Sandbox::User=root"
$apt update >&2
(cd "$work" && $apt source --download-only zeromq3 >&2 && dpkg-source --no-check -x zeromq3_*.dsc source >&2)   # apt has checked it

cmake -S "$work/source" -B "$work/made" -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib \
	-DBUILD_STATIC=ON -DBUILD_SHARED=OFF -DBUILD_TESTS=OFF -DENABLE_CURVE=OFF -DWITH_LIBSODIUM=OFF -DWITH_LIBBSD=OFF -DENABLE_WS=OFF \
	-DWITH_DOCS=OFF $cross >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
make -C "$work/made" -j "$(nproc)" install >"$work/log" 2>&1 || { tail -n 50 "$work/log" >&2; exit 1; }
touch "$prefix/complete"
