#!/bin/sh
# Runs one of the Consul servers of a StatefulSet, whose state is in a volume. They refuse calls without
# a token, and permit the services what policy.hcl lists.
#   CONSUL_SERVERS     how many servers found the cluster
#   CONSUL_PEERS       names or addresses of all servers
#   CONSUL_ADDRESS     the address of this one
#   CONSUL_FOLDERS     where the secrets and the policy are
#   CONSUL_DATA        the folder of the state
set -eu
management=$(cat "$CONSUL_FOLDERS/consul/management_token")
services=$(cat "$CONSUL_FOLDERS/service/consul_token")
gossip=$(cat "$CONSUL_FOLDERS/consul/gossip_key")
# Before version 1.11 the setting was `master`.
name=${CONSUL_MANAGEMENT_SETTING:-initial_management}
config=${TMPDIR:-/tmp}/consul.hcl
export CONSUL_HTTP_ADDR="http://$CONSUL_ADDRESS:8500"

# The secrets are no arguments of the agent, which each process of the node could read.
umask 077
{
  cat << END
server = true
bootstrap_expect = $CONSUL_SERVERS
node_name = "${CONSUL_NODE:-$(hostname)}"
data_dir = "$CONSUL_DATA"
bind_addr = "$CONSUL_ADDRESS"
client_addr = "$CONSUL_ADDRESS"
encrypt = "$gossip"
log_level = "warn"
disable_update_check = true
# The state is in the volume: a server that stops stays a member, and its successor has its name.
leave_on_terminate = false
skip_leave_on_interrupt = true
retry_interval = "2s"
acl {
  enabled = true
  default_policy = "deny"
  tokens {
    $name = "$management"
    agent = "$management"
  }
}
performance {
  raft_multiplier = 1
}
limits {
  http_max_conns_per_client = 4096
}
END
  echo "retry_join = ["
  for peer in $CONSUL_PEERS; do echo "  \"$peer\","; done
  echo "]"
} > "$config"

consul agent "-config-file=$config" "$@" &
agent=$!
trap 'kill -TERM $agent' INT TERM

# Each server does it, so that the order of their starts and the loss of a volume do not matter.
grant() {
  export CONSUL_HTTP_TOKEN="$management"
  policy=$CONSUL_FOLDERS/policy/policy.hcl
  consul acl policy update -name kvmesh -rules "@$policy" > /dev/null 2>&1 ||
    consul acl policy create -name kvmesh -rules "@$policy" > /dev/null 2>&1 || return 1
  CONSUL_HTTP_TOKEN="$services" consul acl token read -self > /dev/null 2>&1 ||
    consul acl token create -description kvmesh -policy-name kvmesh -secret "$services" \
      > /dev/null 2>&1
}
until (grant); do
  kill -0 $agent
  sleep 1
done
wait $agent || wait $agent
