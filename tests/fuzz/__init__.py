"""Mutated request bodies against a running mesh: `make fuzz`."""
