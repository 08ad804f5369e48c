#!/bin/sh
# Generates the secrets of a mesh on Kubernetes where they are missing, as files in this folder, or in
# the folder of the argument. kustomization.yaml makes Secrets of them. Keep the files: to generate them
# anew is another mesh. API keys: `meshctl keys --api-keys FOLDER/api-keys/keys.json create TENANT`.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
to=${1:-$here}
umask 077
mkdir -p "$to/service" "$to/consul" "$to/metrics" "$to/api-keys" "$to/picker"
"$here/../../make_secrets.sh" "$to/service" "$to/consul" "$to/metrics"

write() {
  [ -s "$1" ] && return
  cat > "$1.new"
  mv "$1.new" "$1"
}
head -c 32 /dev/urandom | base64 | tr -d '\n' | write "$to/consul/gossip_key"
# No key: each request is refused.
printf '{}\n' | write "$to/api-keys/keys.json"
# The certificate of pickers; gateways do not verify it (docs/operate/gateway.md).
if [ ! -s "$to/picker/tls.crt" ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=picker \
    -addext subjectAltName=DNS:picker,DNS:picker.kvmesh.svc -keyout "$to/picker/tls.key" \
    -out "$to/picker/tls.crt" 2> /dev/null ||
    echo "no certificate of the pickers: openssl is missing or older than 1.1.1" >&2
fi
