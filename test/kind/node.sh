#!/bin/sh
# Makes kind's node image without a registry. The image has Debian's root file system with kind's own files, Kubernetes'
# programs, and an image for each program of the control plane. It follows images/base/Dockerfile of kind, but takes from Debian
# the programs that kind builds from source.
#
#   node.sh IMAGE DEBIAN PROGRAMS KIND
#
# IMAGE is the image's name. The others are folders: Debian's root file system, Kubernetes' programs, kind's Go module. node.sh
# does not change DEBIAN; it mounts an overlay. Run it as root, in its own mount namespace (unshare --mount).
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
image=$1 debian=$2 programs=$3 files=$4/images/base/files
work=$(mktemp -d) # the file system of TMPDIR must support overlays
containerd=""
trap 'cd /; [ -z "$containerd" ] || kill "$containerd"; wait; ! mountpoint -q "$work/node" || umount -R "$work/node"; rm -rf --one-file-system "$work"' EXIT
mkdir "$work/archives"

# archive PROGRAM NAME FILE... writes an image with one of Kubernetes' programs and these files from Debian.
archive() {
	program=$1 name=$2
	shift 2
	root=$work/image
	[ $# = 0 ] || "$here/closure.sh" "$root" "$debian" "$@"
	mkdir -p "$root/usr/local/bin" "$root/etc" "$root/tmp"
	cp "$programs/$program" "$root/usr/local/bin/"
	echo 'root:x:0:0:root:/:/' >"$root/etc/passwd"
	"$here/image.sh" "$work/archives/$program.tar" "$name" "$root" \
		'{"Env":["PATH=/usr/local/bin:/usr/sbin:/usr/bin"],"Entrypoint":["/usr/local/bin/'"$program"'"]}'
	rm -rf "$root"
}

version=$("$programs/kubeadm" version -o short)
"$programs/kubeadm" config images list --kubernetes-version "$version" >"$work/images"
for program in etcd kube-apiserver kube-controller-manager kube-scheduler coredns; do
	archive $program "$(grep "/$program:" "$work/images")"
done
# kind's configuration of containerd names the pause image that it needs; the one in kubeadm's list is unused.
archive pause "$(sed -n 's/.*sandbox_image = "\(.*\)".*/\1/p' "$files/etc/containerd/config.toml")"
# kube-proxy writes its rules with nft, and counts connections with conntrack.
archive kube-proxy "$(grep /kube-proxy: "$work/images")" /usr/sbin/nft /usr/sbin/conntrack

mkdir "$work/upper" "$work/scratch" "$work/node"
mount -t overlay overlay -o "lowerdir=$debian,upperdir=$work/upper,workdir=$work/scratch" "$work/node"
cd "$work/node"
install -m755 "$programs/kubelet" "$programs/kubeadm" "$programs/kubectl" usr/bin/
install -D -m755 -t usr/local/bin "$files/usr/local/bin/entrypoint"
install -D -m755 -t kind/bin "$files"/kind/bin/*
cp -r "$files/etc/." etc/
printf %s "$version" >kind/version
echo linux >kind/product_name # entrypoint rewrites both
echo 0 >kind/product_uuid
ln -s /usr/bin/containerd usr/local/bin/containerd
mkdir -p opt/cni etc/cni/net.d etc/kubernetes/manifests
ln -s /usr/lib/cni opt/cni/bin
subnet=$(sed -n 's/^ *podSubnet: //p' "$here/cluster.yaml")
cat >etc/cni/net.d/10-bridge.conflist <<-END
	{"cniVersion": "0.4.0", "name": "bridge", "plugins": [
	  {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
	   "ipam": {"type": "host-local", "ranges": [[{"subnet": "$subnet"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
	  {"type": "portmap", "capabilities": {"portMappings": true}}]}
END
chroot . ctr oci spec | jq '.hooks.createContainer += [{path: "/kind/bin/mount-product-files.sh"}] | del(.process.rlimits)' >"$work/spec"
cp "$work/spec" etc/containerd/cri-base.json
# Without CAP_SYS_RESOURCE no process may have a lower OOM score than its parent.
sed -i 's/restrict_oom_score_adj = false/restrict_oom_score_adj = true/' etc/containerd/config.toml
rm -f lib/systemd/system/sysinit.target.wants/systemd-tmpfiles-setup.service lib/systemd/system/multi-user.target.wants/* \
	etc/systemd/system/*.wants/* lib/systemd/system/local-fs.target.wants/* lib/systemd/system/sockets.target.wants/*udev* \
	lib/systemd/system/sockets.target.wants/*initctl* lib/systemd/system/basic.target.wants/*
echo ReadKMsg=no >>etc/systemd/journald.conf
ln -sf /lib/systemd/systemd sbin/init
chroot . systemctl --quiet enable kubelet.service containerd.service undo-mount-hacks.service
chroot . systemctl --quiet mask systemd-binfmt.service

# containerd itself imports the images, and unpacks them only when the node runs.
mount -t proc proc proc
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs dev
mknod dev/null c 1 3
mknod dev/urandom c 1 9
chroot . containerd --log-level error >"$work/containerd.log" 2>&1 &
containerd=$!
tries=0
until chroot . ctr version >/dev/null 2>&1; do
	tries=$((tries + 1))
	[ $tries -lt 100 ] && kill -0 "$containerd" || { cat "$work/containerd.log" >&2; exit 1; }
	sleep 0.2
done
for archive in "$work"/archives/*.tar; do
	chroot . ctr --namespace k8s.io images import --all-platforms --no-unpack --digests - <"$archive" >/dev/null
done
kill "$containerd"
wait "$containerd" || true
containerd=""
umount proc run dev
tar -C . --one-file-system -c . | docker import -c 'ENV container=docker' \
	-c 'ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]' - "$image" >/dev/null
