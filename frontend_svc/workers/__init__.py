"""Streams to workers: connections, circuit breakers, hit rates."""
