#!/bin/sh
# Runs a Kubernetes cluster of one node with kind on a machine without an image registry. It builds the node image and the
# control plane from Debian packages and Go modules. dockerd runs in its own network namespace: the machine's network, docker
# and containers do not change, and no traffic of the cluster leaves the machine. It needs Debian 12 and root.
#
# If image registries can be reached, use `kind create cluster` instead.
#
#   offline.sh up             creates the cluster, unless it exists: about 12 minutes on two cores at first, later one
#   offline.sh run COMMAND    runs a command with this cluster's docker, kind and kubectl, in its network namespace
#   offline.sh down           deletes the cluster and its dockerd, and keeps the built images in the cache
#
# KVEPP_KIND (default: kvepp) is the prefix of all names on the machine: of the cluster, its namespace and its folders.
# KVEPP_CACHE is the cache folder (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp).
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
cache=${KVEPP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvepp}
name=${KVEPP_KIND:-kvepp}
namespace=$name-kind         # the network namespace
sockets=/run/$name-kind      # of dockerd; a socket's path must be short
state=$cache/kind-$name      # images, the cluster's kubeconfig
install=$here/../tools/install.sh
began=$(date +%s)

say() { printf 'kind-offline %4d s: %s\n' $(($(date +%s) - began)) "$*" >&2; }
die() { printf 'kind-offline: %s\n' "$*" >&2; exit 1; }

# inside runs a command in the cluster's network namespace. `ip netns exec` would hide the control groups from dockerd.
inside() { nsenter --net="/run/netns/$namespace" -- "$@"; }

able() {
	[ "$(id -u)" = 0 ] || die "root is needed: it mounts file systems, makes a network namespace and starts dockerd. Run it as root, or use \`kind create cluster\` where image registries can be reached."
	command -v apt-get >/dev/null && grep -q bookworm /etc/os-release || die "this needs Debian 12 (bookworm); here is $(. /etc/os-release && echo "$PRETTY_NAME"). Use \`kind create cluster\` where image registries can be reached."
	command -v go >/dev/null || die "Go is needed to build Kubernetes."
	unshare --mount --net true 2>/dev/null || die "root may not mount or make network namespaces here (CAP_SYS_ADMIN). Run this in a virtual machine, or a container with --privileged."
}

