#!/bin/sh
# Makes what a release of kvepp consists of: release.sh VERSION [DIR] (default: bin/release-VERSION).
#
#   kvepp-VERSION-linux-ARCH.tar.gz   the program, static, for amd64 and arm64, and its documentation
#   kvepp-VERSION-image.tar           an OCI archive of the image for both (skopeo copy --all, ctr images import)
#   kvepp_VERSION_ARCH.deb            the program with a systemd unit
#   kvepp-VERSION.tgz                 the Helm chart, with this version and image
#   kvepp-VERSION-kustomize.tar.gz    the kustomize base, components and overlays
#   kvepp-VERSION.spdx.json           what the program is made of (SPDX 2.3)
#   kvepp-VERSION.provenance.json     how it was built (in-toto, SLSA 1), not signed
#   NOTES.md, SHA256SUMS              the section of CHANGELOG.md, and the digests of all others
#
# Two runs of the same commit make the same bytes: times are those of the commit (SOURCE_DATE_EPOCH). ARCHES (default:
# "amd64 arm64") names the processors; another processor than this machine's needs Debian's cross compiler. IMAGE is
# the image's name in the chart.
set -eu
version=${1:?usage: release.sh VERSION [DIR]}
root=$(CDPATH= cd -- "$(dirname -- "$0")/../.." && pwd)
out=${2:-$root/bin/release-$version}
arches=${ARCHES:-amd64 arm64}
image=${IMAGE:-kvepp}
die() { printf 'release: %s\n' "$*" >&2; exit 1; }
say() { printf 'release: %s\n' "$*" >&2; }

printf %s "$version" | grep -Eq '^[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.]+)?$' || die "VERSION=$version: give a version such as 1.2.3 or 1.2.3-rc.1"
for program in dpkg-deb tar gzip sha256sum; do
	command -v $program >/dev/null || die "missing: $program"
done
rm -rf "$out"
mkdir -p "$out"
out=$(CDPATH= cd -- "$out" && pwd)
cd "$root"
: "${COMMIT:=$(git describe --always --abbrev=40 --dirty=-modified --exclude='*')}"
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct)}"
export COMMIT SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# archive FILE DIR NAME...: a .tar.gz whose bytes depend on the contents alone
archive() {
	file=$1
	dir=$2
	shift 2
	tar -C "$dir" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=go=rX,u+rw,a-s -c "$@" | gzip -9n >"$file"
}

section() { awk -v title="## [$1]" 'index($0, "## [") == 1 { inside = index($0, title) == 1; next } inside' CHANGELOG.md; }
section "$version" >"$work/notes"
if ! grep -q . "$work/notes"; then
	say "CHANGELOG.md has no section [$version]: the notes are those of [Unreleased]"
	section Unreleased >"$work/notes"
fi
sed -e '/./,$!d' "$work/notes" | grep -v '^Next: ' >"$out/NOTES.md"

# The licences of what is in the static program: Go and its modules, libzmq, the C and C++ libraries.
licences() {
	go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}' ./cmd/kvepp | sort -u >"$work/modules"
	{
		printf 'Go %s %s\n' "$(go env GOVERSION)" "$(go env GOROOT)"
		grep . "$work/modules"
		for package in libzmq3-dev libc6-dev libstdc++6; do
			printf '%s - /usr/share/doc/%s\n' "$package" "$package"
		done
	} | while read -r name of dir; do
		found=
		for file in "$dir"/LICENSE* "$dir"/NOTICE* "$dir/copyright"; do
			[ -f "$file" ] || continue
			found=yes
			printf '\n======== %s %s: %s\n\n' "$name" "$of" "${file##*/}"
			cat "$file"
		done
		[ "$found" ] || die "$dir has no licence of $name"
	done
}
licences >"$work/THIRD-PARTY-LICENSES"
[ -s "$work/THIRD-PARTY-LICENSES" ] || die "no licences were found"

