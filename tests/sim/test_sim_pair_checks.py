"""The rules about pairs and the index can fail: a rule reports a part with a deliberate mistake."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from common.errors import MeshError, Overloaded
from common.kv.events import EventBatch
from common.kv.index_feed import IndexFeed
from common.request.placement import Decision, Query
from common.request.preprocessed import StopConditions
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.request.placement_request import PlacementCallback, PlacementKey, PlacementRequest
from frontend_svc.workers.client import Submission
from router_svc.core.candidate import Matches
from router_svc.core.decision import DecisionRecord
from tests.sim.clients import ClientSpec, draw_conversations
from tests.sim.faults import Fault, FaultKind
from tests.sim.fleet import ObservedEngineClient, ObservedRouter, ObservedRouterClient, Parts
from tests.sim.scenario import EOS, EOS_ONE_IN, SHORT_RECOVERY_MAX_S, TOKEN_IDS, Scenario
from tests.sim.world import run_scenario
from worker_svc.engines.contract import GenerateContext, LLMEngineOutput, PreprocessedRequest
from worker_svc.engines.sim.block_manager import BlockTable
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.token_oracle import TokenOracle
from worker_svc.engines.sim.transfer import Action, DecodeMachine, ReleaseBlocks
from worker_svc.engines.sim.transfer import HandoffOutcome as RoomOutcome
from worker_svc.kv_events.external_events import ExternalEvent, PagesRemoved
from worker_svc.kv_events.publisher import Publisher

pytestmark = pytest.mark.slow


def fault(kind: FaultKind, at: float, *, duration_s: float = 1.0) -> Fault:
    return Fault(at, kind, 0.0, 0.0, duration_s, near_s=0.1, far_s=0.1, notice_s=0.5)


NO_FAULTS = Scenario(
    seed=7,
    workers=0,
    prefills=("bootstrap", "completed"),
    decodes=2,
    indexers=1,
    selector="kv",
    gb_per_s=0.2,
    chunk_pages=2,
    protect_first=False,
    recovery_max_s=SHORT_RECOVERY_MAX_S,
    client_specs=draw_conversations(
        Random(7), 30, 6.0, TokenOracle(TOKEN_IDS, EOS, eos_one_in=EOS_ONE_IN)
    ),
)
DEATHS = replace(
    NO_FAULTS,
    prefills=("bootstrap",),
    prefill_token_s=4e-3,
    batched_tokens=300,
    faults=tuple(fault(FaultKind.DECODE_KILL, 1.0 + n) for n in range(4)),
)
# Batches of events are garbled while caches are too small for all conversations.
GARBLED = replace(
    NO_FAULTS, blocks=64, faults=(fault(FaultKind.EVENTS_GARBLED, 0.2, duration_s=5.0),)
)
# One remote decode worker, with clients that leave during transfers of single pages.
LEAVING = replace(
    NO_FAULTS,
    prefills=("bootstrap",),
    decodes=1,
    delay_s=0.3,
    gb_per_s=0.2,
    chunk_pages=1,
    step_s=0.01,
    client_specs=tuple(
        ClientSpec(
            n,
            0.05 * n,
            tuple(Random(n).choices(TOKEN_IDS, k=150)),
            StopConditions(max_tokens=300, ignore_eos=True),
            disconnect_after_s=0.8 + 0.05 * (n % 13) if n % 2 else None,
        )
        for n in range(60)
    ),
)


@pytest.mark.parametrize("scenario", [NO_FAULTS, DEATHS, GARBLED, LEAVING])
def test_the_real_parts_break_no_rule_about_pairs_in_these_scenarios(scenario: Scenario) -> None:
    report = run_scenario(scenario)
    assert not report.violations, str(report)


class SendsDecodeToPrefill(ObservedRouterClient):
    """Sends the decode leg to the prefill worker."""

    def place(
        self, key: PlacementKey, request: PlacementRequest, callback: PlacementCallback
    ) -> None:
        def on_placed(placed: Decision | MeshError) -> None:
            if isinstance(placed, Decision) and placed.prefill is not None:
                placed = replace(
                    placed, worker=placed.worker._replace(worker_id=placed.prefill.worker_id)
                )
            callback(placed)

        super().place(key, request, on_placed)


class _IgnoresAbort(Submission):
    def abort(self, reason: str) -> None:
        pass


class NeverAborts(ObservedEngineClient):
    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submission:
        submission = super().submit(worker_id, address, leg_request, sink)
        return _IgnoresAbort(submission.connection, submission.slot)


class ReleasesEarlyRoom(DecodeMachine):
    """Releases its pages when its leg leaves, even during a transfer to them."""

    def _end_or_abort(self, now: float, outcome: RoomOutcome) -> list[Action]:
        actions = super()._end_or_abort(now, outcome)
        return [*actions, ReleaseBlocks()] if self.is_aborting else actions


class ReleasesPagesTooEarly(SimEngine):
    decode_machine = ReleasesEarlyRoom


class NeverUnpins(SimEngine):
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext, *, is_embedding: bool = False
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.blocks.pin(BlockTable())
        async for output in super().generate(request, ctx, is_embedding=is_embedding):
            yield output


class NeverClosesRooms(SimEngine):
    """Never ends a room."""

    async def _start_rooms(self, *args: Any) -> Any:
        rooms = await super()._start_rooms(*args)
        rooms._finish = lambda room: None  # type: ignore[method-assign]
        return rooms


class ForgetsRemovals(Publisher):
    def take(self, events: Iterable[ExternalEvent]) -> None:
        super().take(event for event in events if not isinstance(event, PagesRemoved))


class IgnoresGaps(IndexFeed):
    """Takes any batch for the next one."""

    def apply(self, batch: EventBatch, now: float) -> Iterator[None]:
        entry = self._require_entry(batch.source)
        entry.sequence, entry.head_sequence = batch.sequence - 1, batch.sequence
        yield from super().apply(batch, now)


class OverestimatesMatches(ObservedRouter):
    def match(self, query: Query) -> Matches:
        rows = super().match(query).items()
        return {key: row._replace(disk_blocks=row.disk_blocks + 1) for key, row in rows}


class NeverFreesPrefillLoad(ObservedRouter):
    def _place(self, *args: Any) -> DecisionRecord:
        record = super()._place(*args)
        if (prefill := record.decision.prefill) is not None:
            self.load_tracker.ranks._rank(prefill).booked.add(1, 0, 0)
        return record


class RejectsWithoutFaults(ObservedEngineClient):
    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submission:
        if leg_request.request_id.startswith("r1000000") and leg_request.attempt == 0:
            sink.rejected(Overloaded(1.0))
        return super().submit(worker_id, address, leg_request, sink)


@pytest.mark.parametrize(
    ("rule", "scenario", "parts"),
    [
        ("role", NO_FAULTS, Parts(router_port=SendsDecodeToPrefill)),
        ("pair", DEATHS, Parts(engines=NeverAborts)),
        ("pages", LEAVING, Parts(engine=ReleasesPagesTooEarly)),
        ("rest", NO_FAULTS, Parts(engine=NeverUnpins)),
        ("rest", NO_FAULTS, Parts(engine=NeverClosesRooms)),
        ("index", GARBLED, Parts(publisher=ForgetsRemovals)),
        ("index", GARBLED, Parts(feed=IgnoresGaps)),
        ("predicted", NO_FAULTS, Parts(router=OverestimatesMatches)),
        ("rest", NO_FAULTS, Parts(router=NeverFreesPrefillLoad)),
        ("recovered", NO_FAULTS, Parts(engines=RejectsWithoutFaults)),
    ],
    ids=lambda value: _mistake(value) if isinstance(value, Parts) else None,
)
def test_a_mistake_about_pairs_is_caught_by_its_rule(
    rule: str, scenario: Scenario, parts: Parts
) -> None:
    assert rule in {violation.rule for violation in run_scenario(scenario, parts).violations}


def _mistake(parts: Parts) -> str | None:
    real = Parts()
    names = ("router_port", "engines", "engine", "router", "publisher", "feed")
    changed: Sequence[type[Any]] = [getattr(parts, name) for name in names]
    return next((one.__name__ for one in changed if one not in _all(real)), None)


def _all(parts: Parts) -> list[type[Any]]:
    return [
        parts.router_port,
        parts.engines,
        parts.engine,
        parts.router,
        parts.publisher,
        parts.feed,
    ]
