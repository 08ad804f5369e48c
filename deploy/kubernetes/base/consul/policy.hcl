# python -m tools.kubernetes writes this file from deploy/consul_policy.hcl.
service_prefix "kvmesh-" {
  policy = "write"
}
key_prefix "kvmesh/" {
  policy = "write"
}
node_prefix "" {
  policy = "read"
}
