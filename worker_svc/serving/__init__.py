"""The gRPC service: Attach streams, request runner and engine probe."""
