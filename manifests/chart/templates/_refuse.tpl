{{/* Rules that a schema cannot express: values that exclude each other, or that need another value. */}}
{{- define "kvepp.refuse" -}}
{{- $v := .Values }}
{{- if and $v.pool.inferencePool $v.pool.create (not $v.pool.selector) }}{{ fail "pool.selector: say which pods serve, by their labels: --set pool.selector.app=vllm-qwen; or pool.create=false with the pool.name of an InferencePool that is there" }}{{ end }}
{{- if and $v.pool.inferencePool $v.pool.create (ne $v.pool.group "inference.networking.k8s.io") }}{{ fail "pool.group: the chart makes pools of inference.networking.k8s.io; of another group, name one that is there (pool.create=false)" }}{{ end }}
{{- if and (not $v.pool.inferencePool) (not $v.pool.selector) }}{{ fail "pool.selector: without an InferencePool it must say which pods serve, by their labels: --set pool.selector.app=vllm-qwen" }}{{ end }}
{{- if and $v.pool.inferencePool (not $v.pool.create) (not $v.pool.name) }}{{ fail "pool.name: which InferencePool is it, if this chart does not make it?" }}{{ end }}
{{- $source := $v.model.source }}
{{- if and $v.models (eq $source "none") }}{{ fail "model.source: models need a tokenizer from somewhere: pvc, image or fetch" }}{{ end }}
{{- if and (eq $source "fetch") (not $v.models) }}{{ fail "models: model.source is fetch; which models shall be fetched?" }}{{ end }}
{{- range $of, $given := dict "pvc" (dict "model.pvc.claimName" $v.model.pvc.claimName) "image" (dict "model.image.reference" $v.model.image.reference) "fetch" (dict "model.fetch.hub" $v.model.fetch.hub) }}
{{- range $key, $value := $given }}
{{- if and $value (ne $source $of) }}{{ fail (printf "%s: it is read with model.source=%s, which is %s" $key $of $source) }}{{ end }}
{{- end }}
{{- end }}
{{- $names := dict }}
{{- $folders := dict }}
{{- range $v.models }}
{{- if hasKey $names .name }}{{ fail (printf "models: %s is there twice" .name) }}{{ end }}
{{- $_ := set $names .name true }}
{{- if eq $source "fetch" }}
{{- $folder := default "." .path }}
{{- $from := printf "%s@%s" (default "" .repository) (default "main" .revision) }}
{{- if ne (default $from (get $folders $folder)) $from }}{{ fail (printf "models: %s and %s are both fetched into the folder %q; give each a path" (get $folders $folder) $from $folder) }}{{ end }}
{{- $_ := set $folders $folder $from }}
{{- end }}
{{- end }}
{{- if $v.kvEvents.replayPort }}
{{- if not $v.kvEvents.enabled }}{{ fail "kvEvents.replayPort: with kvEvents.enabled=false nothing is replayed" }}{{ end }}
{{- if eq (int $v.kvEvents.replayPort) (int $v.kvEvents.port) }}{{ fail "kvEvents.replayPort: the engines' replay socket has another port than that of their events" }}{{ end }}
{{- end }}
{{- if not $v.tls.enabled }}
{{- if $v.tls.secretName }}{{ fail "tls.secretName: a certificate, and tls.enabled=false" }}{{ end }}
{{- if $v.tls.clientCA.secretName }}{{ fail "tls.clientCA: without TLS (tls.enabled=false) no peer sends a certificate, and kvepp would serve every peer" }}{{ end }}
{{- end }}
{{- if $v.envoy.create }}
{{- if eq $v.engine "dynamo" }}{{ fail "envoy.create: this Envoy is for stock engines; with engine=dynamo use manifests/kustomize/components/envoy or a gateway" }}{{ end }}
{{- if not $v.pool.selector }}{{ fail "envoy.create: set pool.selector, so that Envoy finds the engines' pods" }}{{ end }}
{{- if ne $v.pool.appProtocol "http" }}{{ fail "envoy.create: this Envoy speaks HTTP/1.1 with the engines; set pool.appProtocol=http" }}{{ end }}
{{- if or (not $v.tls.enabled) $v.tls.clientCA.secretName }}{{ fail "envoy.create: this Envoy speaks TLS with kvepp and shows no certificate; set tls.enabled=true and no tls.clientCA.secretName" }}{{ end }}
{{- end }}
{{- if and (eq $v.engine "dynamo") (ne (include "kvepp.fallbackEndpoints" .) "0") }}{{ fail "router.fallbackEndpoints: a frontend of Dynamo's serves for one named worker; set it to 0 with engine=dynamo" }}{{ end }}
{{- if not $v.router.eject.enabled }}
{{- range $key, $value := omit $v.router.eject "enabled" }}
{{- if not (kindIs "invalid" $value) }}{{ fail (printf "router.eject.%s: with router.eject.enabled=false no endpoint is ejected; leave it out" $key) }}{{ end }}
{{- end }}
{{- end }}
{{- if not $v.networkPolicy.enabled }}
{{- if or $v.networkPolicy.gatewayFrom $v.networkPolicy.metricsFrom $v.networkPolicy.egress.extra }}{{ fail "networkPolicy: gatewayFrom, metricsFrom and egress.extra are parts of the policy that networkPolicy.enabled=false leaves out" }}{{ end }}
{{- end }}
{{- $valued := dict "pool-name" "pool.name" "pool-namespace" "the release's namespace" "pool-group" "pool.group" "endpoint-selector" "pool.selector" "endpoint-target-ports" "pool.targetPorts"
  "engine" "engine" "ha-enable-leader-election" "leaderElection.enabled" "ha-handover-timeout" "leaderElection.handoverSeconds" "secure-serving" "tls.enabled" "cert-path" "tls.secretName"
  "tls-client-ca" "tls.clientCA" "metrics-port" "metrics.port" "metrics-endpoint-auth" "metrics.auth" "fallback-endpoints" "router.fallbackEndpoints" "drain-timeout" "drainSeconds"
  "eject" "router.eject.enabled" "eject-consecutive-failures" "router.eject.consecutiveFailures" "eject-failure-percent" "router.eject.failurePercent" "eject-max-percent" "router.eject.maxPercent"
  "eject-time" "router.eject.time" "eject-first-byte" "router.eject.firstByte" }}
{{- range $v.extraArgs }}
{{- $flag := regexReplaceAll "^--|=.*$" . "" }}
{{- if hasKey $valued $flag }}{{ fail (printf "extraArgs: --%s is what the value %s says, and more than this flag goes by that" $flag (get $valued $flag)) }}{{ end }}
{{- if and (eq $flag "drain-delay") (include "kvepp.leaderElection" $) }}{{ fail "extraArgs: --drain-delay is what the value preStopSeconds says under leader election, and the pod's grace period goes by that" }}{{ end }}
{{- if has $flag (list "bind-address" "grpc-port" "grpc-health-port" "ha-lease-name" "metrics-address") }}{{ fail (printf "extraArgs: --%s is not to be changed: Service, probes and rights go by it" $flag) }}{{ end }}
{{- end }}
{{- end -}}
