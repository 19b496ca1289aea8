# The targets for people and for CI. `make` without a target lists them.
.DEFAULT_GOAL := help
SHELL := /bin/sh
INSTALL := test/tools/install.sh
# The folder of the installed Envoy and Dynamo. Only targets that use it run install.sh.
TOOLS = $$($(INSTALL) tools)
# For the comparison with the Python tokenizers: a Python that has them, and the folders of real models.
ORACLES = KVEPP_ORACLES="$$($(INSTALL) oracles)" KVEPP_MODELS="$$(test/tools/models.sh $(1))"
# The time limit of a test run. A run that exceeds it prints all goroutines.
TIMEOUT := 20m
# The packages whose tests need programs that install.sh installs.
REAL_PARTS := ^(kvepp|[.])/(e2e|e2e/manifests|test/(aigw|parity|parity/events|vllm|kube|kind))$$
# make check vets all packages; without debugging data the linker takes half the time.
QUICK := go test -vet=off -ldflags=-w -timeout $(TIMEOUT)
# The packages without goroutines of their own, and with tests without any: the race detector finds nothing there.
SEQUENTIAL := ./internal/chart ./internal/flags ./internal/overrides ./internal/prefetch ./internal/suggest ./kvblock ./manifests/envoy ./prompt ./prompt/body ./prompt/encoders ./prompt/jinja ./prompt/values ./replay ./replay/report ./serve/llmd
# The packages whose long tests are single-threaded, or wait for whole programs: the race detector slows these tests down
# tenfold, so that it runs only some.
LONG := ./cmd/kvepp ./extproc ./prompt/bpe ./indexer
# The tests of these packages that the race detector runs all the same, because much happens in them at once.
LONG_RACE := ^Test(Concurrent.*|SegmentCacheHoldsWhatWasPut|ManyStreams|Replicas|StrangeReplicas|Drain|LogWithoutReader)$$
# Tests that run without the race detector for the same reason: of memory, of large files, of the pages.
NO_RACE := ^Test(Memory|LargestEndpointsFile$$|EndpointsFileBombs$$|RecordsAreBoundedInBytes$$|RunningRecordsAreBounded$$|BookedBlocksAreBounded$$|AMillionTenants$$|CopiesCountTheirMemory$$|BodiesAreBounded|PagesLink$$|PagesName)
# The tests of scoring/replica that the race detector runs. The others fill sockets, for which it is too slow.
REPLICAS_RACE := ^Test(Histories|Nodes|Strangers|Nonsense|EarlierVersions)$$
# How long `make events` kills publishers and drops messages.
SOAK := 1m
# How long `make test-long` plays random histories of replicas (before a release: 5m).
HISTORIES := 60s
# Prints what a part took, and keeps it for the table of .ci/run.
TIMED := test/timed.sh
# How many times `make quality` plays each scenario.
SEEDS := 5
# The folder for the charts of benchmarks.
CHARTS = $(or $(OUT),bin/bench)
# The number of random requests that `make storm` sends, and the seed of its random generator.
STORM := 5000
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

image: ## the container image, from the Dockerfile (IMAGE=kvepp:dev; BASE=none: without base images)
	$(if $(filter none,$(BASE)),manifests/image/import.sh $(IMAGE),docker build -t $(IMAGE) --build-arg COMMIT=$(COMMIT) $(if $(BASE),--build-arg BUILD_IMAGE=$(BASE)) .)

run: ## a demonstration: kvepp with real Envoy, Dynamo frontends and mockers; stays up (CHECK=1: ends)
	@tools=$(TOOLS) && $(MAKE) --no-print-directory build && go build -o bin/ ./examples/demo && KVEPP_TOOLS="$$tools" exec bin/demo $(if $(CHECK),-check)

check: libzmq ## formatting, vet, staticcheck, errorlint, the rules of internal/lint, and known vulnerabilities
	@unformatted=$$(gofmt -l .) && if [ -n "$$unformatted" ]; then echo "not gofmt'd:" $$unformatted; exit 1; fi
	go vet ./...
	go tool staticcheck ./...
	go tool go-errorlint ./...
	go test ./internal/lint
	test/vulncheck.sh

