"""What a router knows of who holds how much of a prompt (pure).

Three ways to know, by what a rank's worker advertises (`Instance.kv_index`):

- *events*: the engine tells what it stores and evicts; the index is a replica of that;
- *approx*: it reuses prefixes and tells nobody; its cache is guessed from earlier decisions;
- *none*: what it holds says nothing about what it will reuse (a sliding window, recurrent state),
  or it reuses nothing. It is neither matched nor remembered, and load alone speaks for it.

Predictions are guesses too, of short life, about ranks that do publish events: a prompt's blocks
count from its decision on, not from the moment when they are computed. So the siblings of a burst
find each other. Of what the events say and what is predicted, the more counts.

A request that names no blocks is kept out as well: it matches nothing and leaves no trace. That is
how callers keep out what token ids alone do not identify, where the engine's events cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from common.kv.prefix_index import SourceMatch
from common.registry.instances import Instance
from router_svc.core.approx_index import ApproxIndex, ApproxLimits
from router_svc.core.query import Query, block_size_of
from router_svc.core.types import NO_MATCHES, Candidate, Matches, Placement

IndexKind = Literal["none", "approx", "events"]


class IndexStatus(NamedTuple):
    """How far an index can be trusted about one rank.

    state: exact, gapped, stale, degraded (`common/kv/index_feed.py`), approx (guessed), or none:
    nothing is known of it. age_s: seconds since anything was heard about it; None: never.
    """

    state: str = "none"
    reason: str = ""
    age_s: float | None = None


UNKNOWN_STATUS = IndexStatus()
_APPROXIMATE_STATUS = IndexStatus("approx", "guessed from this router's decisions")
_NO_INDEX_STATUS = IndexStatus("none", "this router follows no index")


class IndexStatusProvider(Protocol):
    """Who says how far to trust what is known of a rank."""

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        """How far the answers about a rank can be trusted."""


class Index(IndexStatusProvider, Protocol):
    """Who holds how much of a prompt, as the engines tell."""

    def match(self, query: Query) -> Sequence[SourceMatch]:
        """One row for each rank that counts and holds the first block of the query's prompt."""


class NoIndex:
    """The index of a router that follows none."""

    def match(self, query: Query) -> Sequence[SourceMatch]:
        """See Index."""
        return ()

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        """See Index."""
        return _NO_INDEX_STATUS


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Which ways to know a router uses; made by `derive_index_settings`.

    guesses: for ranks whose cache is guessed, None: for none. predictions: likewise, beside events.
    why: for people, what made the choice.
    """

    kind: IndexKind
    approximate: ApproxLimits | None
    predicted: ApproxLimits | None
    reason: str

    @property
    def follows_events(self) -> bool:
        """Whether KV events are wanted; if not, nobody is to send or keep any for this router."""
        return self.kind == "events"


def derive_index_settings(
    *,
    overlap_score_credit: float,
    uses_overlap_elsewhere: bool = False,
    kv_events: bool,
    limits: ApproxLimits,
    predicted_ttl_s: float,
) -> IndexSettings:
    """The first rule that applies:

    1. credit 0, and nothing else is configured that asks for overlap (has_other_use): none. Caches
       count nowhere then, in charges neither: prompts are charged whole.
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
        predicted = ApproxLimits(
            ttl_s=predicted_ttl_s,
            blocks_max=limits.blocks_max,
            prune_target_ratio=limits.prune_target_ratio,
        )
    return IndexSettings("events", limits, predicted, "kv_events is on")


EVENT_INDEX_SETTINGS = derive_index_settings(
    overlap_score_credit=1.0, kv_events=True, limits=ApproxLimits(), predicted_ttl_s=0.0
)


