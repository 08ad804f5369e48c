"""What two services share: registry, KV index types, requests, wire, RPC and service life cycle."""