# Each change would link the packages of real parts again, and run all of cmd/kvepp and internal/lint. cmd/kvepp's tests
# start the whole program: make test runs them. make check vets all packages and runs the lint.
unit: libzmq ## the fast unit tests: no Envoy, no Dynamo, no root (for cmd/kvepp: go test -short ./cmd/kvepp)
	go test -short -vet=off -timeout $(TIMEOUT) $$(go list ./... | grep -Ev '$(REAL_PARTS)|^kvepp/(cmd/kvepp|internal/lint)$$')

# Three lanes at once: one computes, the others mostly wait for programs.
test: ## unit tests, with the race detector where goroutines are, and end-to-end tests with real Envoy and Dynamo
	@$(INSTALL) shells || echo "going on without zsh and fish: their part of TestCompletion will be skipped"
	@$(INSTALL) chromium || echo "going on without chromium: TestPage of cmd/kvepp will be skipped"
	@$(INSTALL) tools >/dev/null && $(MAKE) --no-print-directory build && $(MAKE) --no-print-directory -j3 test-packages test-command test-programs

test-packages:
	@$(TIMED) "test: sequential and long unit tests" $(QUICK) -p 3 $(filter-out ./cmd/kvepp,$(LONG)) $(SEQUENTIAL)
	@$(TIMED) "test: invariants of the index" $(QUICK) -tags invariants -run Oracle ./indexer
	@$(TIMED) "test: memory" $(QUICK) -run '$(NO_RACE)' ./pool ./router ./router/queue ./scoring ./serve/api ./zmqsub
	@$(TIMED) "test: race detector, short" $(QUICK) -race -short -skip '$(NO_RACE)' $(filter-out ./prompt/bpe,$(LONG))
	@$(TIMED) "test: race detector, long" $(QUICK) -race -run '$(LONG_RACE)' $(LONG)
	@$(TIMED) "test: replicas" $(QUICK) ./scoring/replica
	@$(TIMED) "test: race detector, replicas" $(QUICK) -race -run '$(REPLICAS_RACE)' ./scoring/replica
	@$(TIMED) "test: race detector" $(QUICK) -race -skip '$(NO_RACE)' $$(go list ./... | sed 's|^kvepp|.|' | grep -Ev '$(REAL_PARTS)' | grep -Fvx $(SEQUENTIAL:%=-e %) $(LONG:%=-e %) -e ./internal/lint -e ./scoring/replica)
	@$(call ORACLES,llama2 claude) $(TIMED) "test: parity, short" go test -v -short -count=1 -timeout $(TIMEOUT) ./test/parity

test-command:
	@$(TIMED) "test: cmd/kvepp" $(QUICK) ./cmd/kvepp

test-programs:
	@export KVEPP_TOOLS="$(TOOLS)" KVEPP_IMAGE_ENVOY="$$($(INSTALL) envoy)" KVEPP_MANIFEST_TOOLS="$$($(INSTALL) manifests)"; \
	$(TIMED) "test: end to end" test/e2e.sh && \
	$(TIMED) "test: manifests" go test -count=1 -timeout 30m -skip '^Test(Image$$|APIServer$$|Release)' ./e2e/manifests

# Three lanes at once: one computes, two mostly wait for other programs.
test-long: ## the slow tests: parity, events, storm, test-vllm, a real Kubernetes API server and cluster, all fuzz targets, the demonstration
	@tools=$(TOOLS) && $(INSTALL) engines >/dev/null && $(INSTALL) versions >/dev/null && $(MAKE) --no-print-directory -j3 long-computing long-cluster long-waiting && \
	$(TIMED) "test-long: demonstration" $(MAKE) --no-print-directory run CHECK=1

# $(call LONG_PARTS,TARGETS) runs targets of test-long, one after the other.
LONG_PARTS = for part in $(1); do $(TIMED) "test-long: $$part" $(MAKE) --no-print-directory $$part || exit 1; done

long-computing:
	@$(call LONG_PARTS,parity)
	@$(TIMED) "test-long: fuzzing" test/fuzz.sh
	@$(TIMED) "test-long: histories of replicas" go test ./scoring/replica -run TestHistories -histories $(HISTORIES)
	@$(call LONG_PARTS,storm)

long-cluster:
	@$(call LONG_PARTS,$(if $(KUBECONFIG),e2e-kind,kind-offline e2e-kind kind-offline-down) test-kube test-image)

