# Everything a person or a machine runs. `make` alone lists it.
.DEFAULT_GOAL := help
SHELL := /bin/sh
INSTALL := test/tools/install.sh
# Where the installed Envoy and Dynamo are; evaluated only by the targets that need them.
TOOLS = $$($(INSTALL) tools)
# What holds the tokenizer against the Python originals: a Python with them, and folders of real models.
ORACLES = KVEPP_ORACLES="$$($(INSTALL) oracles)" KVEPP_MODELS="$$(test/tools/models.sh $(1))"
# A test's own deadline; one that hangs prints where.
TIMEOUT := 15m
# How long `make events` lets publishers die and lose messages.
SOAK := 2m
# How many times `make quality` plays each scenario.
SEEDS := 5
# How many random requests `make storm` sends, and drawn from what.
STORM := 10000
SEED := 7
IMAGE := kvepp:dev
BENCH := .
BENCHTIME := 0.5s
COUNT := 5
# The commit that `kvepp version` and the log name; empty outside a git repository.
COMMIT := $(shell git describe --always --abbrev=40 --dirty=-modified --exclude='*' 2>/dev/null)

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 26

build: libzmq ## bin/kvepp
	go build -ldflags "-X main.commit=$(COMMIT)" -o bin/ ./cmd/kvepp

image: ## the container image, by the Dockerfile (IMAGE=kvepp:dev; BASE=none: without base images)
	$(if $(filter none,$(BASE)),manifests/image/import.sh $(IMAGE),docker build -t $(IMAGE) --build-arg COMMIT=$(COMMIT) $(if $(BASE),--build-arg BUILD_IMAGE=$(BASE)) .)

run: ## kvepp before real Envoy, Dynamo frontends and mockers: conversations, a table, then stays up (CHECK=1: does not stay)
	@tools=$(TOOLS) && $(MAKE) --no-print-directory build && go build -o bin/ ./examples/demo && KVEPP_TOOLS="$$tools" exec bin/demo $(if $(CHECK),-check)

check: libzmq ## formatting, vet, staticcheck, errorlint, and the rules of internal/lint
	@unformatted=$$(gofmt -l .) && if [ -n "$$unformatted" ]; then echo "not gofmt'd:" $$unformatted; exit 1; fi
	go vet ./...
	go tool staticcheck ./...
	go tool go-errorlint ./...
	go test ./internal/lint

unit: libzmq ## the unit tests, without what is slow: no Envoy, no Dynamo, no root
	go test -short -timeout $(TIMEOUT) ./...

test: ## unit tests with the race detector, then end-to-end tests with real Envoy and Dynamo
	@tools=$(TOOLS) && $(MAKE) --no-print-directory build && \
	go test -timeout $(TIMEOUT) ./indexer && go test -tags invariants -timeout $(TIMEOUT) -run Oracle ./indexer && go test -timeout $(TIMEOUT) -run '^TestMemory' ./internal/apibody ./tokenizer ./zmqsub && \
	go test -race -timeout $(TIMEOUT) $$(go list ./... | grep -Ev '^kvepp/(e2e|e2e/manifests|test/(parity|parity/events|vllm|kube|kind))$$') && \
	$(call ORACLES,llama2 claude) go test -v -short -count=1 -timeout $(TIMEOUT) ./test/parity && \
	KVEPP_TOOLS="$$tools" KVEPP_MANIFEST_TOOLS="$$($(INSTALL) manifests)" go test -count=1 -timeout $(TIMEOUT) -skip '^Test(Image|APIServer)$$' ./e2e ./e2e/manifests

test-long: ## what takes longer: every real tokenizer against the originals, engines' event publishers, a whole vLLM, a real Kubernetes API server, a real cluster, a storm of requests, fuzzing every decoder, and the demonstration
	@tools=$(TOOLS) && $(MAKE) --no-print-directory build parity events test-vllm test-kube test-image $(if $(KUBECONFIG),e2e-kind,kind-offline e2e-kind kind-offline-down) storm && test/fuzz.sh && $(MAKE) --no-print-directory run CHECK=1

parity: build ## real tokenizer files and chat templates, and engines' reading of requests, against the originals
	@$(call ORACLES,all) KVEPP_ENGINES="$$($(INSTALL) engines)" go test -v -count=1 -timeout 30m ./test/parity -skip '^TestMediaProcessors$$'
	@KVEPP_TOOLS="$(TOOLS)" KVEPP_MODELS="$$(test/tools/models.sh llama3_1 qwen3 deepseek_v3 gemma3)" \
	go test -v -count=1 -timeout $(TIMEOUT) -run '^TestDynamoParity$$' ./e2e

events: build ## KV events from vLLM's, SGLang's and Dynamo's own publishers, killed and cut off for two minutes (SOAK=10m: for ten)
	@KVEPP_TOOLS="$(TOOLS)" KVEPP_ENGINES="$$($(INSTALL) engines)" go test -v -count=1 -timeout 30m ./test/parity/events -skip '^TestVLLM$$' -soak $(SOAK)

