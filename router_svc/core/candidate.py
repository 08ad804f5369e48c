"""A rank that could serve a request: its leg, its load, and what it holds of the prompt (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.placement import Placement

# The part of a request that a worker serves: all of it, or one leg of a pair.
Leg = Literal["whole", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rank that could serve a request, with the instance that its worker advertises."""

    placement: Placement
    instance: Instance


Candidates = Sequence[Candidate]


@dataclass(frozen=True, slots=True)
class AffinityConstraint:
    """The rank that a session requires (is_hard) or prefers for one leg."""

    placement: Placement
    is_hard: bool


class LoadTotals(NamedTuple):
    """Prompt tokens to compute, KV blocks held, requests. A tuple: decisions read one per rank."""

    prefill_tokens: int = 0
    decode_blocks: int = 0
    requests: int = 0


# By worker id and rank: a Placement and a Source are equal tuples.
Matches = Mapping[tuple[int, int], SourceMatch]
NO_MATCHES: Matches = MappingProxyType({})