long-waiting:
	@$(call LONG_PARTS,test-vllm events)

parity: build ## compares tokens of real models, folders of every class, chat templates and the reading of requests with the engines' Python code and Dynamo's frontend (ENGINE=sglang VERSION=0.5.23: only folders, templates of packages and requests, and that version; REQUESTS=2000: at least so many to each version and API; FULL=1: all versions, templates and folders and more texts, before a release)
	@tools=$(TOOLS) && engines=$$($(INSTALL) engines) && versions=$$($(INSTALL) versions $(ENGINE) $(VERSION)) && mistral=$$($(INSTALL) mistral) && templates=$$($(INSTALL) templates) && \
	$(call ORACLES,$(if $(ENGINE),llama2 gptoss,all)) KVEPP_TOOLS="$$tools" KVEPP_ENGINES="$$engines" KVEPP_ENGINE_VERSIONS="$$versions" KVEPP_VLLM_MISTRAL="$$mistral" KVEPP_TEMPLATES="$$templates" KVEPP_PARITY="$(ENGINE) $(VERSION)" \
	go test -v -count=1 -timeout 50m ./test/parity $(if $(ENGINE),-run '^Test(Engines|Completions|Encoders|Inkling|Media|AnthropicMessages|Responses|Mistral|Harmony|Folders|Corpus|CacheUse)$$',-skip '^TestMediaProcessors$$') $(if $(REQUESTS),-requests $(REQUESTS)) $(if $(FULL)$(ENGINE),-full)
	@$(if $(ENGINE),exit 0;) tools=$(TOOLS) && models=$$(test/tools/models.sh llama3_1 qwen3 deepseek_v3 gemma3) && \
	KVEPP_TOOLS="$$tools" KVEPP_MODELS="$$models" go test -v -count=1 -timeout $(TIMEOUT) -run '^TestDynamoParity$$' ./e2e

events: build ## KV events from vLLM's, SGLang's and Dynamo's own publishers, which are killed and cut off for a minute (SOAK=10m: for ten)
	@KVEPP_TOOLS="$(TOOLS)" KVEPP_ENGINES="$$($(INSTALL) engines)" KVEPP_ENGINE_VERSIONS="$$($(INSTALL) versions)" go test -v -count=1 -timeout 30m ./test/parity/events -skip '^TestVLLM$$' -soak $(SOAK)

storm: build ## random requests through Envoy while all programs fail, and thousands at once (STORM: their number; SEED: others)
	@KVEPP_TOOLS="$(TOOLS)" go test -v -count=1 -timeout $(TIMEOUT) -run '^Test(Storm|Crowd)' ./e2e -storm $(STORM) -storm-seed $(SEED) -crowd 2000
	@go test -v -count=1 -timeout $(TIMEOUT) -run '^TestHostile' ./zmqsub ./indexer/feed -hostile 30s -hostile-seed $(SEED)

test-vllm: build ## token ids, KV events and prefix cache of a whole vLLM on the CPU (fetches 3 GB, once; FULL=1: more hybrid models)
	@KVEPP_VLLM="$$($(INSTALL) vllm)" KVEPP_MODELS="$$(test/tools/models.sh qwen3)" \
	go test -v -count=1 -timeout $(TIMEOUT) -run '^TestVLLM$$' ./test/parity/events
	@KVEPP_TOOLS="$(TOOLS)" KVEPP_VLLM="$$($(INSTALL) vllm)" KVEPP_MODELS="$$(test/tools/models.sh qwen3)" \
	go test -v -count=1 -timeout 30m ./test/vllm $(if $(FULL),-full)
	@KVEPP_VLLM="$$($(INSTALL) vllm)" KVEPP_VLLM_MEDIA="$$($(INSTALL) media)" \
	go test -v -count=1 -timeout $(TIMEOUT) -run '^TestMediaProcessors$$' ./test/parity

test-image: ## the image's root file system, and kvepp in it alone as a user without rights
	@manifests/image/rootfs.sh bin/rootfs && KVEPP_ROOTFS="$$(pwd)/bin/rootfs" go test -v -count=1 -timeout $(TIMEOUT) -run '^TestImage$$' ./e2e/manifests

