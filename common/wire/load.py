"""Loads to and from protobuf."""

from __future__ import annotations

from dataclasses import fields

from common.kv.load import Load
from kvmesh.types.v1 import load_pb2

_NAMES = tuple(field.name for field in fields(Load))


def load_to_proto(load: Load) -> load_pb2.Load:
    return load_pb2.Load(**{name: getattr(load, name) for name in _NAMES})


def load_from_proto(message: load_pb2.Load) -> Load:
    values = {name: getattr(message, name) for name in _NAMES}
    if not message.HasField("kv_total_blocks"):
        values["kv_total_blocks"] = None
    return Load(**values)
