"""The methods of a batch service."""

from __future__ import annotations

from typing import Any

from kvmesh.batch.v1 import batch_pb2_grpc, conversations_pb2_grpc, responses_pb2_grpc


class BatchStub:
    """The methods of all gRPC services of one process, whose names differ."""

    # Any: a channel with its methods.
    def __init__(self, channel: Any) -> None:
        self.batches = batch_pb2_grpc.BatchServiceStub(channel)
        self._stubs = (
            self.batches,
            responses_pb2_grpc.StoredResponseServiceStub(channel),
            conversations_pb2_grpc.ConversationServiceStub(channel),
        )

    # Any: a method of a stub.
    def method(self, name: str) -> Any:
        return next(getattr(stub, name) for stub in self._stubs if hasattr(stub, name))
