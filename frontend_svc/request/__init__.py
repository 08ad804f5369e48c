"""Runs requests: joins a request machine with the router, the workers and the client."""
