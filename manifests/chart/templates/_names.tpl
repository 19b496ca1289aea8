{{/* The name of all objects. A Service has the strictest rules for names. */}}
{{- define "kvepp.name" -}}
{{- $name := default .Release.Name .Values.nameOverride | trunc 52 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}{{ fail (printf "%q cannot be the name of a Service: it must begin with a letter and have only letters, digits and dashes; rename the release, or set nameOverride" $name) }}{{ end -}}
{{- $name -}}
{{- end -}}

{{- define "kvepp.pool" -}}
{{- default (include "kvepp.name" .) .Values.pool.name -}}
{{- end -}}

{{- define "kvepp.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvepp.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvepp.selectorLabels" -}}
app.kubernetes.io/name: kvepp
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvepp.labels" -}}
{{ include "kvepp.selectorLabels" . }}
app.kubernetes.io/component: endpoint-picker
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvepp.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* Envoy's pods. They must not have the labels that select kvepp's. */}}
{{- define "kvepp.envoySelectorLabels" -}}
app.kubernetes.io/name: envoy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvepp.envoyLabels" -}}
{{ include "kvepp.envoySelectorLabels" . }}
app.kubernetes.io/component: proxy
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* --fallback-endpoints */}}
{{- define "kvepp.fallbackEndpoints" -}}
{{- if kindIs "invalid" .Values.router.fallbackEndpoints -}}
{{- ternary 2 0 .Values.envoy.create -}}
{{- else -}}
{{- int .Values.router.fallbackEndpoints -}}
{{- end -}}
{{- end -}}

{{/* The flags of router.eject that differ from kvepp's defaults, as a JSON list. */}}
{{- define "kvepp.ejectFlags" -}}
{{- $eject := . }}
{{- $flags := list }}
{{- if not $eject.enabled }}{{ $flags = append $flags "--eject=false" }}{{ end }}
{{- if not (kindIs "invalid" $eject.firstByte) }}{{ $flags = append $flags (printf "--eject-first-byte=%s" $eject.firstByte) }}{{ end }}
{{- toJson $flags -}}
{{- end -}}

{{/* The number of replicas, the greatest one if it follows the load. By default two, if the second one is of use: if they
share their load, or elect a leader. */}}
{{- define "kvepp.replicaCount" -}}
{{- if .Values.autoscaling.enabled -}}
{{- int .Values.autoscaling.maxReplicas -}}
{{- else if not (kindIs "invalid" .Values.replicas) -}}
{{- int .Values.replicas -}}
{{- else if and (eq (toString .Values.sharing.enabled) "false") (not .Values.leaderElection.enabled) -}}
1
{{- else -}}
2
{{- end -}}
{{- end -}}

{{/* Whether the replicas share their running requests: "true" or nothing. */}}
{{- define "kvepp.sharing" -}}
{{- if kindIs "invalid" .Values.sharing.enabled -}}
{{- if and (gt (int (include "kvepp.replicaCount" .)) 1) (not .Values.leaderElection.enabled) }}true{{ end -}}
{{- else if .Values.sharing.enabled -}}
true
{{- end -}}
{{- end -}}

{{/* Whether the replicas share, and recognise one another by a token: "true" or nothing. */}}
{{- define "kvepp.sharingToken" -}}
{{- if and (include "kvepp.sharing" .) (eq .Values.sharing.trust "token") }}true{{ end -}}
{{- end -}}

{{/* Whether one of several replicas decides: "true" or nothing. */}}
{{- define "kvepp.leaderElection" -}}
{{- if kindIs "invalid" .Values.leaderElection.enabled -}}
{{- if and (gt (int (include "kvepp.replicaCount" .)) 1) (not (include "kvepp.sharing" .)) }}true{{ end -}}
{{- else if .Values.leaderElection.enabled -}}
true
{{- end -}}
{{- end -}}

