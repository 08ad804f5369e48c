#!/bin/sh
# Generates the secrets of the compose mesh where they are missing. Arguments: the folders of the
# services, of Consul and of the metrics. Each is a volume; only containers that need it mount it.
# Run by root, it gives each file to the users of docker-compose.yml that read it. A file with two
# readers belongs to the services, and to the group of Consul or Prometheus.
set -eu
services=$1 consul=$2 metrics=$3
service_user=10001 consul_user=100 consul_group=1000 prometheus_group=65534

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

# Files of earlier versions could be read by all.
protect() {
  chmod "$2" "$1"
  if [ "$(id -u)" = 0 ]; then chown "$3" "$1"; fi
}

umask 077
generate "$services/mesh_token"
generate "$services/operator_token"
generate "$services/otlp_key"
# What exporters of spans send to the console, and to no other collector.
printf 'http://console:8071 authorization=Bearer %s' "$(cat "$services/otlp_key")" \
  > "$services/otlp_headers.new"
mv "$services/otlp_headers.new" "$services/otlp_headers"
generate "$metrics/metrics_key"
generate_uuid "$services/consul_token"
generate_uuid "$consul/management_token"
protect "$services/mesh_token" 600 "$service_user"
protect "$services/operator_token" 600 "$service_user"
protect "$services/otlp_key" 600 "$service_user"
protect "$services/otlp_headers" 600 "$service_user"
protect "$services/consul_token" 640 "$service_user:$consul_group"
protect "$metrics/metrics_key" 640 "$service_user:$prometheus_group"
protect "$consul/management_token" 600 "$consul_user"
