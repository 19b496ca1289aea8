{{/* Rules that a schema cannot express: values that exclude each other, or that need another value. */}}
{{- define "kvepp.refuse" -}}
{{- $v := .Values }}
{{- if and $v.pool.inferencePool $v.pool.create (not $v.pool.selector) }}{{ fail "pool.selector is missing: set the labels of the engines' pods (--set pool.selector.app=vllm-qwen); or set pool.create=false and pool.name to an existing InferencePool" }}{{ end }}
{{- if and $v.pool.inferencePool $v.pool.create (ne $v.pool.group "inference.networking.k8s.io") }}{{ fail "pool.group: the chart creates pools only of inference.networking.k8s.io; for another group set pool.create=false and pool.name to an existing pool" }}{{ end }}
{{- if and (not $v.pool.inferencePool) (not $v.pool.selector) }}{{ fail "pool.selector is missing: without an InferencePool, set the labels of the engines' pods (--set pool.selector.app=vllm-qwen)" }}{{ end }}
{{- if and $v.pool.inferencePool (not $v.pool.create) (not $v.pool.name) }}{{ fail "pool.name is missing: with pool.create=false, set it to the existing InferencePool" }}{{ end }}
{{- $source := $v.model.source }}
{{- if and $v.models (eq $source "none") }}{{ fail "model.source is none, but models need tokenizers; set it to pvc, image or fetch" }}{{ end }}
{{- if and (eq $source "fetch") (not $v.models) }}{{ fail "models is empty, but model.source is fetch; list the models to fetch" }}{{ end }}
{{- range $of, $given := dict "pvc" (dict "model.pvc.claimName" $v.model.pvc.claimName) "image" (dict "model.image.reference" $v.model.image.reference) "fetch" (dict "model.fetch.hub" $v.model.fetch.hub) }}
{{- range $key, $value := $given }}
{{- if and $value (ne $source $of) }}{{ fail (printf "%s is used only with model.source=%s, but model.source is %s" $key $of $source) }}{{ end }}
{{- end }}
{{- end }}
{{- $names := dict }}
{{- $folders := dict }}
{{- range $v.models }}
{{- if hasKey $names .name }}{{ fail (printf "models: the name %s is given twice" .name) }}{{ end }}
{{- $_ := set $names .name true }}
{{- if eq $source "fetch" }}
{{- $folder := default "." .path }}
{{- $from := printf "%s@%s" (default "" .repository) (default "main" .revision) }}
{{- if ne (default $from (get $folders $folder)) $from }}{{ fail (printf "models: %s and %s are both fetched into the folder %q; give each model its own path" (get $folders $folder) $from $folder) }}{{ end }}
{{- $_ := set $folders $folder $from }}
{{- end }}
{{- end }}
{{- with $v.model.fetch.claim }}
{{- if and .create (not .name) }}{{ fail "model.fetch.claim.name is missing: with model.fetch.claim.create=true, name the claim to create" }}{{ end }}
{{- if and .name (ne $source "fetch") }}{{ fail (printf "model.fetch.claim.name is used only with model.source=fetch, but model.source is %s; for a claim that has the tokenizers set model.source=pvc and model.pvc.claimName" $source) }}{{ end }}
{{- if and .storageClassName (not .create) }}{{ fail "model.fetch.claim.storageClassName has no effect with model.fetch.claim.create=false; leave it out" }}{{ end }}
{{- end }}
{{- include "kvepp.refuseScaling" . }}
{{- include "kvepp.refuseReaders" . }}
{{- if $v.kvEvents.replayPort }}
{{- if not $v.kvEvents.enabled }}{{ fail "kvEvents.replayPort has no effect with kvEvents.enabled=false; leave it out" }}{{ end }}
{{- if eq (int $v.kvEvents.replayPort) (int $v.kvEvents.port) }}{{ fail "kvEvents.replayPort equals kvEvents.port; the engines' replay socket needs a port of its own" }}{{ end }}
{{- end }}
{{- if not $v.tls.enabled }}
{{- if $v.tls.secretName }}{{ fail "tls.secretName has no effect with tls.enabled=false; leave one of them out" }}{{ end }}
{{- if $v.tls.clientCA.secretName }}{{ fail "tls.clientCA has no effect with tls.enabled=false: without TLS no peer sends a certificate, so kvepp would serve every peer" }}{{ end }}
{{- end }}
{{- if $v.envoy.create }}
{{- if eq $v.engine "dynamo" }}{{ fail "envoy.create works only with stock engines; with engine=dynamo use manifests/kustomize/components/envoy or a gateway" }}{{ end }}
{{- if not $v.pool.selector }}{{ fail "envoy.create needs pool.selector, by which Envoy finds the engines' pods" }}{{ end }}
{{- if ne $v.pool.appProtocol "http" }}{{ fail "envoy.create: this Envoy uses HTTP/1.1 to the engines; set pool.appProtocol=http" }}{{ end }}
{{- if or (not $v.tls.enabled) $v.tls.clientCA.secretName }}{{ fail "envoy.create: this Envoy uses TLS to kvepp, without a client certificate; set tls.enabled=true and leave tls.clientCA.secretName out" }}{{ end }}
{{- end }}
{{- with $v.shadow }}
{{- if and .recordingClaim (not .enabled) }}{{ fail "shadow.recordingClaim has no effect with shadow.enabled=false; leave it out" }}{{ end }}
{{- if and .recordingClaim (ne (include "kvepp.replicaCount" $) "1") }}{{ fail "shadow.recordingClaim: the recordings of several replicas cannot be joined; set replicas=1" }}{{ end }}
{{- if and .enabled $v.pool.inferencePool $v.pool.create }}{{ fail "shadow.enabled: the InferencePool of this chart would make kvepp the picker; set pool.create=false and pool.name to the pool in service, or pool.inferencePool=false" }}{{ end }}
{{- if and .enabled $v.envoy.create }}{{ fail "shadow.enabled: the Envoy of this chart asks kvepp where requests go; leave envoy.create out, and add the filter to the Envoy in service (docs/shadow.md)" }}{{ end }}
{{- end }}
{{- if and (eq $v.engine "dynamo") (ne (include "kvepp.fallbackEndpoints" .) "0") }}{{ fail "router.fallbackEndpoints: a Dynamo frontend serves a request only on the worker that it names; with engine=dynamo set it to 0" }}{{ end }}
{{- if not $v.router.eject.enabled }}
{{- range $key, $value := omit $v.router.eject "enabled" }}
{{- if not (kindIs "invalid" $value) }}{{ fail (printf "router.eject.%s has no effect with router.eject.enabled=false; leave it out" $key) }}{{ end }}
{{- end }}
{{- end }}
{{- if not (include "kvepp.sharing" .) }}
{{- if $v.sharing.tokenSecret.name }}{{ fail "sharing.tokenSecret has no effect, because the replicas share nothing (sharing.enabled=false, one replica, or leader election); leave it out" }}{{ end }}
{{- if eq $v.sharing.trust "certificates" }}{{ fail "sharing.trust has no effect, because the replicas share nothing (sharing.enabled=false, one replica, or leader election); leave it out" }}{{ end }}
{{- else if eq $v.sharing.trust "certificates" }}
{{- if $v.sharing.tokenSecret.name }}{{ fail "sharing.tokenSecret has no effect with sharing.trust=certificates; leave one of them out" }}{{ end }}
{{- if not (and $v.tls.enabled $v.tls.secretName $v.tls.clientCA.secretName) }}{{ fail "sharing.trust=certificates needs tls.secretName and tls.clientCA.secretName: replicas recognise one another by a certificate of that authority; or use sharing.trust=token" }}{{ end }}
{{- end }}
{{- if $v.admin.enabled }}
{{- if has (int $v.admin.port) (list 9002 9003 9004 9005 (int $v.metrics.port)) }}{{ fail (printf "admin.port: %d is another port of kvepp's; choose a free one" (int $v.admin.port)) }}{{ end }}
{{- range $v.extraArgs }}
{{- $flag := regexReplaceAll "^--|=.*$" . "" }}
{{- if has $flag (list "admin-address" "admin-token-file") }}{{ fail (printf "extraArgs: do not set --%s here with admin.enabled=true; set the values admin.port and admin.tokenSecret" $flag) }}{{ end }}
{{- end }}
{{- else if $v.admin.tokenSecret.name }}{{ fail "admin.tokenSecret has no effect with admin.enabled=false; leave it out" }}
{{- end }}
{{- if not $v.networkPolicy.enabled }}
{{- if or $v.networkPolicy.gatewayFrom $v.networkPolicy.metricsFrom $v.networkPolicy.egress.extra }}{{ fail "networkPolicy: gatewayFrom, metricsFrom and egress.extra have no effect with networkPolicy.enabled=false; leave them out" }}{{ end }}
{{- end }}
{{- $valued := dict "pool-name" "pool.name" "pool-namespace" "the release's namespace" "pool-group" "pool.group" "endpoint-selector" "pool.selector" "endpoint-target-ports" "pool.targetPorts"
  "engine" "engine" "ha-enable-leader-election" "leaderElection.enabled" "ha-handover-timeout" "leaderElection.handoverSeconds" "secure-serving" "tls.enabled" "cert-path" "tls.secretName"
  "tls-client-ca" "tls.clientCA" "metrics-port" "metrics.port" "metrics-endpoint-auth" "metrics.auth" "fallback-endpoints" "router.fallbackEndpoints" "drain-timeout" "drainSeconds"
  "replica-service" "sharing.enabled" "replica-token-file" "sharing.tokenSecret"
  "shadow" "shadow.enabled" "eject" "router.eject.enabled" "eject-first-byte" "router.eject.firstByte" }}
{{- range $v.extraArgs }}
{{- $flag := regexReplaceAll "^--|=.*$" . "" }}
{{- if hasKey $valued $flag }}{{ fail (printf "extraArgs: do not set --%s here; set the value %s, which other parts of the chart use too" $flag (get $valued $flag)) }}{{ end }}
{{- if and (eq $flag "drain-delay") (include "kvepp.leaderElection" $) }}{{ fail "extraArgs: do not set --drain-delay here under leader election; set the value preStopSeconds, which the pod's grace period uses too" }}{{ end }}
{{- if has $flag (list "bind-address" "grpc-port" "grpc-health-port" "ha-lease-name" "metrics-address" "replica-port" "replica-peers" "dynamo-callback-address") }}{{ fail (printf "extraArgs: --%s must not be changed, because the Service, the probes and the Role depend on it" $flag) }}{{ end }}
{{- end }}
{{- end -}}


