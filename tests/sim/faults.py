"""Faults, drawn from a seed (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from random import Random
from typing import TypeVar

T = TypeVar("T")


class FaultKind(StrEnum):
    """The kinds of faults. Attach is the token plane, session the link from a frontend to a router,
    sync the link between two routers.

    Handoffs are the links between engines; feeds are those from workers over indexers to routers. A
    drain is a rollout: an orderly end, and a successor. From PREFILL_KILL on, a fault of a role is
    injected during a handoff, if one starts soon.
    """

    ATTACH_CUT = auto()
    ATTACH_HOLD = auto()
    SESSION_CUT = auto()
    SESSION_HOLD = auto()
    WORKER_KILL = auto()
    WORKER_STOP = auto()
    WORKER_FREEZE = auto()
    WORKER_BREAK = auto()
    WORKER_DRAIN = auto()
    ROUTER_KILL = auto()
    ROUTER_STOP = auto()
    FRONTEND_STALL = auto()
    FRONTEND_KILL = auto()
    FRONTEND_DRAIN = auto()
    ROUTER_DRAIN = auto()
    ROUTERS_KILL = auto()
    LINKS_SLOW = auto()
    SYNC_CUT = auto()
    SYNC_HOLD = auto()
    SYNC_GARBLED = auto()
    REGISTRY_OLD = auto()
    REGISTRY_LOST = auto()
    REGISTRY_STALE = auto()
    PREFILL_KILL = auto()
    PREFILL_HANG = auto()
    DECODE_KILL = auto()
    DECODE_HANG = auto()
    PAIR_KILL = auto()
    HANDOFF_CUT = auto()
    HANDOFF_HOLD = auto()
    HANDOFF_REFUSED = auto()
    INDEXER_KILL = auto()
    INDEXER_STOP = auto()
    INDEXER_DRAIN = auto()
    INDEXERS_KILL = auto()
    FEED_CUT = auto()
    FEED_HOLD = auto()
    EVENTS_GARBLED = auto()
    EVENTS_LOST = auto()
    CACHE_RESET = auto()
    REGISTRY_FLAP = auto()
    SUBSCRIBER_SLOW = auto()
    WORKERS_GONE = auto()
    WORKER_FAIL = auto()


# The kinds that profiles draw from; `features.py` draws the others apart.
PROFILE_FAULTS = tuple(kind for kind in FaultKind if kind is not FaultKind.WORKER_FAIL)
LINK_FAULTS = (
    FaultKind.ATTACH_CUT,
    FaultKind.ATTACH_HOLD,
    FaultKind.SESSION_CUT,
    FaultKind.SESSION_HOLD,
    FaultKind.FRONTEND_STALL,
    FaultKind.LINKS_SLOW,
)
WORKER_FAULTS = (
    FaultKind.WORKER_KILL,
    FaultKind.WORKER_STOP,
    FaultKind.WORKER_FREEZE,
    FaultKind.WORKER_BREAK,
    FaultKind.WORKER_DRAIN,
)
CONTROL_FAULTS = (
    FaultKind.ROUTER_KILL,
    FaultKind.ROUTER_STOP,
    FaultKind.REGISTRY_LOST,
    FaultKind.REGISTRY_STALE,
    FaultKind.SESSION_CUT,
    FaultKind.FRONTEND_KILL,
    FaultKind.FRONTEND_DRAIN,
    FaultKind.ROUTER_DRAIN,
    FaultKind.ROUTERS_KILL,
    FaultKind.REGISTRY_OLD,
    FaultKind.SYNC_CUT,
    FaultKind.SYNC_HOLD,
    FaultKind.SYNC_GARBLED,
)
# The faults of a mesh without a KV plane.
ALL_FAULTS = tuple(FaultKind)[: tuple(FaultKind).index(FaultKind.PREFILL_KILL)]
PROFILES: tuple[tuple[FaultKind, ...], ...] = (
    (),
    LINK_FAULTS,
    WORKER_FAULTS,
    CONTROL_FAULTS,
    ALL_FAULTS,
    ALL_FAULTS,
)
HANDOFF_FAULTS = (
    FaultKind.PREFILL_KILL,
    FaultKind.PREFILL_HANG,
    FaultKind.DECODE_KILL,
    FaultKind.DECODE_HANG,
    FaultKind.PAIR_KILL,
    FaultKind.HANDOFF_CUT,
    FaultKind.HANDOFF_HOLD,
    FaultKind.HANDOFF_REFUSED,
)
INDEX_FAULTS = (
    FaultKind.INDEXER_KILL,
    FaultKind.INDEXER_STOP,
    FaultKind.INDEXER_DRAIN,
    FaultKind.INDEXERS_KILL,
    FaultKind.FEED_CUT,
    FaultKind.FEED_HOLD,
    FaultKind.EVENTS_GARBLED,
    FaultKind.EVENTS_LOST,
    FaultKind.CACHE_RESET,
)
FLAPS = (
    FaultKind.REGISTRY_FLAP,
    FaultKind.REGISTRY_LOST,
    FaultKind.REGISTRY_STALE,
    FaultKind.REGISTRY_OLD,
)
FAILOVERS = (
    FaultKind.ROUTER_KILL,
    FaultKind.ROUTER_STOP,
    FaultKind.ROUTER_DRAIN,
    FaultKind.ROUTERS_KILL,
    FaultKind.INDEXER_KILL,
    FaultKind.INDEXER_STOP,
    FaultKind.INDEXER_DRAIN,
    FaultKind.INDEXERS_KILL,
    FaultKind.SESSION_CUT,
    FaultKind.LINKS_SLOW,
    FaultKind.SYNC_CUT,
    FaultKind.SYNC_HOLD,
    FaultKind.SYNC_GARBLED,
)
# For meshes with an index and separate prefill and decode workers.
DISAGGREGATED_PROFILES: tuple[tuple[FaultKind, ...], ...] = (
    (),
    HANDOFF_FAULTS,
    INDEX_FAULTS,
    (*FLAPS, FaultKind.INDEXER_KILL, FaultKind.WORKER_KILL),
    FAILOVERS,
    (*HANDOFF_FAULTS, *INDEX_FAULTS, *FLAPS),
    PROFILE_FAULTS,
)
DISAGGREGATED_STORMS: tuple[tuple[FaultKind, ...], ...] = (
    HANDOFF_FAULTS,
    (*INDEX_FAULTS, *FLAPS, *WORKER_FAULTS),
    FAILOVERS,
    PROFILE_FAULTS,
)
# Faults that affect neither routers nor the messages that they receive from each other and from the
# registry.
ROUTER_SAFE_FAULTS = frozenset(
    {*WORKER_FAULTS, *HANDOFF_FAULTS, *INDEX_FAULTS, FaultKind.ATTACH_CUT, FaultKind.ATTACH_HOLD}
)
# Faults that may be injected very often.
STORMS: tuple[tuple[FaultKind, ...], ...] = (
    LINK_FAULTS,
    ALL_FAULTS,
    (FaultKind.ATTACH_CUT, FaultKind.FRONTEND_STALL, FaultKind.WORKER_DRAIN),
    (*CONTROL_FAULTS, FaultKind.SESSION_HOLD, FaultKind.FRONTEND_STALL),
)

# If no end of stream arrives, a side of a broken link notices the loss by the pings of the
# transport.
KEEPALIVE_S = 15.0
# In most meshes a faster mechanism notices it.
FAST_DETECTION_S = 3.0
FAULT_MAX_S = 8.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Times are virtual seconds.

    target_draw, second_draw: 0..1, select among the targets that exist when the fault is injected.
    duration_s: how long it lasts, or until the restart. near_s, far_s: when the two sides of a
    broken link notice it. notice_s: when the registry does.
    """

    at: float
    kind: FaultKind
    target_draw: float
    second_draw: float
    duration_s: float
    near_s: float
    far_s: float
    notice_s: float


