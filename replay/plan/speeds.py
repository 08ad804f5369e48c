"""The speed of a worker, from measured latencies (pure).

A step of an engine takes base + prefill_token * prompt tokens + decode_seq * requests. A prompt on
an idle worker adds what is outside of the engine:

    ttft = outside + base + prefill_token * tokens
    itl  = base + decode_seq * requests

Both are lines, fitted by least squares of the relative error. A prompt of more than `chunk_tokens`
takes several steps: a stream beside it then pauses for one of them, not for the whole prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from worker_svc.engines.sim.timing import Timing

CHUNK_TOKENS = 8192
"""Of an engine whose prompts were too short to be divided when they were measured."""

# A pause this near to that of the whole prompt is one step.
_WHOLE_SHARE = 0.9
# Chunks are multiples of this.
_CHUNK_ROUNDING = 64


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

    chunk_tokens: int = CHUNK_TOKENS
    """Most prompt tokens of a step."""

    @property
    def timing(self) -> Timing:
        return Timing(self.base_s, self.prefill_token_s, self.decode_seq_s, 0.0)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def fit(
    prompts: Sequence[tuple[int, float]],
    decodes: Sequence[tuple[int, float]],
    pauses: Sequence[tuple[int, float]] = (),
) -> Speeds:
    """Returns the speeds. Raises SpeedsError if they have fewer than two different sizes.

    prompts: prompt tokens, and seconds to the first token, on an idle worker.
    decodes: requests that ran at once on one worker, and seconds between two tokens of one.
    pauses: tokens of a prompt, and the longest time without a token of a stream beside it.
    """
    decode_base_s, decode_seq_s = _line(decodes, "numbers of requests")
    prompt_base_s, prefill_token_s = _line(prompts, "lengths of prompts")
    outside_s = max(0.0, prompt_base_s - decode_base_s)
    chunk_tokens = CHUNK_TOKENS
    for tokens, pause_s in pauses:
        if prefill_token_s and (found := (pause_s - decode_base_s) / prefill_token_s) > 0:
            whole = max(CHUNK_TOKENS, tokens)
            rounded = max(1, round(found / _CHUNK_ROUNDING)) * _CHUNK_ROUNDING
            chunk_tokens = whole if found > _WHOLE_SHARE * tokens else rounded
    return Speeds(decode_base_s, prefill_token_s, decode_seq_s, outside_s, chunk_tokens)


def parse_speeds(text: str) -> Speeds:
    """Returns the speeds of a file. Raises SpeedsError."""
    try:
        fields: Any = json.loads(text)
        chunk_tokens = int(fields.pop("chunk_tokens", CHUNK_TOKENS))
        speeds = Speeds(
            **{name: float(value) for name, value in fields.items()}, chunk_tokens=chunk_tokens
        )
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
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
