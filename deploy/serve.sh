#!/bin/sh
# Starts a service under the name by which the other containers reach this one.
set -eu
module=$1
shift
host=${KVMESH_ADVERTISE_HOST:-$(hostname)}
exec python3 -m "$module" --advertise-host "$host" "$@"
