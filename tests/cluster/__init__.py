"""A mesh on a Ray cluster of three nodes on this host: `make ray-test`."""
