"""Synthetic workloads. A name, a number of requests and a seed determine the requests (pure).

Arrivals are a Poisson process of `rate` requests a second, except in bursts. Blocks have 512
tokens; lengths are log-normal around the named mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import MappingProxyType

from replay.trace import TraceRequest

BLOCK = 512


@dataclass(slots=True)
class _Draws:
    """Random draws, and block ids that no other prompt has."""

    rng: Random
    ids: Iterator[int] = field(default_factory=count)

    def blocks(self, number: int) -> tuple[int, ...]:
        return tuple(next(self.ids) for _ in range(number))

    def tokens(self, mean: float, sigma: float = 0.8) -> int:
        """Returns a number from 1 on; log-normal with the given mean."""
        return max(1, round(self.rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))

    def arrivals(self, rate: float, number: int) -> list[float]:
        at_s, times = 0.0, []
        for _ in range(number):
            at_s += self.rng.expovariate(rate)
            times.append(at_s)
        return times

    def request(
        self,
        at_s: float,
        prefix: tuple[int, ...],
        new_tokens: int,
        output_tokens: int,
        session: int = 0,
    ) -> TraceRequest:
        """Returns a prompt of a known prefix and new tokens of its own."""
        ids = prefix + self.blocks(new_tokens // BLOCK)
        tokens = len(prefix) * BLOCK + max(1, new_tokens)
        return TraceRequest(at_s, tokens, output_tokens, ids, session)


def no_reuse(draws: _Draws, number: int, rate: float = 9.4) -> list[TraceRequest]:
    """Returns prompts of 4,000 tokens that share nothing."""
    return [
        draws.request(at_s, (), draws.tokens(4000), draws.tokens(200))
        for at_s in draws.arrivals(rate, number)
    ]


def zipf_prefixes(draws: _Draws, number: int, rate: float = 60.0) -> list[TraceRequest]:
    """Returns short questions after one of 16 prefixes of 16 blocks, with Zipf popularity."""
    prefixes = [draws.blocks(16) for _ in range(16)]
    weights = [1.0 / (rank + 1) for rank in range(16)]
    return [
        draws.request(
            at_s, draws.rng.choices(prefixes, weights)[0], draws.tokens(600), draws.tokens(60)
        )
        for at_s in draws.arrivals(rate, number)
    ]


def sessions(
    draws: _Draws,
    number: int,
    rate: float = 14.0,
    turns: int = 12,
    turn_tokens: float = 2500,
    output_tokens: float = 150,
    pause_s: float = 20.0,
) -> list[TraceRequest]:
    """Returns conversations of `turns` turns on average: each prompt repeats the previous ones."""
    requests: list[TraceRequest] = []
    starts = draws.arrivals(rate / turns, max(1, number // turns))
    for session, start_s in enumerate(starts, 1):
        prefix, at_s = draws.blocks(4), start_s
        for _ in range(max(1, round(draws.rng.expovariate(1 / turns)))):
            new, output = draws.tokens(turn_tokens), draws.tokens(output_tokens)
            request = draws.request(at_s, prefix, new, output, session)
            requests.append(request)
            prefix = request.hash_ids
            at_s += output * 0.012 + draws.rng.expovariate(1 / pause_s)
    return sorted(requests, key=lambda request: request.at_s)[:number]


def tool_agents(draws: _Draws, number: int, rate: float = 21.0) -> list[TraceRequest]:
    """Returns requests of agents with many short turns in quick succession and long prompts."""
    return sessions(draws, number, rate, 24, 1200, 40, 2.0)


def bursts(draws: _Draws, number: int, rate: float = 11.0) -> list[TraceRequest]:
    """Returns batches of 16 prompts within 0.2 s that share 12 blocks; each batch is new."""
    requests: list[TraceRequest] = []
    for at_s in draws.arrivals(rate / 16, max(1, number // 16)):
        prefix = draws.blocks(12)
        requests += [
            draws.request(
                at_s + draws.rng.uniform(0, 0.2), prefix, draws.tokens(3000), draws.tokens(150)
            )
            for _ in range(16)
        ]
    return sorted(requests, key=lambda request: request.at_s)


GENERATORS: Mapping[str, Callable[[_Draws, int], list[TraceRequest]]] = MappingProxyType(
    {
        "no_reuse": no_reuse,
        "zipf_prefixes": zipf_prefixes,
        "sessions": sessions,
        "tool_agents": tool_agents,
        "bursts": bursts,
    }
)


def generate(name: str, number: int, seed: int) -> list[TraceRequest]:
    """Returns about `number` requests of a workload. Raises KeyError for an unknown name."""
    return GENERATORS[name](_Draws(Random(f"{name}:{seed}")), number)
