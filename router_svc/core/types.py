"""Plain values that the parts of the router core exchange (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance

# The part of a request that a worker serves: all of it, or one leg of a pair.
Leg = Literal["whole", "prefill", "decode"]


class Placement(NamedTuple):
    """A worker and one of its data-parallel ranks. A tuple, because every path hashes it."""

    worker_id: int
    dp_rank: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank that could serve a request, with the instance that its worker advertises."""

    placement: Placement
    instance: Instance


class RankCapacity(NamedTuple):
    """A rank slot: one rank and the leg that it serves."""

    placement: Placement
    leg: Leg


@dataclass(frozen=True, slots=True)
class AffinityConstraint:
    """The rank that a session requires (is_hard) or prefers for one leg."""

    placement: Placement
    is_hard: bool


class BookingKey(NamedTuple):
    """Identifies a booking at every router: frontend incarnation, request id, attempt."""

    frontend_id: int
    request_id: str
    attempt: int


class SessionName(NamedTuple):
    """A client session of one model or adapter. Adapters share no KV and may run elsewhere."""

    model: str
    session_id: str
    lora_name: str = ""


class SessionHello(NamedTuple):
    """A frontend session. generation: number among those of the frontend, from 1; 0: unknown."""

    frontend_id: int
    generation: int


class LoadTotals(NamedTuple):
    """Prompt tokens to compute, KV blocks held, requests running or waiting.

    A tuple, because every decision reads one per rank.
    """

    prefill_tokens: int = 0
    decode_blocks: int = 0
    requests: int = 0


# By worker id and rank: a Placement and a Source are equal tuples.
Matches = Mapping[tuple[int, int], SourceMatch]
NO_MATCHES: Matches = MappingProxyType({})
