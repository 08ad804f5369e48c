"""The speed of a worker, from measured latencies (pure).

A step of an engine takes base + prefill_token * prompt tokens + decode_seq * requests. A prompt on
an idle worker adds what is outside of the engine:

    ttft = outside + base + prefill_token * tokens
    itl  = base + decode_seq * requests

Both are lines, fitted by least squares of the relative error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from worker_svc.engines.sim.timing import Timing


class SpeedsError(Exception):
    """Measured latencies, or a file of speeds, that cannot be used."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds per unit of work of one worker."""

    base_s: float
    prefill_token_s: float
    decode_seq_s: float
    outside_s: float = 0.0
    """Of a request outside of the engine: HTTP, tokenizing, routing."""

    @property
    def timing(self) -> Timing:
        return Timing(self.base_s, self.prefill_token_s, self.decode_seq_s, 0.0)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def fit(prompts: Sequence[tuple[int, float]], decodes: Sequence[tuple[int, float]]) -> Speeds:
    """Returns the speeds. Raises SpeedsError if they have fewer than two different sizes.

    prompts: prompt tokens, and seconds to the first token, on an idle worker.
    decodes: requests that ran at once on one worker, and seconds between two tokens of one.
    """
    decode_base_s, decode_seq_s = _line(decodes, "numbers of requests")
    prompt_base_s, prefill_token_s = _line(prompts, "lengths of prompts")
    outside_s = max(0.0, prompt_base_s - decode_base_s)
    return Speeds(decode_base_s, prefill_token_s, decode_seq_s, outside_s)


def parse_speeds(text: str) -> Speeds:
    """Returns the speeds of a file. Raises SpeedsError."""
    try:
        fields: Any = json.loads(text)
        speeds = Speeds(**{name: float(value) for name, value in fields.items()})
        _ = speeds.timing
    except (ValueError, TypeError, AttributeError) as error:
        raise SpeedsError(f"no speeds: {error}") from None
    return speeds


def _line(points: Sequence[tuple[int, float]], what: str) -> tuple[float, float]:
    """Returns offset and slope, neither below 0."""
    sizes = np.array([size for size, _ in points], dtype=float)
    seconds = np.array([value for _, value in points], dtype=float)
    if len(set(sizes.tolist())) < 2 or not (seconds > 0).all():
        raise SpeedsError(f"at least two {what} and positive times are needed")
    weights = 1 / seconds
    matrix = np.stack([weights, sizes * weights], axis=1)
    (offset, slope), *_ = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)
    if slope < 0:
        return float(np.average(seconds, weights=weights)), 0.0
    if offset < 0:
        slope = float((sizes * weights).sum() / ((sizes * weights) ** 2).sum())
        return 0.0, slope
    return float(offset), float(slope)
