#!/bin/sh
# Makes kvepp's image, like the Dockerfile but without a base image or a registry: import.sh IMAGE.
set -eu
image=${1:?usage: import.sh IMAGE}
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
"$here/rootfs.sh" "$root"
chmod 755 "$root"
tar -C "$root" --owner=0 --group=0 -c . | docker import -c 'USER 65532:65532' -c 'ENTRYPOINT ["/kvepp"]' -c 'CMD ["help"]' \
	-c 'EXPOSE 9002 9003 9090' - "$image"
