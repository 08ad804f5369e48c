"""Benchmarks: each prints one JSON object as its last line, with commit and settings."""

import os

# gRPC reads it at import. Its handlers can crash a process that a benchmark starts.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
