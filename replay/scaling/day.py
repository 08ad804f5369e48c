"""The requests of one day, made from a trace of an hour (pure).

The trace repeats, from a place that the seed draws, and is thinned to the rate of the moment:

    rate(t) = curve(t) * burst(t) / BURST_HIGH      as a share of the trace's

The curve is NIGHT_SHARE until six, rises until ten and falls from seven in the evening. Bursts
begin at times, last for times and multiply by factors that the seed draws. What remains keeps the
order and the correlation of the trace's arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from replay.trace import TraceRequest

DAY_S = 86_400.0
NIGHT_SHARE = 0.12
BURSTS = 10
BURST_LOW, BURST_HIGH = 1.4, 2.2
BURST_SHORTEST_S, BURST_LONGEST_S = 180.0, 600.0


@dataclass(frozen=True, slots=True)
class Burst:
    """A time with more requests."""

    start_s: float
    end_s: float
    factor: float


def curve(at_s: float) -> float:
    """Returns the share of the day's highest rate at a time of day: NIGHT_SHARE to 1."""
    hour = at_s / 3600.0 % 24
    if hour < 6 or hour >= 23:
        height = 0.0
    elif hour < 10:
        height = _rise((hour - 6) / 4)
    elif hour < 19:
        height = 1.0 - 0.15 * math.sin(math.pi * (hour - 10) / 9)
    else:
        height = _rise((23 - hour) / 4)
    return NIGHT_SHARE + (1 - NIGHT_SHARE) * height


def draw_bursts(rng: Random) -> list[Burst]:
    """Returns the bursts of a day, in order. They may overlap; the last one counts."""
    bursts = []
    for _ in range(BURSTS):
        start_s = rng.uniform(0.0, DAY_S)
        length_s = rng.uniform(BURST_SHORTEST_S, BURST_LONGEST_S)
        bursts.append(Burst(start_s, start_s + length_s, rng.uniform(BURST_LOW, BURST_HIGH)))
    return sorted(bursts, key=lambda burst: burst.start_s)


def day_of(trace: Sequence[TraceRequest], seed: int) -> Iterator[TraceRequest]:
    """Yields the requests of a day in order of arrival. trace: in order, from second 0."""
    rng = Random(f"day:{seed}")
    bursts = draw_bursts(rng)
    span_s = trace[-1].at_s + trace[-1].at_s / len(trace)
    at, start_s = rng.randrange(len(trace)), 0.0
    offset_s = -trace[at].at_s
    while True:
        request = trace[at]
        start_s = request.at_s + offset_s
        if start_s >= DAY_S:
            return
        share = curve(start_s) * _factor(bursts, start_s) / BURST_HIGH
        if rng.random() < share:
            yield TraceRequest(start_s, request.input_tokens, request.output_tokens)
        at += 1
        if at == len(trace):
            at, offset_s = 0, offset_s + span_s


def _factor(bursts: Sequence[Burst], at_s: float) -> float:
    factor = 1.0
    for burst in bursts:
        if burst.start_s <= at_s < burst.end_s:
            factor = burst.factor
    return factor


def _rise(share: float) -> float:
    """Returns a smooth step from 0 to 1."""
    return (1 - math.cos(math.pi * share)) / 2