test-release: build ## what make release makes, twice: equal bytes, and each part run (arm64 under qemu-user; ARCHES=amd64: only that)
	@$(INSTALL) release
	@rm -rf bin/release bin/again && mkdir -p bin/again && \
	VERSION=0.0.1-test && commit=$$(git describe --always --abbrev=40 --dirty=-modified --exclude='*') && time=$$(git log -1 --format=%ct) && \
	manifests/release/release.sh $$VERSION bin/release && tar -c --exclude=./bin --exclude=./.git . | tar -x -C bin/again && \
	COMMIT=$$commit SOURCE_DATE_EPOCH=$$time bin/again/manifests/release/release.sh $$VERSION bin/again/release && \
	KVEPP_RELEASE="$$(pwd)/bin/release" KVEPP_RELEASE_AGAIN="$$(pwd)/bin/again/release" KVEPP_TOOLS="$(TOOLS)" KVEPP_MANIFEST_TOOLS="$$($(INSTALL) manifests)" \
	go test -v -count=1 -timeout $(TIMEOUT) -run '^TestRelease' ./e2e/manifests; status=$$?; rm -rf bin/again; exit $$status

release: ## programs, image, packages, chart, SBOM and checksums of a release, in bin/release-VERSION (VERSION=1.2.3; ARCHES="amd64 arm64")
	@manifests/release/release.sh "$(VERSION)"

bench-replicas: ## eight replicas share 10,000 requests a second over loopback: CPU, bytes and delay; a pick with seven peers and alone
	KVEPP_BENCH_REPLICAS=10s KVEPP_BENCH_OUT="$(abspath $(CHARTS))" go test ./scoring/replica -run TestBenchReplicas -count 1 -v
	go test ./router -run '^$$' -bench BenchmarkPickWithPeers -count 5

test-kube: build ## kvepp and Envoy against a real Kubernetes API server (five minutes of compiling it, once)
	@KVEPP_TOOLS="$(TOOLS)" KVEPP_KUBE="$$($(INSTALL) kube)" go test -v -count=1 -timeout $(TIMEOUT) ./test/kube
	@KVEPP_KUBE="$$($(INSTALL) kube)" KVEPP_MANIFEST_TOOLS="$$($(INSTALL) manifests)" KVEPP_CRDS="$$($(INSTALL) crds)" \
	go test -v -count=1 -timeout $(TIMEOUT) -run '^TestAPIServer$$' ./e2e/manifests

kind-offline: ## creates a Kubernetes cluster with kind, without an image registry (Debian 12, as root; compiles ten minutes, once)
	@test/kind/offline.sh up

kind-offline-down: ## deletes that cluster
	@test/kind/offline.sh down

e2e-kind: libzmq ## tests kvepp's chart in a kind cluster: that of KUBECONFIG, that of kind-offline, or a new one
	@test/kind/run.sh

e2e-istio: libzmq ## tests kvepp with Istio and a Gateway in such a cluster, and runs the inference extension's conformance tests (compiles Istio ten minutes, once)
	@test/kind/run.sh istio

e2e-aigw: build ## tests kvepp with Envoy AI Gateway: its standalone program, then its controller in such a cluster, and the conformance tests there (compiles it nine CPU minutes, once)
	@test/aigw/run.sh
	@test/kind/run.sh aigw

bench: ## the Go benchmarks, then bench-index, bench-events, bench-tokenizers and bench-path
	@for part in go index events tokenizers path; do $(MAKE) --no-print-directory bench-$$part || exit 1; done

bench-go: libzmq ## Go benchmarks: hashing, decoding, index, cost and selection, the whole decision
	@go test -run '^$$' -bench '$(BENCH)' -benchtime $(BENCHTIME) -count $(COUNT) -benchmem ./kvblock ./indexer ./scoring ./prompt ./router ./zmqsub

bench-index: libzmq ## compares kvepp's index with Dynamo's, on the same workloads (WORKLOADS="tree1m trace micro hybrid tree10m": only these)
	@test/bench/index.sh $(WORKLOADS)

bench-events: libzmq ## compares KV events from the wire to the index, hashing and selection with libzmq's binding and Dynamo's crate
	@test/bench/events.sh

bench-tokenizers: libzmq ## compares kvepp's tokenizer with tokenizers and fastokens, on real models (MODELS="qwen3 llama2": only these)
	@test/bench/tokenizers.sh $(MODELS)

