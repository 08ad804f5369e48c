"""Every rule of the checkers can fail: a part with a deliberate mistake is caught by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from common.errors import MeshError, Overloaded
from common.registry.instances import Changes, Snapshot
from common.request.preprocessed import CompletionUsage, FinishReason, TokenLogprob
from common.request.token_stream import LegSink, Order, Terminal
from frontend_svc.core.request.machine import Outcome, Plan
from frontend_svc.peers.engine_client import Submission
from frontend_svc.peers.router_client import Key, Query
from frontend_svc.request.gateway import Gateway, Listener, Ticket
from router_svc.core.load_tracker import BookingKey
from tests.sim.checks import Checks
from tests.sim.clients import draw_wishes
from tests.sim.faults import Fault, FaultKind
from tests.sim.fleet import Parts, WatchedEngines, WatchedRouter, WatchedRouterClient, WatchedRunner
from tests.sim.loop import run_virtually
from tests.sim.scenario import EOS, EOS_ONE_IN, WORDS, Scenario
from tests.sim.world import run_scenario
from worker_svc.engines.contract import GenerateContext, LLMEngineOutput, PreprocessedRequest
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.token_oracle import Truth


def fault(kind: FaultKind, at: float, *, pick: float = 0.0, lasts_s: float = 1.0) -> Fault:
    return Fault(at, kind, pick, 0.0, lasts_s, near_s=0.1, far_s=0.1, notice_s=0.5)


WISHES = draw_wishes(
    Random(7), 60, 9.0, Truth(WORDS, EOS, eos_one_in=EOS_ONE_IN), long_prompts=False
)
CALM = Scenario(seed=7, wishes=WISHES)
CUTS = replace(CALM, faults=tuple(fault(FaultKind.ATTACH_CUT, 6.0 + n / 2) for n in range(8)))
DRAINS = replace(
    CALM,
    faults=(
        fault(FaultKind.WORKER_DRAIN, 2.5, lasts_s=8.0),
        fault(FaultKind.WORKER_DRAIN, 2.6, pick=0.9, lasts_s=8.0),
    ),
)


HANGS = replace(CALM, faults=(fault(FaultKind.ROUTER_STOP, 1.0, lasts_s=8.0),))


def rules_broken(scenario: Scenario, parts: Parts) -> set[str]:
    return {breach.rule for breach in run_scenario(scenario, parts).breaches}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [CALM, CUTS, DRAINS, HANGS])
def test_the_real_parts_break_no_rule_in_these_scenarios(scenario: Scenario) -> None:
    report = run_scenario(scenario)
    assert not report.breaches, str(report)


class _Twisted:
    """A Listener that tells the next one something else."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        self.listener.tokens(token_ids, logprobs)

    def finished(self, outcome: Outcome) -> None:
        self.listener.finished(outcome)


class _TwistedGateway(Gateway):
    twist: type[_Twisted] = _Twisted

    def open(self, plan: Plan, query: Query, listener: Listener) -> Ticket:
        return super().open(plan, query, self.twist(listener))


class EndsTwice(_TwistedGateway):
    class twist(_Twisted):
        def finished(self, outcome: Outcome) -> None:
            super().finished(outcome)
            super().finished(outcome)


class TalksAfterTheEnd(_TwistedGateway):
    class twist(_Twisted):
        def finished(self, outcome: Outcome) -> None:
            super().finished(outcome)
            super().tokens([11], ())


class Miscounts(_TwistedGateway):
    class twist(_Twisted):
        def finished(self, outcome: Outcome) -> None:
            super().finished(replace(outcome, usage=CompletionUsage(1, 1, 2)))


class NamesAnotherReason(_TwistedGateway):
    class twist(_Twisted):
        def finished(self, outcome: Outcome) -> None:
            if outcome.finish_reason is FinishReason.LENGTH:
                outcome = replace(outcome, finish_reason=FinishReason.EOS)
            super().finished(outcome)


class FailsForNoReason(_TwistedGateway):
    class twist(_Twisted):
        def finished(self, outcome: Outcome) -> None:
            super().finished(replace(outcome, error=Overloaded(1.0)))


class NeverRetries(Gateway):
    def open(self, plan: Plan, query: Query, listener: Listener) -> Ticket:
        return super().open(replace(plan, attempts_max=1), query, listener)


class LeavesATaskBehind(Gateway):
    def open(self, plan: Plan, query: Query, listener: Listener) -> Ticket:
        self.forgotten = asyncio.create_task(asyncio.sleep(400.0))
        return super().open(plan, query, listener)


class _Sink:
    """A LegSink that hands on."""

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


class ForgetsOneTokenInMigration(WatchedEngines):
    def submit(self, worker_id: int, address: str, order: Order, sink: LegSink) -> Submission:
        if order.attempt and order.request is not None:
            short = replace(order.request, token_ids=order.request.token_ids[:-1])
            order = replace(order, request=short)
        return super().submit(worker_id, address, order, sink)


class LosesTokens(WatchedEngines):
    class Sink(_Sink):
        def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
            if token_ids[0] % 20:
                super().tokens(token_ids, logprobs)

    def submit(self, worker_id: int, address: str, order: Order, sink: LegSink) -> Submission:
        return super().submit(worker_id, address, order, self.Sink(sink))


class LosesTheEnd(WatchedEngines):
    class Sink(_Sink):
        def terminal(self, terminal: Terminal) -> None:
            pass

    def submit(self, worker_id: int, address: str, order: Order, sink: LegSink) -> Submission:
        return super().submit(worker_id, address, order, self.Sink(sink))


