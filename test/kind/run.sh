#!/bin/sh
# Runs `make e2e-kind` and, with the argument istio or aigw, `make e2e-istio` and the second part of `make e2e-aigw`: builds the
# images, loads them into a kind cluster, and runs this folder's tests there, or only those of Istio's gateway or Envoy AI
# Gateway. The cluster is the first of these that exists:
#
#   the one that KUBECONFIG names, whose context must be that of a kind cluster (kind-NAME);
#   the one of `make kind-offline`;
#   a new one that kind creates with the machine's docker. run.sh deletes it at the end. KVEPP_KIND_IMAGE replaces kind's node
#   image, for example by one from a mirror. KVEPP_KIND_CONFIG is kind's configuration file.
#
# The tests get all further arguments, such as -test.run TestEngines.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
install=$here/../tools/install.sh
work=$(mktemp -d)
began=$(date +%s)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM # runs the EXIT trap, which deletes the cluster

say() { printf 'e2e-kind %4d s: %s\n' $(($(date +%s) - began)) "$*" >&2; }

# have PROGRAM builds the program unless the machine has it.
have() { command -v "$1" >/dev/null || PATH=$PATH:$("$install" kube "$1"); }

inside=""
if [ -n "${KUBECONFIG:-}" ]; then
	have kubectl
	have kind
elif "$here/offline.sh" run true 2>/dev/null; then
	inside="$here/offline.sh run"
else
	command -v docker >/dev/null && docker info >/dev/null 2>&1 || {
		say "there is no cluster, and no docker to create one: set KUBECONFIG, or run make kind-offline first (Debian, as root)"
		exit 1
	}
	have kubectl
	have kind
	export KUBECONFIG="$work/kubeconfig"
	trap 'kind delete cluster --name kvepp-e2e; rm -rf "$work"' EXIT
	say "creating a cluster with kind"
	kind create cluster --name kvepp-e2e --wait 120s ${KVEPP_KIND_IMAGE:+--image "$KVEPP_KIND_IMAGE"} ${KVEPP_KIND_CONFIG:+--config "$KVEPP_KIND_CONFIG"}
fi
context=$($inside kubectl config current-context)
case $context in
kind-*) ;;
*) say "the cluster $context is not one of kind's: images cannot be loaded into it"; exit 1 ;;
esac

# The images that the tests need, and the tests to run.
needs="kvepp engine envoy dynamo" tests="-test.skip ^Test(Istio|AIGateway)" gateways=""
case "${1:-}" in
istio)
	shift
	needs="kvepp engine envoy istiod suite echo" tests="-test.run ^TestIstio" gateways=$("$install" crds)
	;;
aigw)
	shift
	needs="kvepp engine envoy-aigw envoy-gateway controller extproc suite echo"
	tests="-test.run ^TestAIGateway -test.timeout 30m" # the conformance suite waits for what this gateway does not do
	KVEPP_AIGW=$("$install" aigw)
	export KVEPP_AIGW
	charts=$KVEPP_AIGW/charts
	gateways="$("$install" crds) $charts/gateway-helm/charts/crds/crds/generated $charts/ai-gateway-crds-helm/templates"
	;;
esac

say "building images"
images=$("$here/images.sh" $needs)
PATH=$("$install" manifests):$PATH
say "loading them into ${context#kind-}"
for image in $needs; do
	$inside kind load image-archive --name "${context#kind-}" "$images/$image.tar"
done
crds=$(cd "$here" && go list -m -f '{{.Dir}}' sigs.k8s.io/gateway-api-inference-extension)/config/crd/bases
$inside kubectl apply --server-side -f "$crds/inference.networking.k8s.io_inferencepools.yaml" >&2
for folder in $gateways; do # a later one's replace an earlier one's
	$inside kubectl apply --server-side -f "$folder" >&2
done
(cd "$here" && go test -c -o "$work/kind.test" .)
say "testing"
cd "$here"
{ $inside "$work/kind.test" -cluster -test.v -test.timeout 25m $tests "$@" 2>&1 || echo $? >"$work/failed"; } | tee "$work/log"
if [ -f "$work/failed" ]; then # the state of all objects follows the failures in the log
	say "failed; the failures are:"
	grep -E '^ +([a-z]+_test\.go:[0-9]+:|--- FAIL)' "$work/log" | cut -c1-400
	exit "$(cat "$work/failed")"
fi
say "done"
