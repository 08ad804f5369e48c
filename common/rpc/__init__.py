"""gRPC channels, servers and interceptors."""
