"""The speed and the size of a worker, from measured latencies and what it advertises (pure).

A step of an engine takes

    base + prefill_token * prompt tokens + decode_seq * requests + kv_token * tokens in their cache

A prompt on an idle worker adds what is outside of the engine:

    ttft = outside + base + prefill_token * tokens
    itl  = base + decode_seq * requests + kv_token * requests * context

Both are linear, fitted by least squares of the relative error. A prompt pauses a stream beside it.
An engine that computes both in one step (*mixed*) pauses it for one chunk of the prompt; another
one for all chunks, and for a step more, since each kind of step has its base.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from replay.engine import WorkerSettings
from worker_svc.engines.sim.timing import Timing

CHUNK_TOKENS = 8192
"""Of an engine that states none, and whose prompts were too short to be divided."""

# A pause this near to that of the whole prompt is one step.
_WHOLE_SHARE = 0.9
# Chunks are multiples of this.
_CHUNK_ROUNDING = 64
# Prompts up to this length are one step, if the engine states no chunk.
_UNDIVIDED_TOKENS = 2048


class SpeedsError(Exception):
    """Measured latencies, or a file of speeds, that cannot be used."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a worker advertises of its size; None: it does not. blocks: of its KV cache, of
    block_size tokens. requests: most that run at once. chunk_tokens: most prompt tokens of a step.

    Raises ValueError for a size below 1.
    """

    blocks: int | None = None
    block_size: int | None = None
    requests: int | None = None
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")

    def settings(self, blocks: int | None, block_size: int) -> WorkerSettings:
        """Returns the sizes of a replayed worker.

        - blocks: of its cache, of block_size tokens; None: those that it advertises.
        - block_size: tokens of a named block of the trace.
        """
        known = WorkerSettings()
        requests = self.requests or known.max_num_seqs
        if blocks is not None or self.blocks is None or self.block_size is None:
            return WorkerSettings(blocks or known.total_blocks, block_size, requests)
        # Blocks of both sizes consist of these.
        common = math.gcd(self.block_size, block_size)
        return WorkerSettings(self.blocks * self.block_size // common, common, requests)


UNKNOWN_CAPACITY = Capacity()


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds per unit of work of one worker, and its size."""

    base_s: float
    prefill_token_s: float
    decode_seq_s: float
    outside_s: float = 0.0
    """Of a request outside of the engine: HTTP, tokenizing, routing."""

    chunk_tokens: int = CHUNK_TOKENS
    """Most prompt tokens of a step."""

    kv_token_s: float = 0.0
    """Per token in the cache of the requests of a step."""

    is_mixed: bool = True
    """Whether prompts and further tokens share a step; else prompts are computed first."""

    capacity: Capacity = UNKNOWN_CAPACITY

    @property
    def timing(self) -> Timing:
        return Timing(self.base_s, self.prefill_token_s, self.decode_seq_s, self.kv_token_s)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def fit(
    prompts: Sequence[tuple[int, float]],
    decodes: Sequence[tuple[int, int, float]],
    pauses: Sequence[tuple[int, float]] = (),
    capacity: Capacity = UNKNOWN_CAPACITY,
) -> Speeds:
    """Returns the speeds. Raises SpeedsError if they have fewer than two different sizes.

    prompts: prompt tokens, and seconds to the first token, on an idle worker.
    decodes: requests that ran at once on one worker, tokens in the cache of each, and seconds
        between two tokens of one.
    pauses: tokens of a prompt, and the longest time without a token of a stream beside it.
    """
    seconds = [value for _, _, value in decodes]
    counts = [count for count, _, _ in decodes]
    cached = [count * tokens for count, tokens, _ in decodes]
    _check("numbers of requests", counts, seconds)
    # With one length of context, what it costs is part of what a request costs.
    has_contexts = len({tokens for _, tokens, _ in decodes}) > 1
    columns = [[1] * len(counts), counts, *([cached] if has_contexts else [])]
    base_s, decode_seq_s, *rest = _coefficients(columns, seconds)
    lengths, firsts = [tokens for tokens, _ in prompts], [value for _, value in prompts]
    _check("lengths of prompts", lengths, firsts)
    prompt_base_s, prefill_token_s = _coefficients([[1] * len(lengths), lengths], firsts)
    outside_s = max(0.0, prompt_base_s - base_s)
    alone_s = base_s + decode_seq_s
    chunk_tokens, is_mixed = _steps(pauses, base_s, alone_s, prefill_token_s, capacity.chunk_tokens)
    return Speeds(
        *(base_s, prefill_token_s, decode_seq_s, outside_s, chunk_tokens),
        kv_token_s=sum(rest),
        is_mixed=is_mixed,
        capacity=capacity,
    )