{{- define "kvepp.refuseScaling" -}}
{{- $v := .Values }}
{{- $address := $v.metrics.prometheus.address }}
{{- $asked := "" }}{{/* a value that needs metrics.prometheus.address */}}
{{- with $v.autoscaling }}
{{- if .enabled }}
{{- if not (kindIs "invalid" $v.replicas) }}{{ fail "replicas has no effect with autoscaling.enabled=true; leave it out, and set autoscaling.minReplicas and autoscaling.maxReplicas" }}{{ end }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}{{ fail (printf "autoscaling.minReplicas is %d, and autoscaling.maxReplicas only %d" (int .minReplicas) (int .maxReplicas)) }}{{ end }}
{{- if include "kvepp.leaderElection" $ }}{{ fail "autoscaling.enabled: under leader election only one replica decides, so more of them take no load; leave leaderElection.enabled and sharing.enabled out" }}{{ end }}
{{- if not (or .cpuPercent .streams .requestsPerSecond) }}{{ fail "autoscaling needs a load to follow: set autoscaling.cpuPercent, streams or requestsPerSecond" }}{{ end }}
{{- if and .cpuPercent (not (dig "requests" "cpu" "" $v.resources)) }}{{ fail "autoscaling.cpuPercent is a share of resources.requests.cpu, which is missing; set it, or autoscaling.cpuPercent=null" }}{{ end }}
{{- if and .requestsPerSecond (eq .by "hpa") }}{{ fail "autoscaling.requestsPerSecond works only with autoscaling.by=keda" }}{{ end }}
{{- if and (eq .by "keda") (or .streams .requestsPerSecond) }}{{ $asked = "autoscaling.streams and requestsPerSecond" }}{{ end }}
{{- end }}
{{- end }}
{{- with $v.engineAutoscaling }}
{{- if .enabled }}
{{- if not .target.name }}{{ fail "engineAutoscaling.target.name is missing: the name of the Deployment that has the engines' pods" }}{{ end }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}{{ fail (printf "engineAutoscaling.minReplicas is %d, and engineAutoscaling.maxReplicas only %d" (int .minReplicas) (int .maxReplicas)) }}{{ end }}
{{- if not (or .runningRequests .prefillTokens .queuedRequests) }}{{ fail "engineAutoscaling needs a load to follow: set engineAutoscaling.runningRequests, prefillTokens or queuedRequests" }}{{ end }}
{{- if .queuedRequests }}
{{- $queue := false }}
{{- range $v.extraArgs }}{{ if regexMatch "^--(router-(queue-threshold|policy-config|admission)|hold-when-empty)(=|$)" . }}{{ $queue = true }}{{ end }}{{ end }}
{{- range $v.extraEnv }}{{ if regexMatch "^((KVEPP|DYN)_ROUTER_(QUEUE_THRESHOLD|POLICY_CONFIG|ADMISSION)|KVEPP_HOLD_WHEN_EMPTY)$" .name }}{{ $queue = true }}{{ end }}{{ end }}
{{- if not $queue }}{{ fail "engineAutoscaling.queuedRequests: requests never wait in kvepp without --router-queue-threshold, --router-policy-config, --router-admission or --hold-when-empty in extraArgs; set one of them, or use engineAutoscaling.runningRequests" }}{{ end }}
{{- end }}
{{- if not .minReplicas }}
{{- $hold := false }}
{{- range $v.extraArgs }}{{ if hasPrefix "--hold-when-empty" . }}{{ $hold = true }}{{ end }}{{ end }}
{{- range $v.extraEnv }}{{ if eq .name "KVEPP_HOLD_WHEN_EMPTY" }}{{ $hold = true }}{{ end }}{{ end }}
{{- if or (not $hold) (not .queuedRequests) (ne .by "keda") }}{{ fail "engineAutoscaling.minReplicas=0: the first request must wait for an engine and start it; add --hold-when-empty=10m to extraArgs, set engineAutoscaling.queuedRequests and by=keda, or set minReplicas=1" }}{{ end }}
{{- end }}
{{- if eq .by "keda" }}{{ $asked = "engineAutoscaling" }}{{ end }}
{{- end }}
{{- end }}
{{- if and $asked (not $address) }}{{ fail (printf "metrics.prometheus.address is missing: %s of KEDA's need the address of the Prometheus that has kvepp's metrics" $asked) }}{{ end }}
{{- if and $address (not $asked) }}{{ fail "metrics.prometheus.address has no effect: nothing here asks Prometheus (engineAutoscaling, or autoscaling.by=keda with streams or requestsPerSecond); leave it out" }}{{ end }}
{{- if and $v.metrics.prometheus.authentication (not $address) }}{{ fail "metrics.prometheus.authentication has no effect without metrics.prometheus.address; leave it out" }}{{ end }}
{{- end -}}

