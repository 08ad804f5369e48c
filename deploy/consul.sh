#!/bin/sh
# Runs a Consul server in memory that refuses calls without a token, and permits the services what
# deploy/consul_policy.hcl lists. Arguments: the file of the management token, the file of the
# services' token, the policy; then flags of the agent.
#   CONSUL_PEERS       names of the other servers of the cluster
#   CONSUL_FOUNDS=no   the server joins its peers, and never founds a cluster. Another one does so if
#                      no peer has a leader: at the first start, and after all have lost their state.
set -eu
management=$(cat "$1") services=$(cat "$2") policy=$3
shift 3
# Before version 1.11 the setting was `master`.
name=${CONSUL_MANAGEMENT_SETTING:-initial_management}

# Sets `cluster` to the first peer whose cluster has a leader, else to nothing.
find_cluster() {
  for cluster in ${CONSUL_PEERS:-} ""; do
    if [ -n "$cluster" ] && CONSUL_HTTP_TOKEN="$management" CONSUL_HTTP_ADDR="http://$cluster:8500" \
      timeout 3 consul operator raft list-peers > /dev/null 2>&1; then return; fi
  done
}

find_cluster
# Two servers that join each other first would not find the founder. A container engine shows the wait:
# the health check fails.
while [ -z "$cluster" ] && [ "${CONSUL_FOUNDS:-yes}" = no ]; do
  sleep 1
  find_cluster
done
if [ -n "$cluster" ]; then
  set -- "-retry-join=$cluster" -retry-interval=1s "$@"
else
  set -- -bootstrap-expect=1 "$@"
fi

# A server that stops leaves the cluster, so that the others keep a majority; the next one under its
# name is a new node.
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT
consul agent -server -ui -log-level=warn -data-dir="$data" -node="$(hostname)-$$-$(date +%s)" -hcl "
  acl = {
    enabled = true
    default_policy = \"deny\"
    tokens = { $name = \"$management\", agent = \"$management\" }
  }
  disable_update_check = true
  autopilot = { server_stabilization_time = \"1s\" }
  performance = { raft_multiplier = 1, leave_drain_time = \"500ms\" }" "$@" &
agent=$!
# Not by leave_on_terminate: a connection that breaks meanwhile (SIGPIPE) would end that leave.
stop() {
  if [ -n "${CONSUL_PEERS:-}" ]; then
    CONSUL_HTTP_TOKEN="$management" timeout 15 consul leave > /dev/null 2>&1 || true
  fi
  kill -TERM $agent 2> /dev/null || true
}
trap stop INT TERM

if [ -z "$cluster" ]; then
  export CONSUL_HTTP_TOKEN="$management"
  until consul acl policy create -name kvmesh -rules "@$policy" > /dev/null 2>&1; do
    kill -0 $agent
    sleep 0.2
  done
  consul acl token create -description kvmesh -policy-name kvmesh -secret "$services" > /dev/null
  unset CONSUL_HTTP_TOKEN
fi
wait $agent || wait $agent
