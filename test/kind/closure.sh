#!/bin/sh
# Copies programs and the libraries that they load into a folder that becomes an image. Each file keeps its path, so that
# programs find each other. Then writes the folder's cache of the dynamic loader.
#
#   closure.sh FOLDER ROOT FILE...
#
# ROOT is the root of the file system that has the FILEs: / or a folder, which the script enters by chroot.
set -eu
folder=$1 root=${2%/}
shift 2
mkdir -p "$folder/usr" "$folder/etc" "$folder/tmp"
chmod 1777 "$folder/tmp"
for d in bin sbin lib lib64; do
	if [ -L "$root/$d" ] && [ ! -e "$folder/$d" ]; then # a link into /usr on Debian
		mkdir -p "$folder/usr/$d"
		ln -s "usr/$d" "$folder/$d"
	fi
done
{
	printf '%s\n' "$@"
	for file; do
		chroot "$root/" ldd "$file" 2>/dev/null | grep -oE '/[^ ]+' || true # ldd fails for a static program
	done
} | sort -u | while read -r file; do
	mkdir -p "$folder${file%/*}"
	cp -L "$root$file" "$folder$file"
	case $file in *.so*) echo "${file%/*}" >>"$folder/etc/ld.so.conf" ;; esac
done
ldconfig -r "$folder"