{{- define "kvepp.podDisruptionBudget" -}}
{{- if kindIs "invalid" .Values.podDisruptionBudget.enabled -}}
{{- if and (gt (int (include "kvepp.replicaCount" .)) 1) (not (include "kvepp.leaderElection" .)) }}true{{ end -}}
{{- else if .Values.podDisruptionBudget.enabled -}}
{{- if include "kvepp.leaderElection" . }}{{ fail "podDisruptionBudget.enabled: under leader election only one replica is Ready, and a budget would prevent drains of its node; set leaderElection.enabled=false, or leave the budget out" }}{{ end -}}
true
{{- end -}}
{{- end -}}

{{/* The headless Service by which replicas find one another, and the Secret with their token. */}}
{{- define "kvepp.peers" -}}
{{- printf "%s-peers" (include "kvepp.name" .) -}}
{{- end -}}

{{- define "kvepp.replicaSecret" -}}
{{- default (include "kvepp.peers" .) .Values.sharing.tokenSecret.name -}}
{{- end -}}

{{/* The Secret with the token of the admin address. */}}
{{- define "kvepp.adminSecret" -}}
{{- default (printf "%s-admin" (include "kvepp.name" .)) .Values.admin.tokenSecret.name -}}
{{- end -}}

{{/* The Secret with a token that may read metrics: its name or nothing. */}}
{{- define "kvepp.readerSecret" -}}
{{- if .Values.metrics.readerToken.create -}}
{{- include "kvepp.name" . }}-metrics-reader
{{- else -}}
{{- .Values.metrics.readerToken.secretName -}}
{{- end -}}
{{- end -}}

{{/* The samples of kvepp's pods in Prometheus, however it finds them. The names of pods whose Deployment has a long name
are cut within the ReplicaSet's hash. */}}
{{- define "kvepp.samples" -}}
{namespace={{ .Release.Namespace | quote }},pod=~"{{ include "kvepp.name" . }}-[a-z0-9]+(-[a-z0-9]+)?"}
{{- end -}}

{{/* A trigger of KEDA's: the sum of QUERY over all pods should be THRESHOLD for each pod of the target. */}}
{{- define "kvepp.trigger" -}}
- type: prometheus
  metricType: AverageValue
  metadata:
    serverAddress: {{ .root.Values.metrics.prometheus.address | quote }}
    query: {{ .query | quote }}
    threshold: {{ int64 .threshold | quote }}
  {{- with .root.Values.metrics.prometheus.authentication }}
  authenticationRef: {name: {{ . }}}
  {{- end }}
{{- end -}}

{{/* The Lease that replicas elect a leader by. */}}
{{- define "kvepp.lease" -}}
{{- printf "kvepp-%s" (include "kvepp.pool" .) -}}
{{- end -}}

{{/* The folder of a model's tokenizer in the container. */}}
{{- define "kvepp.modelPath" -}}
{{- if .path }}/models/{{ .path }}{{ else }}/models{{ end -}}
{{- end -}}

{{- define "kvepp.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The ports of the hub and of the URLs in extraArgs and extraEnv, as a JSON list. */}}
{{- define "kvepp.urlPorts" -}}
{{- $texts := .Values.extraArgs }}
{{- if eq .Values.model.source "fetch" }}{{ $texts = append $texts .Values.model.fetch.hub }}{{ end }}
{{- range .Values.extraEnv }}{{ $texts = append $texts (default "" .value) }}{{ end }}
{{- $ports := list }}
{{- range $texts }}
{{- range regexFindAll "[a-z][a-z0-9+.-]*://[^,/?# ]+" . -1 }}
{{- $default := get (dict "http" "80" "https" "443" "nats" "4222" "tls" "4222") (regexFind "^[a-z0-9+.-]+" .) }}
{{- $port := default $default (regexFind "[0-9]+$" (regexFind ":[0-9]+$" .)) }}
{{- if and $port (not (has (int $port) $ports)) }}{{ $ports = append $ports (int $port) }}{{ end }}
{{- end }}
{{- end }}
{{- toJson $ports -}}
{{- end -}}