def _steps(
    pauses: Sequence[tuple[int, float]],
    base_s: float,
    alone_s: float,
    prefill_token_s: float,
    stated: int | None,
) -> tuple[int, bool]:
    """Returns the most prompt tokens of a step, and whether other requests share it. alone_s: of a
    step with one request. stated: chunk tokens that the worker advertises."""
    chunk_tokens = stated or CHUNK_TOKENS
    if not prefill_token_s:
        return chunk_tokens, True
    undivided = stated or _UNDIVIDED_TOKENS
    extra = [s - alone_s - prefill_token_s * tokens for tokens, s in pauses if tokens <= undivided]
    is_mixed = not extra or median(extra) < base_s / 2
    for tokens, pause_s in pauses:
        found = (pause_s - alone_s) / prefill_token_s
        if tokens <= undivided or found <= 0:
            continue
        if stated:
            # The long prompt decides: its chunks are longer than a step without prompts.
            is_mixed = found < (stated + tokens) / 2
        elif found > _WHOLE_SHARE * tokens:
            chunk_tokens = max(CHUNK_TOKENS, tokens)
        else:
            is_mixed = True
            chunk_tokens = max(1, round(found / _CHUNK_ROUNDING)) * _CHUNK_ROUNDING
    return chunk_tokens, is_mixed


def parse_speeds(text: str) -> Speeds:
    """Returns the speeds of a file. Raises SpeedsError."""
    try:
        fields: Any = json.loads(text)
        chunk_tokens = int(fields.pop("chunk_tokens", CHUNK_TOKENS))
        is_mixed = fields.pop("is_mixed", True)
        capacity = Capacity(**fields.pop("capacity", {}))
        speeds = Speeds(
            **{name: float(value) for name, value in fields.items()},
            chunk_tokens=chunk_tokens,
            is_mixed=is_mixed,
            capacity=capacity,
        )
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
        if type(is_mixed) is not bool:
            raise ValueError(f"is_mixed must be true or false, not {is_mixed!r}")
        _ = speeds.timing
    except (ValueError, TypeError, AttributeError) as error:
        raise SpeedsError(f"no speeds: {error}") from None
    return speeds


def _check(what: str, sizes: Sequence[int], seconds: Sequence[float]) -> None:
    if len(set(sizes)) < 2 or min(seconds) <= 0:
        raise SpeedsError(f"at least two {what} and positive times are needed")


def _coefficients(columns: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[float]:
    """Returns the factors of the columns whose sum is nearest to the seconds, none below 0."""
    weights = 1 / np.array(seconds, dtype=float)
    matrix = np.stack([np.array(column, dtype=float) * weights for column in columns], axis=1)
    found, used = np.zeros(len(columns)), list(range(len(columns)))
    # Ends: each round uses a column less.
    while used:
        factors, *_ = np.linalg.lstsq(matrix[:, used], np.ones(len(seconds)), rcond=None)
        if (factors >= 0).all():
            found[used] = factors
            break
        # What the column adds decides, not its unit.
        least = int(np.argmin(factors * matrix[:, used].sum(axis=0)))
        del used[least]
    return [float(value) for value in found]