for arch in $arches; do
	say "building kvepp for $arch (minutes, at first)"
	GOARCH=$arch VERSION=$version manifests/image/rootfs.sh "$work/$arch"
	name=kvepp-$version-linux-$arch
	mkdir "$work/$name"
	cp "$work/$arch/kvepp" LICENSE "$work/THIRD-PARTY-LICENSES" README.md CHANGELOG.md SECURITY.md "$work/$name"
	cp -r docs "$work/$name"
	archive "$out/$name.tar.gz" "$work" "$name"

	deb=$work/deb-$arch
	mkdir -p "$deb/DEBIAN" "$deb/usr/bin" "$deb/lib/systemd/system" "$deb/etc/kvepp" "$deb/usr/share/doc/kvepp"
	cp "$work/$arch/kvepp" "$deb/usr/bin/kvepp"
	cp manifests/release/kvepp.service "$deb/lib/systemd/system/kvepp.service"
	cp manifests/release/kvepp.yaml manifests/release/endpoints.yaml "$deb/etc/kvepp/"
	cat LICENSE "$work/THIRD-PARTY-LICENSES" >"$deb/usr/share/doc/kvepp/copyright"
	cp -r README.md SECURITY.md docs "$deb/usr/share/doc/kvepp"
	gzip -9nc CHANGELOG.md >"$deb/usr/share/doc/kvepp/changelog.gz"
	printf '%s\n' /etc/kvepp/kvepp.yaml /etc/kvepp/endpoints.yaml >"$deb/DEBIAN/conffiles"
	cat >"$deb/DEBIAN/control" <<-END
		Package: kvepp
		Version: $(printf %s "$version" | tr - '~')
		Architecture: $arch
		Maintainer: The developers of kvepp
		Section: net
		Priority: optional
		Depends: ca-certificates
		Installed-Size: $(du -sk --apparent-size "$deb/usr" | cut -f1)
		Description: endpoint picker that sends LLM requests to the worker that holds their prefix
		 An external processor for Envoy. It reads each prompt, computes the engine's token ids and block hashes, and
		 chooses the worker by cached blocks and load.
	END
	chmod -R go=rX,u+rw "$deb"
	find "$deb" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
	dpkg-deb --root-owner-group -Zgzip --build "$deb" "$out/kvepp_${version}_$arch.deb" >/dev/null
done

say "making the image and the SBOM"
(cd manifests/release/pack && GOFLAGS=-mod=readonly GOWORK=off CGO_ENABLED=0 go build -trimpath -buildvcs=false -o "$work/pack" .)
roots=""
for arch in $arches; do roots="$roots $arch=$work/$arch"; done
pack() {
	"$work/pack" -what "$1" -version "$version" -commit "$COMMIT" -epoch "$SOURCE_DATE_EPOCH" -libzmq "$(dpkg-query -f '${source:Upstream-Version}' -W libzmq3-dev 2>/dev/null || echo unknown)" \
		-out "$out" $roots
}
pack image,sbom

say "packing the chart and the kustomize bundle"
cp -r manifests/chart "$work/kvepp"
sed -i "s/^version: .*/version: $version/; s/^appVersion: .*/appVersion: \"$version\"/" "$work/kvepp/Chart.yaml"
sed -i "s|^  repository: kvepp$|  repository: $image|" "$work/kvepp/values.yaml"
archive "$out/kvepp-$version.tgz" "$work" kvepp
mkdir "$work/kvepp-$version-kustomize"
cp -r manifests/kustomize/. "$work/kvepp-$version-kustomize"
find "$work/kvepp-$version-kustomize" -name '*.yaml' -exec sed -i "s|image: kvepp:dev$|image: $image:$version|" {} +
archive "$out/kvepp-$version-kustomize.tar.gz" "$work" "kvepp-$version-kustomize"

pack provenance
(cd "$out" && sha256sum $(ls | grep -v '^SHA256SUMS$') >SHA256SUMS)
say "$out has:"
ls -l "$out" >&2