storm: build ## random requests through Envoy while everything breaks, and thousands at once (STORM=1000: so many; SEED=1: others)
	@KVEPP_TOOLS="$(TOOLS)" go test -v -count=1 -timeout $(TIMEOUT) -run '^Test(Storm|Crowd)' ./e2e -storm $(STORM) -storm-seed $(SEED) -crowd 2000
	@go test -v -count=1 -timeout $(TIMEOUT) -run '^TestHostile' ./zmqsub ./indexer/feed -hostile 30s -hostile-seed $(SEED)

test-vllm: build ## token ids, KV events and prefix cache of a whole vLLM on the CPU (3 GB to fetch, once)
	@KVEPP_VLLM="$$($(INSTALL) vllm)" KVEPP_MODELS="$$(test/tools/models.sh qwen3)" \
	go test -v -count=1 -timeout $(TIMEOUT) -run '^TestVLLM$$' ./test/parity/events
	@KVEPP_TOOLS="$(TOOLS)" KVEPP_VLLM="$$($(INSTALL) vllm)" KVEPP_MODELS="$$(test/tools/models.sh qwen3)" \
	go test -v -count=1 -timeout 30m ./test/vllm
	@KVEPP_VLLM="$$($(INSTALL) vllm)" KVEPP_VLLM_MEDIA="$$($(INSTALL) media)" \
	go test -v -count=1 -timeout $(TIMEOUT) -run '^TestMediaProcessors$$' ./test/parity

test-image: ## the image's root file system, and kvepp in it alone as a user without rights
	@manifests/image/rootfs.sh bin/rootfs && KVEPP_ROOTFS="$$(pwd)/bin/rootfs" go test -v -count=1 -timeout $(TIMEOUT) -run '^TestImage$$' ./e2e/manifests

test-kube: build ## kvepp and Envoy against a real Kubernetes API server (five minutes of compiling it, once)
	@KVEPP_TOOLS="$(TOOLS)" KVEPP_KUBE="$$($(INSTALL) kube)" go test -v -count=1 -timeout $(TIMEOUT) ./test/kube
	@KVEPP_KUBE="$$($(INSTALL) kube)" KVEPP_MANIFEST_TOOLS="$$($(INSTALL) manifests)" KVEPP_CRDS="$$($(INSTALL) crds)" \
	go test -v -count=1 -timeout $(TIMEOUT) -run '^TestAPIServer$$' ./e2e/manifests

kind-offline: ## a Kubernetes cluster by kind where no image registry is reached (Debian 12, as root; ten minutes of compiling it, once)
	@test/kind/offline.sh up

kind-offline-down: ## ends that cluster
	@test/kind/offline.sh down

e2e-kind: libzmq ## kvepp by its chart in a kind cluster: the one KUBECONFIG names, or kind-offline's, or a new one of ordinary kind
	@test/kind/run.sh

e2e-istio: libzmq ## kvepp behind Istio's control plane and a Gateway, in such a cluster, and the inference extension's conformance tests (ten minutes of compiling Istio, once)
	@test/kind/run.sh istio

bench: ## the Go benchmarks, then index, events, tokenizer and a request's whole way beside their peers
	@for part in go index events tokenizers path; do $(MAKE) --no-print-directory bench-$$part || exit 1; done

bench-go: libzmq ## Go benchmarks: hashing, decoding, index, cost and selection, the whole pick
	go test -run '^$$' -bench '$(BENCH)' -benchtime $(BENCHTIME) -count $(COUNT) -benchmem ./kvblock ./indexer ./scoring ./tokenizer ./router ./zmqsub

bench-index: libzmq ## kvepp's index beside Dynamo's, on the same workloads (WORKLOADS="tree1m trace micro tree10m": these)
	@bench/index.sh $(WORKLOADS)

bench-events: libzmq ## KV events from the wire to the index, hashing and choosing, beside libzmq's binding and Dynamo's crate
	@bench/events.sh

bench-tokenizers: libzmq ## kvepp's tokenizer beside tokenizers and fastokens, real models (MODELS="qwen3 llama2": these)
	@bench/tokenizers.sh $(MODELS)

bench-path: libzmq ## what a request costs behind a real Envoy, beside Envoy alone and a processor that only echoes (PART=streams: that part; PIECES=1000: longer ones; PEER=gaie: beside the Gateway API's own as well)
	@PEER=$(PEER) bench/path.sh $(if $(PART),-only $(PART)) $(if $(PIECES),-chunks $(PIECES))

quality: ## the same traffic through kvepp and through Dynamo's own routers, over mocked workers: cached share, times, balance (twenty minutes; SEEDS=1: five)
	@tools=$(TOOLS) && $(MAKE) --no-print-directory build && go build -o bin/ ./bench/quality && KVEPP_TOOLS="$$tools" exec bin/quality -seeds $(SEEDS) $(if $(ONLY),-only "$(ONLY)")

libzmq:
	@$(INSTALL) libzmq

.PHONY: help build image run check unit test test-long parity events storm test-vllm test-kube test-image kind-offline kind-offline-down e2e-kind e2e-istio bench bench-go bench-index bench-events bench-tokenizers bench-path quality libzmq