def draw_faults(
    rng: Random, kinds: Sequence[FaultKind], count: int, until: float
) -> tuple[Fault, ...]:
    """`count` faults of these kinds before `until`, in order of time."""
    if not kinds:
        return ()
    faults = [_draw(rng, kinds, until) for _ in range(count)]
    return tuple(sorted(faults, key=lambda one: one.at))


def with_fast_detection(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """The same faults, but each side of a broken link notices within FAST_DETECTION_S."""
    return tuple(
        replace(
            one, near_s=min(FAST_DETECTION_S, one.near_s), far_s=min(FAST_DETECTION_S, one.far_s)
        )
        for one in faults
    )


def _draw(rng: Random, kinds: Sequence[FaultKind], until: float) -> Fault:
    return Fault(
        at=rng.uniform(0.2, until),
        kind=kinds[rng.randrange(len(kinds))],
        target_draw=rng.random(),
        second_draw=rng.random(),
        duration_s=_draw_duration(rng),
        near_s=_draw_detection_delay(rng),
        far_s=_draw_detection_delay(rng),
        notice_s=rng.uniform(0.05, 4.0),
    )


def _draw_duration(rng: Random) -> float:
    """Mostly shorter than the heartbeat timeout, sometimes much longer."""
    return rng.choice((rng.uniform(0.0, 0.2), rng.uniform(0.2, 2.5), rng.uniform(2.5, FAULT_MAX_S)))


def _draw_detection_delay(rng: Random) -> float:
    return rng.choice((0.0, rng.uniform(0.0, 0.3), rng.uniform(0.3, 3.5), KEEPALIVE_S))


def select_by_draw(candidates: Sequence[T], target_draw: float) -> T:
    """The candidate that a number of 0..1 selects."""
    return candidates[int(target_draw * len(candidates))]
