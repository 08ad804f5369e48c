"""Clients and agent frameworks against a running mesh: `make test-clients`."""