{{- define "kvepp.refuseReaders" -}}
{{- with .Values.metrics }}
{{- $token := include "kvepp.readerSecret" $ }}
{{- if and .serviceMonitor.enabled .podMonitor.enabled }}{{ fail "metrics.serviceMonitor and metrics.podMonitor would make Prometheus read each replica twice; enable one of them" }}{{ end }}
{{- if .readerToken.create }}
{{- if .readerToken.secretName }}{{ fail "metrics.readerToken.secretName has no effect with metrics.readerToken.create=true; leave one of them out" }}{{ end }}
{{- if ne .readerToken.key "token" }}{{ fail "metrics.readerToken.key: the Secret that the chart creates has the key token; leave this value out" }}{{ end }}
{{- if not .auth }}{{ fail "metrics.readerToken.create has no effect with metrics.auth=false: kvepp would not ask the cluster who the token's owner is; leave it out" }}{{ end }}
{{- end }}
{{- if and $token (not (or .serviceMonitor.enabled .podMonitor.enabled .podMonitoring.enabled)) }}{{ fail "metrics.readerToken has no effect: no reader uses it (metrics.serviceMonitor, podMonitor or podMonitoring); leave it out" }}{{ end }}
{{- if and .auth (not $token) }}
{{- range $key := list "podMonitor" "podMonitoring" }}
{{- if (get $.Values.metrics $key).enabled }}{{ fail (printf "metrics.%s: with metrics.auth=true a reader must send a token, which it takes from a Secret; set metrics.readerToken.create=true, or metrics.readerToken.secretName to a Secret with a token of a ServiceAccount that may get /metrics, or metrics.auth=false" $key) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
