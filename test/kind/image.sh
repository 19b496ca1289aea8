#!/bin/sh
# Writes an image archive, as `docker save` would, from a folder with the image's whole file system. It needs no
# container runtime and no registry; `kind load image-archive` and `docker load` read it. All files belong to root.
#
# image.sh ARCHIVE NAME FOLDER CONFIG
#
# NAME includes the tag. CONFIG is a JSON object with the settings of a Dockerfile: Entrypoint, Env, User, StopSignal.
set -eu
archive=$1 name=$2 folder=$3 config=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -C "$folder" --numeric-owner --owner=0 --group=0 --sort=name --mtime=@0 -cf "$work/layer.tar" .
sum=$(sha256sum <"$work/layer.tar" | cut -d' ' -f1)
printf '{"architecture":"%s","os":"linux","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
	"$(go env GOARCH)" "$config" "$sum" >"$work/config.json"
printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$name" >"$work/manifest.json"
tar -C "$work" -cf "$archive.$$" manifest.json config.json layer.tar
mv "$archive.$$" "$archive"
