service_prefix "kvmesh-" {
  policy = "write"
}
key_prefix "kvmesh/" {
  policy = "write"
}
node_prefix "" {
  policy = "read"
}
