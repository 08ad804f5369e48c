#!/bin/sh
# Generates the secrets of the compose mesh where they are missing. Arguments: the folders of the
# services, of Consul and of the metrics. Each is a volume; only containers that need it mount it.
set -eu
services=$1 consul=$2 metrics=$3

generate() {
  [ -s "$1" ] && return
  head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$1.new"
  mv "$1.new" "$1"
}
# Consul's tokens are UUIDs.
generate_uuid() {
  [ -s "$1" ] && return
  cat /proc/sys/kernel/random/uuid > "$1.new"
  mv "$1.new" "$1"
}

umask 022
generate "$services/mesh_token"
generate "$services/operator_token"
generate "$metrics/metrics_key"
generate_uuid "$services/consul_token"
generate_uuid "$consul/management_token"
