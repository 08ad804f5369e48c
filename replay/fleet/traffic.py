"""Conversations of many tenants, as an endless stream of requests (pure).

A tenant has a system prompt, which all its conversations begin with; few tenants have most of the
conversations (Zipf). Each further turn repeats the turns before it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

from replay.trace import TraceRequest

BLOCK = 512


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """Means of a traffic. Lengths are log-normal, turns and pauses exponential."""

    requests_per_s: float
    tenants: int = 200
    prefix_blocks: int = 8
    """Blocks of the system prompt of a tenant."""

    turns: float = 6.0
    turn_tokens: float = 1500.0
    output_tokens: float = 150.0
    pause_s: float = 4.0
    """Between a response and the next turn."""

    token_s: float = 0.01
    """Seconds for a token of a response."""


@dataclass(slots=True)
class _Conversation:
    prefix: tuple[int, ...]
    turns: int


@dataclass(slots=True)
class Traffic:
    """Draws requests in order of arrival. The same seed draws the same ones."""

    settings: TrafficSettings
    seed: int
    prefixes: list[tuple[int, ...]] = field(init=False)
    """The system prompts, of the most frequent tenant first."""

    _ids: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        blocks = self.settings.prefix_blocks
        self.prefixes = [self._blocks(blocks) for _ in range(self.settings.tenants)]

    def requests(self, until_s: float) -> Iterator[TraceRequest]:
        """Yields the requests until that second."""
        settings, rng = self.settings, Random(f"traffic:{self.seed}")
        prefixes = self.prefixes
        weights = [1.0 / (rank + 1) for rank in range(len(prefixes))]
        # Conversations begin before second 0, so that all turns are as frequent from then on.
        length_s = settings.pause_s + settings.output_tokens * settings.token_s
        start_s = -4 * settings.turns * length_s
        # Turns to come, by time; the number makes the order total.
        due: list[tuple[float, int, _Conversation]] = []
        for number in count():
            if not due or start_s < due[0][0]:
                at_s = start_s
                turns = max(1, round(rng.expovariate(1 / settings.turns)))
                conversation = _Conversation(rng.choices(prefixes, weights)[0], turns)
                start_s += rng.expovariate(settings.requests_per_s / settings.turns)
            else:
                at_s, _, conversation = heapq.heappop(due)
            if at_s >= until_s:
                return
            new = _tokens(rng, settings.turn_tokens)
            output = _tokens(rng, settings.output_tokens)
            known = conversation.prefix
            conversation.prefix = (*known, *self._blocks(new // BLOCK))
            if at_s >= 0:
                yield TraceRequest(at_s, len(known) * BLOCK + new, output, conversation.prefix)
            conversation.turns -= 1
            if conversation.turns:
                pause_s = output * settings.token_s + rng.expovariate(1 / settings.pause_s)
                heapq.heappush(due, (at_s + pause_s, number, conversation))

    def _blocks(self, number: int) -> tuple[int, ...]:
        return tuple(next(self._ids) for _ in range(number))


def _tokens(rng: Random, mean: float, sigma: float = 0.8) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
