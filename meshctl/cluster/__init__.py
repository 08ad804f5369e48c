"""A mesh on the nodes of a cluster: which replica runs where, and what replaces it.

`Controller` compares the deployment with the replicas that it observes, and starts and stops
replicas through a `Runner`. Its decisions are pure (`reconcile.py`, `placement.py`,
`recommended.py`). A `Replica` runs one service process on a node. Only `meshctl.cluster.on_ray`
imports Ray.
"""
