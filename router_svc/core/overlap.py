"""Cache overlap: how much of a prompt each rank holds (pure).

The source depends on what a rank's worker advertises (`Instance.kv_index`):

- *events*: the engine reports stored and evicted blocks; the index is a replica of its cache;
- *approx*: the engine reuses prefixes without reports; *approximate entries* are derived from
  earlier decisions;
- *none*: the engine reuses nothing, or its cached blocks do not show what it will reuse (a sliding
  window, recurrent state). It is neither matched nor remembered; only its load counts.

*Predicted entries* are short-lived approximate entries for ranks that publish events: a prompt's
blocks count from its decision on, so that requests of a burst with one prefix meet on one worker.
The larger of reported and predicted blocks counts. Routers send both kinds of entries to each other
(`replication`). A request without prefix hashes matches nothing
and leaves no entry: its token ids alone do not identify its content.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from common.kv.events import Source
from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from common.request.placement import Placement, Query
from router_svc.core.approx_index import ApproxIndex, ApproxLimits
from router_svc.core.candidate import NO_MATCHES, Candidates, Matches
from router_svc.core.query import block_size_of

IndexKind = Literal["none", "approx", "events"]


class IndexStatus(NamedTuple):
    """How reliable an index is for one rank. state: exact, gapped, stale, degraded
    (`common/kv/index_feed.py`), approx (from decisions), or none: nothing is known. age_s: seconds
    since the last message about it; None: none arrived.
    """

    state: str = "none"
    reason: str = ""
    age_s: float | None = None


UNKNOWN_STATUS = IndexStatus()
_APPROXIMATE_STATUS = IndexStatus("approx", "derived from decisions")


class IndexStatusProvider(Protocol):
    """A source of index states."""

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        """Returns how reliable the matches of a rank are."""


class Index(IndexStatusProvider, Protocol):
    """The prefixes that ranks hold, as the engines report them."""

    def match(self, query: Query) -> Sequence[SourceMatch]:
        """Returns one row for each countable rank that holds the first block of the query's
        prompt."""


class NoIndex:
    """The index of a router without KV events."""

    def match(self, query: Query) -> Sequence[SourceMatch]:
        return ()

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        return IndexStatus("none", "this router has no index")


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """The overlap sources of a router, by `derive_index_settings`. approximate, predicted: limits
    of such entries; None: none. reason: text for operators.
    """

    kind: IndexKind
    approximate: ApproxLimits | None
    predicted: ApproxLimits | None
    reason: str

    @property
    def follows_events(self) -> bool:
        """Whether the router uses KV events; if not, indexers need not send any."""
        return self.kind == "events"


def derive_index_settings(
    *,
    overlap_score_credit: float,
    uses_overlap_elsewhere: bool = False,
    kv_events: bool,
    limits: ApproxLimits,
    predicted_ttl_s: float,
) -> IndexSettings:
    """Returns the first rule that applies:

    1. credit 0, and no other setting uses overlap (uses_overlap_elsewhere): none. Caches count
       nowhere then, also not in bookings: all of the prompt counts as prefill.
    2. no events: approx, for all ranks that reuse prefixes, with `limits`.
    3. events; with approx (`limits`) for the ranks that advertise it, and predictions that count
       for predicted_ttl_s, unless that is 0.
    """
    if overlap_score_credit == 0 and not uses_overlap_elsewhere:
        return IndexSettings("none", None, None, "overlap_score_credit is 0")
    if not kv_events:
        return IndexSettings("approx", limits, None, "kv_events is off")
    predicted = None
    if predicted_ttl_s > 0:
        predicted = replace(limits, ttl_s=predicted_ttl_s)
    return IndexSettings("events", limits, predicted, "kv_events is on")


EVENT_INDEX_SETTINGS = derive_index_settings(
    overlap_score_credit=1.0, kv_events=True, limits=ApproxLimits(), predicted_ttl_s=0.0
)


class Overlaps:
    """All overlap sources of one router, by its settings. index: the one that follows events.
    ranks_max: most ranks with approximate or predicted entries of one prompt; None: any number."""

    def __init__(
        self,
        index: Index,
        settings: IndexSettings = EVENT_INDEX_SETTINGS,
        ranks_max: int | None = None,
    ) -> None:
        self.settings = settings
        self._ranks_max = ranks_max
        approximate, predicted = settings.approximate, settings.predicted
        self.approximate = None if approximate is None else ApproxIndex(approximate)
        self.predicted = None if predicted is None else ApproxIndex(predicted)
        self._index = index
        # The status of all other ranks if the index is not used.
        unused_status = IndexStatus("none", f"no index: {settings.reason}")
        self._unused_status = None if settings.follows_events else unused_status
        self._event_workers: frozenset[int] = frozenset()
        self._approximate_workers: frozenset[int] = frozenset()

    def update_workers(self, workers: Iterable[Instance]) -> None:
        """Applies what the present workers advertise."""
        kinds = {worker.id: self._index_kind(worker) for worker in workers}
        self._event_workers = frozenset(w for w, kind in kinds.items() if kind == "events")
        self._approximate_workers = frozenset(w for w, kind in kinds.items() if kind == "approx")

    def forget(self, worker_id: int) -> None:
        for index in (self.approximate, self.predicted):
            if index is not None:
                index.forget(worker_id)

    def matches(self, query: Query) -> Matches:
        """Returns what ranks hold of the prompt; absent ones hold nothing."""
        if not query.prefix_hashes:
            return NO_MATCHES
        found: dict[tuple[int, int], SourceMatch] = {}
        event_workers, approximate_workers = self._event_workers, self._approximate_workers
        if event_workers:
            rows = self._index.match(query)
            found = {row[0]: row for row in rows if row[0][0] in event_workers}
            if self.predicted is not None:
                for placement, depth in self.predicted.depths(query, self._ranks_max):
                    known = found.get(placement)
                    if (known is None or known[1] < depth) and placement[0] in event_workers:
                        found[placement] = raised_match(known, placement, depth)
        if approximate_workers and self.approximate is not None:
            for placement, depth in self.approximate.depths(query, self._ranks_max):
                if placement[0] in approximate_workers:
                    found[placement] = raised_match(None, placement, depth)
        return found

    def record_placement(self, query: Query, placement: Placement, now: float) -> bool:
        """Enters a booked prompt that the rank will compute; False if that makes no entry."""
        index = None
        if placement.worker_id in self._event_workers:
            index = self.predicted
        elif placement.worker_id in self._approximate_workers:
            index = self.approximate
        if index is None or not query.prefix_hashes:
            return False
        index.touch(query, placement, now)
        return True

    def is_approximate(self, placement: Placement) -> bool:
        """Returns whether a rank's entries are derived from decisions."""
        return placement.worker_id in self._approximate_workers

    def expire(self, now: float, blocks: int) -> bool:
        """Drops up to `blocks` expired entries per index; returns whether there are more."""
        has_more = False
        for index in (self.approximate, self.predicted):
            has_more |= index is not None and index.expire(now, blocks)
        return has_more

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        if placement.worker_id in self._approximate_workers:
            return _APPROXIMATE_STATUS
        return self._unused_status or self._index.index_status(placement, now)

    def unused_reason(self, query: Query, candidates: Candidates) -> str:
        """Returns why caches did not count for a request with these candidates; empty if they
        did."""
        if self.settings.kind == "none":
            return self.settings.reason
        block_size = block_size_of(query, candidates[0].instance.block_size if candidates else None)
        if not query.prefix_hashes:
            is_short = query.total_tokens < block_size
            return "" if is_short else "the request has no prefix hashes"
        event_workers, approximate_workers = self._event_workers, self._approximate_workers
        ids = (candidate.placement.worker_id for candidate in candidates)
        if any(worker_id in event_workers or worker_id in approximate_workers for worker_id in ids):
            return ""
        return "no candidate has a cache index"

    def _index_kind(self, worker: Instance) -> IndexKind:
        """Returns the overlap source that this router uses for a worker."""
        if self.settings.kind == "approx" and worker.kv_index == "events":
            return "approx"
        return "none" if self.settings.kind == "none" else worker.kv_index


def raised_match(known: SourceMatch | None, placement: Placement, depth: int) -> SourceMatch:
    """Returns the match of a rank with at least `depth` blocks on each tier."""
    if known is None:
        return SourceMatch(Source(*placement), depth, depth, depth)
    return SourceMatch(known.source, depth, max(known.host_blocks, depth), max(known[3], depth))
