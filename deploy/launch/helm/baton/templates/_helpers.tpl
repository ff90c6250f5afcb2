{{- define "baton.labels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "baton.image" -}}
{{- $own := eq .role "router" | ternary .root.Values.router.image .root.Values.image -}}
{{- $image := ne $own.repository "" | ternary $own .root.Values.image -}}
{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* What the profile "restricted" of Pod Security asks of a pod, and of each container. */ -}}
{{- define "baton.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  {{- range $name, $id := .Values.user }}
  {{- if $id }}
  {{ $name }}: {{ $id | int64 }}
  {{- end }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "baton.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  readOnlyRootFilesystem: true
{{- end }}

{{- define "baton.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
# the root is read only: caches go here
- name: HOME
  value: /cache
{{- with .Values.model.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}
{{- end }}
{{- end }}

{{- define "baton.model" -}}
{{- if .Values.model.volume }}
- --model=/model{{ with .Values.model.name }}/{{ . }}{{ end }}
{{- else if .Values.model.name }}
- --model={{ .Values.model.name }}
{{- end }}
{{- end }}

{{- define "baton.mounts" -}}
- {name: keys, mountPath: /keys}
- {name: cache, mountPath: /cache}
- {name: scratch, mountPath: /tmp}
{{- if .Values.model.volume }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
- name: all-keys
  secret: {secretName: {{ .Values.secrets.keys }}}
- name: keys
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: cache
  {{- toYaml (.Values.model.cacheVolume | default (dict "emptyDir" dict)) | nindent 2 }}
- name: scratch
  emptyDir: {}
{{- with .Values.model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /*
Secrets are mounted readable by others, and routers and nodes refuse such files. So a container copies this pod's own
into a private folder, and copies them again when the secret changes: keys are rotated without restarts.
*/ -}}
{{- define "baton.keys" -}}
- name: keys
  image: {{ include "baton.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  restartPolicy: Always
  {{- include "baton.container" . | nindent 2 }}
  command:
    - sh
    - -c
    - |
      trap 'exit 0' TERM
      umask 077
      copy() { cmp -s "$1" "$2" || { cat "$1" > "$2.new" && mv "$2.new" "$2"; }; }
      mkdir -p /keys/own /keys/http
      while true; do
        {{- range .copies }}
        copy {{ . }}
        {{- end }}
        touch /keys/copied
        sleep 15 &
        wait $!
      done
  startupProbe:
    exec: {command: [test, -e, /keys/copied]}
    periodSeconds: 1
    failureThreshold: 60
  env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
  resources:
    requests: {cpu: 5m, memory: 16Mi}
    limits: {cpu: 100m, memory: 32Mi}
  volumeMounts:
    - {name: all-keys, mountPath: /all, readOnly: true}
    - {name: keys, mountPath: /keys}
    {{- range .mounts }}
    - {name: {{ . }}, mountPath: /{{ . }}, readOnly: true}
    {{- end }}
{{- end }}
