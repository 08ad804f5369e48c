"""The vector of a text: its form on the Attach stream, and shorter vectors. Pure."""

from __future__ import annotations

import base64
import binascii
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson

from common.errors import InvalidRequest, Unsupported, WorkerLost

# Coordinates of a text, shape [dimensions]; its length (L2 norm) is 1.
Vector: TypeAlias = npt.NDArray[np.float32]


def to_base64(vector: Vector) -> str:
    """Returns the coordinates as f32 little endian in base64, as in the OpenAI API."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def dump_vector(vector: Vector) -> bytes:
    """Returns the chunk of an embedding: OpenAI's embedding object in base64."""
    return orjson.dumps({"object": "embedding", "index": 0, "embedding": to_base64(vector)})


def load_vector(chunk: bytes) -> Vector:
    """Returns the vector in a chunk. Raises WorkerLost if it has none."""
    try:
        # Any: JSON.
        value: Any = orjson.loads(chunk)
        return np.frombuffer(base64.b64decode(value["embedding"], validate=True), dtype="<f4")
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        text = f"the worker sent an invalid vector: {error!r}"
        raise WorkerLost(text, retryable=False) from error


def check_dimensions(dimensions: int | None, size: int | None, *, can_shorten: bool) -> None:
    """Raises InvalidRequest or Unsupported if vectors of `size` coordinates cannot be shortened to
    `dimensions`. size: None if unknown."""
    if dimensions is None or dimensions == size:
        return
    if not can_shorten:
        text = f"the model's vectors cannot be shortened; they have {size or 'a fixed number of'}"
        raise Unsupported("dimensions", f"{text} coordinates")
    if dimensions < 1 or (size is not None and dimensions > size):
        text = f"Invalid 'dimensions': expected 1 to {size}, but got {dimensions}."
        raise InvalidRequest(text, "dimensions")


def shorten(vector: Vector, dimensions: int | None) -> Vector:
    """Returns the first coordinates, scaled to length 1 again. dimensions: None leaves the
    vector."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    short = vector[:dimensions]
    return (short / (float(np.linalg.norm(short)) or 1.0)).astype(np.float32)
