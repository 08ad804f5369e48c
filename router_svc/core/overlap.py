"""What a router asks of its index of KV blocks (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from common.prefix_index import Matched
from router_svc.core.fleet import Placement
from router_svc.core.query import Query


class Standing(NamedTuple):
    """How far an index can be trusted about one rank.

    state: exact, gapped, stale, degraded (`common/index_feed.py`), or none: nothing is known of it.
    age_s: seconds since anything was heard about it; None: never.
    """

    state: str = "none"
    reason: str = ""
    age_s: float | None = None


UNKNOWN = Standing()


class Index(Protocol):
    """Who holds how much of a prompt."""

    def match(self, query: Query) -> Sequence[Matched]:
        """One row for each rank that counts and holds the first block of the query's prompt."""

    def standing(self, placement: Placement, now: float) -> Standing:
        """How far the answers about a rank can be trusted."""


class NoIndex:
    """The index of a router that has none."""

    def match(self, query: Query) -> Sequence[Matched]:
        """See Index."""
        return ()

    def standing(self, placement: Placement, now: float) -> Standing:
        """See Index."""
        return Standing("none", "this router follows no index")
