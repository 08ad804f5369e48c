"""Loads to and from protobuf."""

from __future__ import annotations

from common.kv.load import Load
from kvmesh.types.v1 import load_pb2


def load_to_proto(load: Load) -> load_pb2.Load:
    """Return the message of one rank's load."""
    message = load_pb2.Load(
        engine_step=load.engine_step,
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        kv_used_blocks=load.kv_used_blocks,
        dp_rank=load.dp_rank,
        rooms_open=load.rooms_open,
    )
    if load.kv_total_blocks is not None:
        message.kv_total_blocks = load.kv_total_blocks
    return message


def load_from_proto(message: load_pb2.Load) -> Load:
    """Return one rank's load."""
    return Load(
        engine_step=message.engine_step,
        running=message.running,
        waiting=message.waiting,
        waiting_tokens=message.waiting_tokens,
        kv_used_blocks=message.kv_used_blocks,
        kv_total_blocks=message.kv_total_blocks if message.HasField("kv_total_blocks") else None,
        dp_rank=message.dp_rank,
        rooms_open=message.rooms_open,
    )