class IsRejectedForNoReason(WatchedEngines):
    class Sink(_Sink):
        def accepted(self) -> None:
            self.sink.rejected(Overloaded(1.0))

    def submit(self, worker_id: int, address: str, order: Order, sink: LegSink) -> Submission:
        if order.attempt == 0:
            sink = self.Sink(sink)
        return super().submit(worker_id, address, order, sink)


class _Deaf(Submission):
    def abort(self, reason: str) -> None:
        pass


class NeverAborts(WatchedEngines):
    def submit(self, worker_id: int, address: str, order: Order, sink: LegSink) -> Submission:
        submission = super().submit(worker_id, address, order, sink)
        return _Deaf(submission.connection, submission.slot)


class TrustsItsRouter(WatchedRouterClient):
    """Neither asks it for a sign of life nor places what it does not answer."""

    async def _ping(self) -> None:
        await asyncio.sleep(400.0)

    async def _place_unrouted(self) -> None:
        await asyncio.sleep(400.0)


class NeverFrees(WatchedRouterClient):
    def free(self, key: Key) -> None:
        pass


def _with_all_it_ever_saw(old: Snapshot, new: Snapshot) -> Snapshot:
    return Snapshot(new.revision, {**old.instances, **new.instances})


class RemembersTheDead(WatchedRouter):
    seen = Snapshot()

    def update(self, snapshot: Snapshot, now: float) -> Changes:
        self.seen = _with_all_it_ever_saw(self.seen, snapshot)
        return super().update(self.seen, now)


class BelievesTheRouter(Gateway):
    """Its snapshot forgets nobody either."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **{**others, "departed": None})
        current, self._seen = self.snapshot, Snapshot()

        def remembered() -> Snapshot:
            self._seen = _with_all_it_ever_saw(self._seen, current())
            return self._seen

        self.snapshot = remembered


class TakesAllIn(WatchedRunner):
    def _check(self, order: Order) -> None:
        pass


class LeaksABlock(SimEngine):
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.blocks.admit((), 16)
        async for output in super().generate(request, ctx):
            yield output


class Raises(SimEngine):
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if len(request.token_ids) % 3 == 0:
            raise ValueError("a mistake of ours")
        async for output in super().generate(request, ctx):
            yield output


class LosesFrees(WatchedRouter):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.book.free = self.keep  # type: ignore[method-assign]

    def keep(self, key: BookingKey) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "scenario", "parts"),
    [
        ("once", CALM, Parts(gateway=EndsTwice)),
        ("once", CALM, Parts(gateway=TalksAfterTheEnd)),
        ("usage", CALM, Parts(gateway=Miscounts)),
        ("finish", CALM, Parts(gateway=NamesAnotherReason)),
        ("errors", CALM, Parts(gateway=FailsForNoReason)),
        ("errors", CUTS, Parts(gateway=NeverRetries)),
        ("rest", CALM, Parts(gateway=LeavesATaskBehind)),
        ("truth", CUTS, Parts(engines=ForgetsOneTokenInMigration)),
        ("truth", CALM, Parts(engines=LosesTokens)),
        ("bounded", CALM, Parts(engines=LosesTheEnd)),
        ("retries", CALM, Parts(engines=IsRejectedForNoReason)),
        ("abort", CALM, Parts(engines=NeverAborts)),
        ("placed", HANGS, Parts(placer=TrustsItsRouter)),
        ("rest", CALM, Parts(placer=NeverFrees)),
        ("submit", DRAINS, Parts(router=RemembersTheDead, gateway=BelievesTheRouter)),
        (
            "admit",
            replace(DRAINS, step_s=0.15, selector="random"),  # so that drains take a while
            Parts(router=RemembersTheDead, gateway=BelievesTheRouter, runner=TakesAllIn),
        ),
        ("rest", CALM, Parts(engine=LeaksABlock)),
        ("log", CALM, Parts(engine=Raises)),
        ("rest", CALM, Parts(router=LosesFrees)),
    ],
    ids=lambda value: (
        next((part.__name__ for part in _parts_of(value) if part not in _parts_of(Parts())), None)
        if isinstance(value, Parts)
        else None
    ),
)
def test_a_mistake_is_caught_by_its_rule(rule: str, scenario: Scenario, parts: Parts) -> None:
    assert rule in rules_broken(scenario, parts)


def _parts_of(parts: Parts) -> list[type[Any]]:
    return [parts.gateway, parts.placer, parts.engines, parts.runner, parts.engine, parts.router]


def test_the_rule_about_credit_can_fail() -> None:
    async def breaches(unacked_bytes: int) -> list[str]:
        checks = Checks()
        checks.credit("w0", unacked_bytes)
        return [breach.rule for breach in checks.breaches]

    assert run_virtually(breaches(2 << 20)) == ["credit"]
    assert run_virtually(breaches(1 << 20)) == []


class KeepsStreamsOpen(WatchedEngines):
    """Somebody uses every stream all the time."""

    def submit(self, worker_id: int, address: str, order: Order, sink: LegSink) -> Submission:
        submission = super().submit(worker_id, address, order, sink)
        # Later, since the connection counts itself as used while a slot is open.
        later = asyncio.get_running_loop().call_later
        later(30.0, setattr, submission.connection, "_used_at", float("inf"))
        return submission


@pytest.mark.slow
def test_a_stream_that_stays_open_unused_is_caught() -> None:
    quiet = replace(CALM, lingers_s=70.0)
    assert rules_broken(quiet, Parts()) == set()
    assert "rest" in rules_broken(quiet, Parts(engines=KeepsStreamsOpen))