packages() {
	missing=""
	for wanted in dockerd:docker".io" debootstrap:debootstrap iptables:iptables conntrack:conntrack jq:jq containerd:containerd runc:runc \
		ip:iproute2; do
		command -v "${wanted%:*}" >/dev/null || missing="$missing ${wanted#*:}"
	done
	[ -n "$missing" ] || return 0
	say "installing Debian packages:$missing"
	apt-get update -qq >&2
	# The packages must not start services: dockerd is started below, apart from the machine's own network.
	policy=/usr/sbin/policy-rc.d
	[ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy; chmod +x $policy; trap 'rm -f /usr/sbin/policy-rc.d' EXIT; }
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

# debian creates the root filesystem for the node image, and sets $debian to its folder.
debian() {
	wanted=systemd,conntrack,iptables,nftables,iproute2,ethtool,mount,kmod,libseccomp2,ca-certificates,curl,jq,procps,containerd,runc,containernetworking-plugins
	debian=$cache/kind-debian-$(echo $wanted | cksum | cut -d' ' -f1)
	[ ! -e "$debian.complete" ] || return 0
	# Use the machine's own mirror, or else debootstrap's default.
	mirror=$(apt-get indextargets --format '$(REPO_URI)' 'CODENAME: bookworm' 'LABEL: Debian' | head -1)
	say "fetching Debian's packages of a node into $debian (once)"
	rm -rf "$debian"
	mkdir -p "$debian"
	debootstrap --variant=minbase --include=$wanted bookworm "$debian" ${mirror:+"$mirror"} >"$debian.log" 2>&1 || {
		tail -20 "$debian.log" >&2
		die "debootstrap failed; its output is in $debian.log"
	}
	rm -rf "$debian"/var/cache/apt/archives/*.deb "$debian"/var/lib/apt/lists/* "$debian"/usr/share/doc/* "$debian"/usr/share/man/* \
		"$debian"/usr/share/locale/*
	touch "$debian.complete"
}

daemon() {
	export DOCKER_HOST=unix://$sockets/docker.sock
	! docker info >/dev/null 2>&1 || return 0
	say "starting dockerd in the network namespace $namespace"
	[ -e "/run/netns/$namespace" ] || ip netns add "$namespace"
	inside ip link set lo up
	inside sysctl -qw net.ipv4.ip_forward=1
	mkdir -p "$sockets" "$state"
	rm -f "$sockets/dockerd.pid" # of a dockerd that was killed
	setsid nohup nsenter --net="/run/netns/$namespace" -- dockerd --add-runtime "bounded=$here/runc-within-bounds.sh" --default-runtime bounded \
		--data-root "$state/docker" --exec-root "$sockets/exec" --pidfile "$sockets/dockerd.pid" --host "$DOCKER_HOST" \
		--storage-driver overlay2 --exec-opt native.cgroupdriver=cgroupfs >"$state/dockerd.log" 2>&1 </dev/null &
	tries=0
	until docker info >/dev/null 2>&1; do
		tries=$((tries + 1))
		[ $tries -lt 120 ] && kill -0 $! 2>/dev/null || { tail -20 "$state/dockerd.log" >&2; die "dockerd does not start; its output is in $state/dockerd.log"; }
		sleep 0.5
	done
}

up() {
	able
	packages
	mkdir -p "$state"
	( debian; echo "$debian" >"$state/debian" ) &
	fetching=$!
	programs=$("$install" kube kubeadm kubelet kubectl kube-apiserver kube-controller-manager kube-scheduler kube-proxy etcd coredns pause kind)
	wait $fetching
	debian=$(cat "$state/debian")
	PATH=$programs:$PATH
	kind=$(cd "$here/../kube/kindbin" && GOWORK=off GOFLAGS=-mod=readonly go list -m -f '{{.Dir}}' sigs.k8s.io/kind)
	daemon
	image=kvepp/node:$(cat "$here/node.sh" "$here/image.sh" "$here/closure.sh" "$here/cluster.yaml" | cksum | cut -d' ' -f1)-${programs##*-}-${debian##*-}
	if ! docker image inspect "$image" >/dev/null 2>&1; then
		say "building the node image"
		docker image ls -q kvepp/node | xargs -r docker rmi --force >/dev/null 2>&1 || true # delete older images, one gigabyte each
		TMPDIR=$state unshare --mount "$here/node.sh" "$image" "$debian" "$programs" "$kind"
	fi
	export KUBECONFIG="$state/kubeconfig"
	if kind get clusters 2>/dev/null | grep -qx "$name" && inside kubectl get --raw /readyz >/dev/null 2>&1; then
		say "the cluster $name is there already"
	else
		kind delete cluster --name "$name" >/dev/null 2>&1 || true
		say "creating the cluster $name"
		inside kind create cluster --name "$name" --image "$image" --config "$here/cluster.yaml" --wait 180s --retain >"$state/create.log" 2>&1 || {
			cat "$state/create.log" >&2
			docker exec "$name-control-plane" journalctl --no-pager -n 30 -u kubelet -u containerd >&2 || true
			die "kind could not create the cluster; its container is kept: $0 run docker exec -it $name-control-plane bash"
		}
	fi
	inside kubectl wait --for=condition=Ready node --all --timeout=120s >&2
	say "Kubernetes $(inside kubectl version -o json | jq -r .serverVersion.gitVersion) is ready. Use it with: test/kind/offline.sh run kubectl get pods -A"
}

down() {
	[ "$(id -u)" = 0 ] || die "root is needed."
	export DOCKER_HOST=unix://$sockets/docker.sock
	if docker info >/dev/null 2>&1; then
		say "ending the cluster $name and its dockerd"
		docker ps -aq | xargs -r docker rm -fv >/dev/null
	fi
	if [ -e "$sockets/dockerd.pid" ]; then
		pid=$(cat "$sockets/dockerd.pid")
		kill "$pid" 2>/dev/null || true
		tries=0
		while kill -0 "$pid" 2>/dev/null; do
			tries=$((tries + 1))
			[ $tries -lt 120 ] || die "dockerd (process $pid) does not end"
			sleep 0.5
		done
	fi
	[ ! -e "/run/netns/$namespace" ] || ip netns delete "$namespace"
	rm -rf "$sockets" "$state/kubeconfig"
}

run() {
	[ -e "$state/kubeconfig" ] && [ -e "/run/netns/$namespace" ] || die "there is no cluster $name: run make kind-offline first."
	export DOCKER_HOST="unix://$sockets/docker.sock" KUBECONFIG="$state/kubeconfig"
	PATH=$("$install" kube kubectl kind):$PATH
	inside "$@"
}

case "${1:-}" in
up) up ;;
down) down ;;
run) shift; run "$@" ;;
*) die "usage: offline.sh up|run COMMAND|down" ;;
esac
