#!/bin/sh
# Runs a Consul agent in memory that refuses calls without a token, and permits the services what
# deploy/consul_policy.hcl lists. Arguments: the file of the management token, the file of the
# services' token, the policy; then flags of the agent.
set -eu
management=$(cat "$1") services=$(cat "$2") policy=$3
shift 3
# Before version 1.11 the setting was `master`.
name=${CONSUL_MANAGEMENT_SETTING:-initial_management}

consul agent -dev -log-level=warn -hcl "
  acl = {
    enabled = true
    default_policy = \"deny\"
    tokens = { $name = \"$management\", agent = \"$management\" }
  }" "$@" &
agent=$!
trap 'kill -INT $agent' INT TERM

export CONSUL_HTTP_TOKEN="$management"
until consul acl policy create -name kvmesh -rules "@$policy" > /dev/null 2>&1; do
  kill -0 $agent
  sleep 0.2
done
consul acl token create -description kvmesh -policy-name kvmesh -secret "$services" > /dev/null
unset CONSUL_HTTP_TOKEN
wait $agent || wait $agent
