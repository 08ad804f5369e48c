"""Every rule of the checkers can fail: the rule reports a part with a deliberate mistake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from common.errors import MeshError, Overloaded
from common.registry.instances import Snapshot, SnapshotDiff
from common.request.preprocessed import CompletionUsage, FinishReason, TokenLogprob
from common.request.token_stream import LegRequest, LegSink, Terminal
from frontend_svc.members import Members
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.placement_request import PlacementKey, PlacementRequest
from frontend_svc.request.ports import ResponseSink
from frontend_svc.request.types import RequestOutcome, RequestPlan
from frontend_svc.workers.client import Submission
from router_svc.core.booking import BookingKey
from tests.sim.checks import Checks
from tests.sim.clients import draw_client_specs
from tests.sim.faults import Fault, FaultKind
from tests.sim.fleet import (
    ObservedEngineClient,
    ObservedRouter,
    ObservedRouterClient,
    ObservedRunner,
    Parts,
)
from tests.sim.loop import run_virtually
from tests.sim.scenario import EOS, EOS_ONE_IN, TOKEN_IDS, Scenario
from tests.sim.world import run_scenario
from worker_svc.engines.contract import GenerateContext, LLMEngineOutput, PreprocessedRequest
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.token_oracle import TokenOracle


def fault(
    kind: FaultKind, at: float, *, target_draw: float = 0.0, duration_s: float = 1.0
) -> Fault:
    return Fault(at, kind, target_draw, 0.0, duration_s, near_s=0.1, far_s=0.1, notice_s=0.5)


CLIENT_SPECS = draw_client_specs(
    Random(7), 60, 9.0, TokenOracle(TOKEN_IDS, EOS, eos_one_in=EOS_ONE_IN), long_prompts=False
)
NO_FAULTS = Scenario(seed=7, client_specs=CLIENT_SPECS)
CUTS = replace(NO_FAULTS, faults=tuple(fault(FaultKind.ATTACH_CUT, 6.0 + n / 2) for n in range(8)))
DRAINS = replace(
    NO_FAULTS,
    faults=(
        fault(FaultKind.WORKER_DRAIN, 2.5, duration_s=8.0),
        fault(FaultKind.WORKER_DRAIN, 2.6, target_draw=0.9, duration_s=8.0),
    ),
)


HANGS = replace(NO_FAULTS, faults=(fault(FaultKind.ROUTER_STOP, 1.0, duration_s=8.0),))


def violated_rules(scenario: Scenario, parts: Parts) -> set[str]:
    return {violation.rule for violation in run_scenario(scenario, parts).violations}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [NO_FAULTS, CUTS, DRAINS, HANGS])
def test_the_real_parts_break_no_rule_in_these_scenarios(scenario: Scenario) -> None:
    report = run_scenario(scenario)
    assert not report.violations, str(report)


class _FaultySink:
    """A ResponseSink that passes wrong calls to the next one."""

    def __init__(self, sink: ResponseSink) -> None:
        self.sink = sink

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        self.sink.tokens(token_ids, logprobs)

    def finished(self, outcome: RequestOutcome) -> None:
        self.sink.finished(outcome)


class _FaultyGateway(Gateway):
    faulty_sink: type[_FaultySink] = _FaultySink

    def open(self, plan: RequestPlan, query: PlacementRequest, sink: ResponseSink) -> RequestHandle:
        return super().open(plan, query, self.faulty_sink(sink))


class EndsTwice(_FaultyGateway):
    class faulty_sink(_FaultySink):
        def finished(self, outcome: RequestOutcome) -> None:
            super().finished(outcome)
            super().finished(outcome)


class SendsTokensAfterTheEnd(_FaultyGateway):
    class faulty_sink(_FaultySink):
        def finished(self, outcome: RequestOutcome) -> None:
            super().finished(outcome)
            super().tokens([11], ())


class Miscounts(_FaultyGateway):
    class faulty_sink(_FaultySink):
        def finished(self, outcome: RequestOutcome) -> None:
            super().finished(replace(outcome, usage=CompletionUsage(1, 1, 2)))


class ReportsWrongFinishReason(_FaultyGateway):
    class faulty_sink(_FaultySink):
        def finished(self, outcome: RequestOutcome) -> None:
            if outcome.finish_reason is FinishReason.LENGTH:
                outcome = replace(outcome, finish_reason=FinishReason.EOS)
            super().finished(outcome)


class FailsWithoutCause(_FaultyGateway):
    class faulty_sink(_FaultySink):
        def finished(self, outcome: RequestOutcome) -> None:
            super().finished(replace(outcome, error=Overloaded(1.0)))


class NeverRetries(Gateway):
    def open(self, plan: RequestPlan, query: PlacementRequest, sink: ResponseSink) -> RequestHandle:
        return super().open(replace(plan, attempts_max=1), query, sink)


class LeavesATaskBehind(Gateway):
    def open(self, plan: RequestPlan, query: PlacementRequest, sink: ResponseSink) -> RequestHandle:
        self.forgotten = asyncio.create_task(asyncio.sleep(400.0))
        return super().open(plan, query, sink)


class _Sink:
    """A LegSink that forwards all calls."""

    def __init__(self, sink: LegSink) -> None:
        self.sink = sink

    def accepted(self) -> None:
        self.sink.accepted()

    def rejected(self, error: MeshError) -> None:
        self.sink.rejected(error)

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        self.sink.tokens(token_ids, logprobs)

    def chunk(self, json: bytes) -> None:
        self.sink.chunk(json)

    def terminal(self, terminal: Terminal) -> None:
        self.sink.terminal(terminal)

    def lost(self, error: MeshError) -> None:
        self.sink.lost(error)


class ForgetsOneTokenInMigration(ObservedEngineClient):
    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submission:
        request = leg_request.changed_request()
        if leg_request.attempt and request is not None:
            short = replace(request, token_ids=request.token_ids[:-1])
            leg_request = replace(leg_request, request=short, changes={})
        return super().submit(worker_id, address, leg_request, sink)


class LosesTokens(ObservedEngineClient):
    class Sink(_Sink):
        def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
            if token_ids[0] % 20:
                super().tokens(token_ids, logprobs)

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submission:
        return super().submit(worker_id, address, leg_request, self.Sink(sink))


class LosesTheEnd(ObservedEngineClient):
    class Sink(_Sink):
        def terminal(self, terminal: Terminal) -> None:
            pass

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submission:
        return super().submit(worker_id, address, leg_request, self.Sink(sink))


class RejectsWithoutCause(ObservedEngineClient):
    class Sink(_Sink):
        def accepted(self) -> None:
            self.sink.rejected(Overloaded(1.0))

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submission:
        if leg_request.attempt == 0:
            sink = self.Sink(sink)
        return super().submit(worker_id, address, leg_request, sink)


class _IgnoresAbort(Submission):
    def abort(self, reason: str) -> None:
        pass


class NeverAborts(ObservedEngineClient):
    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submission:
        submission = super().submit(worker_id, address, leg_request, sink)
        return _IgnoresAbort(submission.connection, submission.slot)


class NeverPingsItsRouter(ObservedRouterClient):
    """Neither pings its router nor places requests without it."""

    async def _ping(self) -> None:
        await asyncio.sleep(400.0)

    async def _run_unrouted_placement(self) -> None:
        await asyncio.sleep(400.0)


class NeverFrees(ObservedRouterClient):
    def free(self, key: PlacementKey) -> None:
        pass


def _merge_instances(old: Snapshot, new: Snapshot) -> Snapshot:
    return Snapshot(new.revision, {**old.instances, **new.instances})


class KeepsDepartedInstances(ObservedRouter):
    seen = Snapshot()

    def update(
        self, snapshot: Snapshot, now: float, changes: SnapshotDiff | None = None
    ) -> SnapshotDiff:
        self.seen = _merge_instances(self.seen, snapshot)
        return super().update(self.seen, now)


class AcceptsDepartedWorkers(Gateway):
    """Its snapshot keeps departed instances too."""

    def __init__(
        self, router: Any, workers: Any, members: Members, *args: Any, **others: Any
    ) -> None:
        super().__init__(router, workers, _AllSeen(members), *args, **others)


class _AllSeen(Members):
    def __init__(self, members: Members) -> None:
        self._members = members
        self._seen = Snapshot()

    @property
    def snapshot(self) -> Snapshot:  # type: ignore[override]
        self._seen = _merge_instances(self._seen, self._members.snapshot)
        return self._seen

    def has_left(self, instance_id: int) -> bool:
        return instance_id not in self.snapshot.instances


class AdmitsWhileDraining(ObservedRunner):
    def _check(self, leg_request: LegRequest) -> None:
        pass


class LeaksABlock(SimEngine):
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext, *, is_embedding: bool = False
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.blocks.admit((), 16)
        async for output in super().generate(request, ctx, is_embedding=is_embedding):
            yield output


class Raises(SimEngine):
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext, *, is_embedding: bool = False
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if len(request.token_ids) % 3 == 0:
            raise ValueError("a mistake of ours")
        async for output in super().generate(request, ctx, is_embedding=is_embedding):
            yield output


class LosesFrees(ObservedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.load_tracker.free = self.keep  # type: ignore[method-assign]

    def keep(self, key: BookingKey) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "scenario", "parts"),
    [
        ("once", NO_FAULTS, Parts(gateway=EndsTwice)),
        ("once", NO_FAULTS, Parts(gateway=SendsTokensAfterTheEnd)),
        ("usage", NO_FAULTS, Parts(gateway=Miscounts)),
        ("finish", NO_FAULTS, Parts(gateway=ReportsWrongFinishReason)),
        ("errors", NO_FAULTS, Parts(gateway=FailsWithoutCause)),
        ("errors", CUTS, Parts(gateway=NeverRetries)),
        ("rest", NO_FAULTS, Parts(gateway=LeavesATaskBehind)),
        ("tokens", CUTS, Parts(engines=ForgetsOneTokenInMigration)),
        ("tokens", NO_FAULTS, Parts(engines=LosesTokens)),
        ("bounded", NO_FAULTS, Parts(engines=LosesTheEnd)),
        ("retries", NO_FAULTS, Parts(engines=RejectsWithoutCause)),
        ("abort", NO_FAULTS, Parts(engines=NeverAborts)),
        ("placed", HANGS, Parts(router_port=NeverPingsItsRouter)),
        ("rest", NO_FAULTS, Parts(router_port=NeverFrees)),
        ("submit", DRAINS, Parts(router=KeepsDepartedInstances, gateway=AcceptsDepartedWorkers)),
        (
            "admit",
            replace(DRAINS, step_s=0.15, selector="random"),  # so that drains take a while
            Parts(
                router=KeepsDepartedInstances,
                gateway=AcceptsDepartedWorkers,
                runner=AdmitsWhileDraining,
            ),
        ),
        ("rest", NO_FAULTS, Parts(engine=LeaksABlock)),
        ("log", NO_FAULTS, Parts(engine=Raises)),
        ("rest", NO_FAULTS, Parts(router=LosesFrees)),
    ],
    ids=lambda value: (
        next((part.__name__ for part in _parts_of(value) if part not in _parts_of(Parts())), None)
        if isinstance(value, Parts)
        else None
    ),
)
def test_a_mistake_is_caught_by_its_rule(rule: str, scenario: Scenario, parts: Parts) -> None:
    assert rule in violated_rules(scenario, parts)


def _parts_of(parts: Parts) -> list[type[Any]]:
    return [
        parts.gateway,
        parts.router_port,
        parts.engines,
        parts.runner,
        parts.engine,
        parts.router,
    ]


def test_the_rule_about_credit_can_fail() -> None:
    async def violations(unacked_bytes: int) -> list[str]:
        checks = Checks()
        checks.credit("w0", unacked_bytes)
        return [violation.rule for violation in checks.violations]

    assert run_virtually(violations(2 << 20)) == ["credit"]
    assert run_virtually(violations(1 << 20)) == []


class KeepsStreamsOpen(ObservedEngineClient):
    """Every stream counts as used all the time."""

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> Submission:
        submission = super().submit(worker_id, address, leg_request, sink)
        # Later, since an open slot marks the connection as used.
        later = asyncio.get_running_loop().call_later
        later(30.0, setattr, submission.connection, "_last_used_at", float("inf"))
        return submission


@pytest.mark.slow
def test_a_stream_that_stays_open_unused_is_caught() -> None:
    quiet = replace(NO_FAULTS, linger_s=70.0)
    assert violated_rules(quiet, Parts()) == set()
    assert "rest" in violated_rules(quiet, Parts(engines=KeepsStreamsOpen))
