#!/bin/sh
# Builds the images of `make e2e-kind`, `make e2e-istio` and `make e2e-aigw` as archives, from the source tree and from the
# programs that test/tools/install.sh installed. It needs no registry and no container runtime. Prints the folder of the
# archives.
#
#   images.sh NAME...    builds the named images:
#
#   kvepp.tar    kvepp, with the root file system of its released image (manifests/image)
#   engine.tar   examples/engine, with a model's tokenizer
#   envoy.tar    Envoy
#   dynamo.tar   Dynamo's frontend and mocker with their Python, and a model's tokenizer
#   istiod.tar   Istio's control plane
#   envoy-gateway.tar, controller.tar, extproc.tar   Envoy Gateway; Envoy AI Gateway's controller and its filter
#   envoy-aigw.tar   the Envoy that Envoy AI Gateway pins
#   suite.tar    the conformance tests of the Gateway API Inference Extension
#   echo.tar     the server that these tests call
#
# KVEPP_CACHE is the cache folder (default: $XDG_CACHE_HOME/kvepp, else ~/.cache/kvepp).
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
project=$here/../..
cache=${KVEPP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvepp}
tools=$("$here/../tools/install.sh" tools)
model=$project/test/models/tiny-bytelevel
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
images=" $* "

say() { printf '%s\n' "$*" >&2; }

# wanted NAME returns whether NAME is one of the arguments.
wanted() { case $images in *" $1 "*) ;; *) return 1 ;; esac; }

# archive NAME ENTRYPOINT [ENV...] writes the folder $work/NAME as an image.
archive() {
	name=$1 entrypoint=$2
	shift 2
	mkdir -p "$work/$name/tmp"
	chmod 1777 "$work/$name/tmp"
	chmod -R a+rX "$work/$name"
	environment=""
	for variable; do environment="$environment${environment:+,}\"$variable\""; done
	"$here/image.sh" "$folder/$name.tar" "kvepp/$name:e2e" "$work/$name" \
		'{"Entrypoint":["'"$entrypoint"'"],"User":"65532:65532","Env":['"$environment"']}'
	rm -rf "${work:?}/$name"
}

# models copies the tokenizer into an image.
models() {
	mkdir -p "$work/$1/models/tiny"
	cp "$model"/* "$work/$1/models/tiny/"
}

# Installed programs change rarely, and are large.
folder=$cache/kind-images-${tools##*/tools-}-$(cat "$here"/images.sh "$here"/image.sh "$here"/closure.sh "$model"/* \
	"$here"/../kube/istiobin/go.??? "$here"/../kube/suitebin/* "$here"/../tools/aigw/* | cksum | cut -d' ' -f1)
mkdir -p "$folder"
for image in envoy envoy-aigw; do
	if wanted $image && [ ! -e "$folder/$image.tar" ]; then
		say "building the image of $image"
		programs=$tools
		[ $image = envoy ] || programs=$("$here/../tools/install.sh" aigw)
		envoy=$("$programs/bin/python" -c 'import envoy, os; print(os.path.dirname(envoy.__file__))')/_bin/envoy
		# glibc loads the libraries for name resolution with dlopen, so ldd does not list them.
		resolvers=$(ldconfig -p | sed -n 's/.* => \(.*libnss_\(dns\|files\)\.so\.2\)$/\1/p')
		rm -rf "$work/closure"
		"$here/closure.sh" "$work/closure" / "$envoy" $resolvers
		mkdir -p "$work/$image/usr/local/bin"
		cp -a "$work/closure/." "$work/$image/"
		mv "$work/$image$envoy" "$work/$image/usr/local/bin/envoy"
		echo 'hosts: files dns' >"$work/$image/etc/nsswitch.conf"
		archive $image /usr/local/bin/envoy PATH=/usr/local/bin
	fi
done
if wanted dynamo && [ ! -e "$folder/dynamo.tar" ]; then
	say "building Dynamo's image"
	# Python and its virtual environment keep their paths. These may be below /tmp, so a Pod's scratch space is elsewhere.
	library=$("$tools/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
	program=$(readlink -f "$tools/bin/python")
	mkdir -p "$work/dynamo"
	tar -c --exclude="$library/site-packages" --exclude="$library/dist-packages" --exclude="$library/test" --exclude="$library/config-*" \
		--exclude='*/site-packages/envoy' --exclude='*/site-packages/pip*' --exclude='*/site-packages/setuptools*' --exclude='*/bin/nats-server' \
		--absolute-names "$library" "$tools" | tar -x --absolute-names -C "$work/dynamo" --transform 's,^/,,'
	"$here/closure.sh" "$work/dynamo" / "$program" $(find "$library/lib-dynload" "$tools" -name '*.so*' ! -path '*/envoy/*')
	for python in python python3; do # instead of symbolic links
		ln -sf "$program" "$work/dynamo$tools/bin/$python"
	done
	models dynamo
	mkdir "$work/dynamo/scratch"
	chmod 1777 "$work/dynamo/scratch"
	archive dynamo "$tools/bin/python" "PATH=$tools/bin:/usr/bin:/bin" HOME=/scratch TMPDIR=/scratch HF_HUB_OFFLINE=1 PYTHONHASHSEED=0 \
		PYTHONUNBUFFERED=1
fi

for program in istio/istiod suite/suite suite/echo aigw/envoy-gateway aigw/controller aigw/extproc; do
	image=${program#*/}
	if wanted $image && [ ! -e "$folder/$image.tar" ]; then
		programs=$("$here/../tools/install.sh" "${program%/*}")
		say "building the image of $image"
		mkdir -p "$work/$image"
		cp "$programs/$image" "$work/$image/"
		archive $image "/$image" PATH=/
	fi
done

if wanted kvepp; then
	say "building kvepp's image"
	"$project/manifests/image/rootfs.sh" "$work/kvepp"
	archive kvepp /kvepp
fi
if wanted engine; then
	say "building the engine's image"
	mkdir -p "$work/engine/usr/local/bin"
	(cd "$project" && go build -o "$work/engine/usr/local/bin/engine" ./examples/engine)
	libraries=$(ldd "$work/engine/usr/local/bin/engine" | grep -oE '/[^ ]+')
	"$here/closure.sh" "$work/engine" / $libraries
	models engine
	archive engine /usr/local/bin/engine
fi
printf '%s\n' "$folder"