class Overlaps:
    """All that one router knows, by its choice. index: what follows the events."""

    def __init__(self, index: Index, choice: IndexSettings = EVENT_INDEX_SETTINGS) -> None:
        self.choice = choice
        self.approximate = None if choice.approximate is None else ApproxIndex(choice.approximate)
        self.predicted = None if choice.predicted is None else ApproxIndex(choice.predicted)
        self._index = index
        # Of ranks whose caches are not known, where the index has no say.
        follows_events = choice.kind == "events"
        self._unused_status = (
            None if follows_events else IndexStatus("none", f"no index: {choice.reason}")
        )
        self._event_workers: frozenset[int] = frozenset()
        self._approximate_workers: frozenset[int] = frozenset()

    def update_workers(self, workers: Iterable[Instance]) -> None:
        """These are the workers now, with what they advertise."""
        kinds = {worker.id: self._index_kind(worker) for worker in workers}
        self._event_workers = frozenset(w for w, kind in kinds.items() if kind == "events")
        self._approximate_workers = frozenset(w for w, kind in kinds.items() if kind == "approx")

    def forget(self, worker_id: int) -> None:
        """A worker left."""
        for index in (self.approximate, self.predicted):
            if index is not None:
                index.forget(worker_id)

    def matches(self, query: Query) -> Matches:
        """What ranks hold of the prompt; those absent hold nothing."""
        if not query.prefix_hashes:
            return NO_MATCHES
        found: dict[tuple[int, int], SourceMatch] = {}
        event_workers, approximate_workers = self._event_workers, self._approximate_workers
        if event_workers:
            rows = self._index.match(query)
            found = {row[0]: row for row in rows if row[0].worker_id in event_workers}
            if self.predicted is not None:
                for row in self.predicted.match(query):
                    if row.source.worker_id in event_workers:
                        found[row.source] = _larger_match(found.get(row.source), row)
        if approximate_workers and self.approximate is not None:
            for row in self.approximate.match(query):
                if row.source.worker_id in approximate_workers:
                    found[row.source] = row
        return found

    def record_placement(self, query: Query, placement: Placement, now: float) -> None:
        """The prompt was sent there to be computed, and is booked."""
        if placement.worker_id in self._event_workers:
            if self.predicted is not None:
                self.predicted.touch(query, placement, now)
        elif placement.worker_id in self._approximate_workers and self.approximate is not None:
            self.approximate.touch(query, placement, now)

    def is_approximate(self, placement: Placement) -> bool:
        """Whether what is known of a rank is guessed from decisions."""
        return placement.worker_id in self._approximate_workers

    def expire(self, now: float, blocks: int) -> bool:
        """Time has passed: drops up to `blocks` old guesses; whether there are more."""
        has_more = False
        for index in (self.approximate, self.predicted):
            has_more |= index is not None and index.expire(now, blocks)
        return has_more

    def index_status(self, placement: Placement, now: float) -> IndexStatus:
        """See Standings."""
        if placement.worker_id in self._approximate_workers:
            return _APPROXIMATE_STATUS
        return self._unused_status or self._index.index_status(placement, now)

    def unused_reason(self, query: Query, candidates: Sequence[Candidate]) -> str:
        """Why caches did not count for a request among these; empty if they did."""
        if self.choice.kind == "none":
            return self.choice.reason
        block_size = block_size_of(query, candidates[0].instance.block_size if candidates else None)
        if not query.prefix_hashes:
            is_short = query.total_tokens < block_size
            return "" if is_short else "the request names no blocks"
        event_workers, approximate_workers = self._event_workers, self._approximate_workers
        ids = (candidate.placement.worker_id for candidate in candidates)
        if any(worker_id in event_workers or worker_id in approximate_workers for worker_id in ids):
            return ""
        return "no candidate's cache can be known"

    def _index_kind(self, worker: Instance) -> IndexKind:
        """How a worker's cache is known here."""
        if self.choice.kind == "approx" and worker.kv_index == "events":
            return "approx"
        return "none" if self.choice.kind == "none" else worker.kv_index


def _larger_match(known: SourceMatch | None, predicted: SourceMatch) -> SourceMatch:
    """The larger of the two on each tier."""
    if known is None:
        return predicted
    return SourceMatch(known.source, *map(max, known[1:], predicted[1:]))
