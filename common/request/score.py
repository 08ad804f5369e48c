"""The score of a pair of texts: its form on the Attach stream. Pure."""

from __future__ import annotations

import math
from typing import Any

import orjson

from common.errors import WorkerLost


def dump_score(score: float) -> bytes:
    """Returns the chunk of a score."""
    return orjson.dumps({"object": "score", "index": 0, "score": score})


def load_score(chunk: bytes) -> float:
    """Returns the score in a chunk. Raises WorkerLost if it has none."""
    try:
        # Any: JSON.
        value: Any = orjson.loads(chunk)
        score = value["score"]
    except (KeyError, TypeError, ValueError) as error:
        text = f"the worker sent an invalid score: {error!r}"
        raise WorkerLost(text, retryable=False) from error
    if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
        raise WorkerLost(f"the worker sent an invalid score: {score!r}", retryable=False)
    return float(score)