bench-path: libzmq ## compares the cost of a request behind a real Envoy with Envoy alone and with an echoing processor (PART=streams: that part; PART=shadow: kvepp in shadow, running, stopped and away; PIECES=1000: longer streams; PEER=gaie: also the Gateway API's endpoint picker)
	@PEER=$(PEER) test/bench/path.sh $(if $(PART),-only $(PART)) $(if $(PIECES),-chunks $(PIECES))

bench-queue: libzmq ## one tenant that floods beside nine others, deadlines in overload: what clients see behind a real Envoy, and in a model (half an hour; ONLY="model,deadlines": parts)
	@tools=$(TOOLS) && $(MAKE) --no-print-directory build && go build -o bin/ ./test/bench/queue && KVEPP_TOOLS="$$tools" exec bin/queue $(if $(ONLY),-only "$(ONLY)")

bench-page: libzmq ## what an open web page costs kvepp's CPU at 1,000 requests a second, behind a real Envoy (three minutes)
	@test/bench/path.sh -only page

quality: ## compares kvepp's policies with Dynamo's router on the same traffic: cached share, times, goodput (100 minutes; SEEDS=1: twenty; ONLY="chat 4,burst" ROUTERS=all OUT=folder; REPLICAS=4: one kvepp and four behind one Envoy; REPLAY=1 OUT=folder: kvepp replay of what it sent; PREDICT=1 OUT=folder: what a recording in shadow of round robin, or with PEER=gaie of that picker, predicts for kvepp; PEER=llm-d LLMD_EPP=file: also llm-d's endpoint picker, whose program that is; PEER=gaie: the Gateway API's)
	@peer=$(if $(filter gaie,$(PEER)),$$($(INSTALL) gaie)) && kube=$(if $(filter gaie,$(PEER)),$$($(INSTALL) kube)) && tools=$(TOOLS) && $(MAKE) --no-print-directory build && go build -o bin/ ./test/bench/quality && KVEPP_TOOLS="$$tools" exec bin/quality -seeds $(SEEDS) $(if $(ONLY),-only "$(ONLY)") $(if $(ROUTERS),-routers "$(ROUTERS)") $(if $(OUT),-out "$(OUT)") $(if $(FIRST),-first $(FIRST)) $(if $(REPLICAS),-replicas $(REPLICAS)) $(if $(REPLAY),-replay) $(if $(PLAN),-plan) $(if $(PREDICT),-predict) $(if $(PEER),-peer $(PEER) -program "$(if $(filter gaie,$(PEER)),$$peer/epp,$(LLMD_EPP))" -kube "$$kube")

replay-table: ## replays generated traffic with each policy and prints their ratios to Dynamo's, for docs/routing.md (SEEDS=20 FROM=101 TRAFFIC="chat none" POLICIES="--compare ...")
	@$(MAKE) --no-print-directory build && SEEDS="$(if $(filter command line,$(origin SEEDS)),$(SEEDS))" FROM="$(FROM)" TRAFFIC="$(TRAFFIC)" POLICIES="$(POLICIES)" test/bench/replay-table.sh

replay-real: ## replays a recorded TRACE at three loads with each policy, for docs/routing.md, which says where one is (TRACE=file)
	@$(MAKE) --no-print-directory build && TRACE="$(TRACE)" POLICIES="$(POLICIES)" test/bench/replay-real.sh

replay-charts: ## makes the trace of examples/replay and the charts of docs/charts
	@$(MAKE) --no-print-directory build && test/bench/replay-charts.sh

pictures: ## takes the pictures of kvepp's page for docs/pictures: make run's programs, other conversations, Chromium (three minutes)
	@$(INSTALL) chromium && tools=$(TOOLS) && $(MAKE) --no-print-directory build && go build -o bin/ ./examples/demo && KVEPP_TOOLS="$$tools" exec bin/demo -pictures docs/pictures

libzmq:
	@$(INSTALL) libzmq

.PHONY: help build image release test-release run check unit test test-packages test-command test-programs test-long long-computing long-cluster long-waiting parity events storm test-vllm test-kube test-image kind-offline kind-offline-down e2e-kind e2e-istio e2e-aigw bench bench-go bench-index bench-events bench-tokenizers bench-path bench-page bench-queue bench-replicas quality replay-table replay-real replay-charts pictures libzmq
