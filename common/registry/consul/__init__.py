"""The registry of a mesh on several hosts, on Consul's HTTP API (py-consul over httpx).

    service kvmesh-<namespace>, tag <kind>    one entry per incarnation, its ID ends in the hex id
    kvmesh/<namespace>/left/<id>              departure note, deleted after an hour
    kvmesh/<namespace>/adapters/<key>         a desired adapter, signed
    kvmesh/cards/<checksum>/manifest, 0 …     a card, immutable, deflated, in parts

One service per namespace, not one per kind: a watch then needs one blocking query, one index and
one consistent list, and the agent's limit of 200 connections per client address lasts four times
as long.

- An entry holds the whole Instance as JSON, cut over meta values (512 characters each), so that it
  changes in one step. The order of registration is Consul's CreateIndex, which updates keep. If
  all servers lose their state, two *living* incarnations of one name come back in any order.
- Health: Consul checks `meta["health"]` (`host:port`, gRPC health, no TLS) every second. An
  instance without that key has a TTL check, renewed by its owner: for tests, and for meshes where
  mutual TLS keeps the agent out.
- Members are the entries that are listed and passing. Before a watch drops a member, it *probes*
  the member: by the same gRPC health call, else by connecting. Therefore an agent without its
  state, a failing leader or a token without rights evicts no living instance. Three facts need no
  probe: a departure note, an expired TTL, and any failing check of other origin (an operator's
  maintenance mode).
- A card is checked before *and* after registering. Raft puts registrations in one order and each
  instance checks again once it is listed, so of several rivals the oldest stays and the others
  withdraw.
- Owners check every second that the agent still has their entries, and register again if it has
  none or another one.
- Registering and storing a card wait for an unreachable Consul, as at the start of a whole mesh.
  All other calls fail at once, or continue with the last known state.
"""
