"""The request machine: placement, retries, migration and ends, with recording ports."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MeshError,
    Overloaded,
    RequestCancelled,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from common.request.placement import Placement
from common.request.preprocessed import (
    BootstrapInfo,
    CompletionUsage,
    FinishReason,
    GuidedDecoding,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    PromptTokensDetails,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TokenIds,
    TokenLogprob,
    usage,
)
from common.request.token_stream import LegRequest, Terminal
from frontend_svc.errors import NOT_MIGRATABLE, http_error
from frontend_svc.models.engine_options import EngineTraits
from frontend_svc.request.continuation import lacking_traits, migration_blockers
from frontend_svc.request.leg import Leg
from frontend_svc.request.leg_request import leg_changes
from frontend_svc.request.machine import USAGE_WAIT_S, RequestMachine
from frontend_svc.request.retry_policy import ALL_EXCLUDED, NO_ROUTER
from frontend_svc.request.types import PassThroughPayload, RequestOutcome, RequestPlan
from tests.kit.placements import decided

PROMPT = [1, 2, 3]
DEADLINE = 100.0
LOST = WorkerLost("gone", retryable=True)


def plan(
    *,
    max_tokens: int | None = 10,
    min_tokens: int | None = None,
    migratable: bool = True,
    attempts_max: int = 4,
) -> RequestPlan:
    request = PreprocessedRequest(
        model="m",
        token_ids=TokenIds.of(PROMPT),
        stop_conditions=StopConditions(max_tokens=max_tokens, min_tokens=min_tokens, stop=("x",)),
        sampling_options=SamplingOptions(temperature=0.0),
        output_options=OutputOptions(),
        prefill_result=PrefillResult({"handle": 1}),
        bootstrap_info=BootstrapInfo("h", 1, 2),
    )
    return RequestPlan(
        "r",
        request,
        DEADLINE,
        migratable=migratable,
        attempts_max=attempts_max,
        traceparent="00-trace",
        tenant="t",
        priority=3,
    )


@dataclass(slots=True)
class Ports:
    """Ports that record each call, and fail on a call after the end."""

    places: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    submitted: list[tuple[int, LegRequest, Leg]] = field(default_factory=list)
    aborted: list[tuple[Leg, str]] = field(default_factory=list)
    prefills: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)
    wake: float | None = None
    time: float = 0.0
    may_retry: bool = True
    departed: set[int] = field(default_factory=set)
    lost: float = 0.0
    chunks: list[bytes] = field(default_factory=list)
    on_emit: Callable[[], None] | None = None
    pool: frozenset[int] = frozenset()
    open_circuits: frozenset[int] = frozenset()
    has_permit: bool = True
    permits: int = 0
    waits: list[float] = field(default_factory=list)
    failed_workers: list[int] = field(default_factory=list)

    def members(self) -> tuple[frozenset[int], frozenset[int]]:
        self._check_open()
        return self.pool, self.open_circuits

    def take_permit(self) -> bool:
        self._check_open()
        self.permits += 1
        return self.has_permit

    def wait_for_worker(self, until: float) -> None:
        self._check_open()
        self.waits.append(until)

    def place(self, attempt: int, excluded: frozenset[int]) -> None:
        self._check_open()
        self.places.append((attempt, excluded))

    def submit(self, worker_id: int, leg_request: LegRequest, leg: Leg) -> None:
        self._check_open()
        self.submitted.append((worker_id, leg_request, leg))

    def abort_leg(self, leg: Leg, reason: str) -> None:
        self._check_open()
        assert any(leg is known for _, _, known in self.submitted)
        self.aborted.append((leg, reason))

    def prefill_done(self, attempt: int) -> None:
        self._check_open()
        self.prefills.append(attempt)

    def free(self, attempt: int) -> None:
        self._check_open()
        assert attempt not in self.freed, "freed twice"
        self.freed.append(attempt)

    def emit(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        self._check_open()
        self.emitted += token_ids
        self.logprobs += logprobs
        if self.on_emit is not None:
            self.on_emit()

    def emit_chunk(self, json: bytes) -> None:
        self._check_open()
        self.chunks.append(json)

    def finish(self, outcome: RequestOutcome) -> None:
        self._check_open()
        self.outcomes.append(outcome)

    def wake_at(self, at: float) -> None:
        self._check_open()
        self.wake = at

    def now(self) -> float:
        return self.time

    def has_left(self, worker_id: int) -> bool:
        return worker_id in self.departed

    def take_retry(self, error: MeshError) -> bool:
        return self.may_retry

    def worker_failed(self, worker_id: int) -> None:
        self._check_open()
        self.failed_workers.append(worker_id)

    def stalled_s(self) -> float:
        return self.lost

    def silent_s(self, worker_id: int) -> float:
        return math.inf

    def _check_open(self) -> None:
        assert not self.outcomes, "port called after the end"

    @property
    def leg(self) -> Leg:
        return self.submitted[-1][2]

    @property
    def leg_request(self) -> LegRequest:
        return self.submitted[-1][1]

    @property
    def outcome(self) -> RequestOutcome:
        assert len(self.outcomes) == 1
        return self.outcomes[0]


@dataclass(slots=True)
class Fixture:
    """A machine with its ports, and the most frequent steps of the tests."""

    machine: RequestMachine
    ports: Ports

    def place(self, worker_id: int, now: float = 0.0) -> Leg:
        """The router places the last attempt."""
        self.ports.time = now
        self.machine.placed(self.ports.places[-1][0], decided(worker_id), now)
        return self.ports.leg

    def run(self, worker_id: int, token_ids: Sequence[int] = (), now: float = 0.0) -> Leg:
        """A leg that is accepted and delivers tokens."""
        leg = self.place(worker_id, now)
        leg.accepted()
        if token_ids:
            leg.tokens(list(token_ids), ())
        return leg


def begin(one: RequestPlan | None = None, worker_wait_s: float = 0.0) -> Fixture:
    ports = Ports()
    fixture = Fixture(RequestMachine(one or plan(), ports, worker_wait_s=worker_wait_s), ports)
    fixture.machine.start()
    return fixture


def end_of(
    finish_reason: FinishReason | None = FinishReason.EOS,
    error: MeshError | None = None,
    cached_tokens: int | None = None,
) -> Terminal:
    counted: CompletionUsage | None = None
    if cached_tokens is not None:
        details = PromptTokensDetails(cached_tokens=cached_tokens)
        counted = replace(usage(99, 99), prompt_tokens_details=details)
    return Terminal(1, finish_reason, error=error, usage=counted)


# Successful requests


@pytest.mark.row("S1-20")
def test_a_request_is_placed_submitted_streamed_and_finished() -> None:
    one = plan()
    fixture = begin(one)
    ports = fixture.ports
    assert ports.places == [(0, frozenset())]
    assert ports.wake == DEADLINE
    placed = decided(11, 1, overlap_blocks=4, predicted_cached_tokens=64, reasons=("overlap",))
    fixture.machine.placed(0, placed, 40.0)
    assert [worker_id for worker_id, _, _ in ports.submitted] == [11]
    assert ports.leg_request == LegRequest(
        "r",
        attempt=0,
        timeout_s=60.0,
        traceparent="00-trace",
        tenant="t",
        priority=3,
        request=one.request,
        changes={"routing": RoutingHints(dp_rank=1)},
    )
    ports.leg.accepted()
    logprobs = [TokenLogprob(5, -0.1)]
    ports.leg.tokens([5], logprobs)
    ports.leg.tokens([6, 7], ())
    assert ports.prefills == [0]
    assert ports.freed == []
    ports.leg.terminal(end_of(FinishReason.STOP, cached_tokens=2))
    assert ports.emitted == [5, 6, 7]
    assert ports.logprobs == logprobs
    assert ports.freed == [0]
    assert ports.aborted == []
    details = PromptTokensDetails(cached_tokens=2)
    assert ports.outcome == RequestOutcome(
        finish_reason=FinishReason.STOP,
        error=None,
        usage=replace(usage(3, 3), prompt_tokens_details=details),
        attempts=1,
        worker_ids=(11,),
        placed=placed,
    )
    assert fixture.machine.is_finished


@pytest.mark.parametrize(
    "finish_reason",
    [FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP, FinishReason.CONTENT_FILTER],
)
def test_the_finish_reason_of_the_worker_is_that_of_the_request(
    finish_reason: FinishReason,
) -> None:
    fixture = begin()
    fixture.run(1, [5]).terminal(end_of(finish_reason))
    assert fixture.ports.outcome.finish_reason is finish_reason
    assert fixture.ports.outcome.error is None


def test_a_response_may_be_empty() -> None:
    fixture = begin()
    fixture.run(1).terminal(end_of())
    assert fixture.ports.prefills == []
    assert fixture.ports.outcome.usage == usage(3, 0)


def test_a_request_that_the_router_cannot_place_fails_and_frees_nothing() -> None:
    fixture = begin()
    error = Unavailable("no worker", 1.0)
    fixture.machine.placement_failed(0, error)
    outcome = fixture.ports.outcome
    assert (outcome.finish_reason, outcome.error) == (FinishReason.ERROR, error)
    assert (outcome.attempts, outcome.worker_ids, outcome.placed) == (1, (), None)
    assert fixture.ports.freed == []


def test_a_leg_cancelled_at_the_worker_cancels_the_request() -> None:
    fixture = begin()
    fixture.run(1, [5]).terminal(end_of(FinishReason.CANCELLED))
    assert fixture.ports.outcome.finish_reason is FinishReason.CANCELLED
    assert isinstance(fixture.ports.outcome.error, RequestCancelled)
    assert fixture.ports.freed == [0]
    assert fixture.ports.aborted == []


def test_a_finish_reason_error_without_an_error_is_still_an_error() -> None:
    fixture = begin()
    fixture.run(1, [5]).terminal(end_of(FinishReason.ERROR))
    assert fixture.ports.outcome.finish_reason is FinishReason.ERROR
    assert isinstance(fixture.ports.outcome.error, WorkerLost)


def test_a_pass_through_chunk_is_a_bug() -> None:
    fixture = begin()
    with pytest.raises(AssertionError):
        fixture.run(1).chunk(b"{}")


# Pass-through bodies


def pass_through_plan(*, is_chat: bool = True) -> RequestPlan:
    nothing = PreprocessedRequest(model="m", token_ids=TokenIds())
    return RequestPlan("r", nothing, DEADLINE, body=PassThroughPayload(b'{"model":"m"}', is_chat))


def test_a_pass_through_body_is_sent_unchanged_and_its_chunks_are_emitted() -> None:
    fixture = begin(pass_through_plan())
    leg = fixture.run(1)
    leg_request = fixture.ports.leg_request
    assert (leg_request.chat_json, leg_request.completion_json, leg_request.request) == (
        b'{"model":"m"}',
        None,
        None,
    )
    leg.chunk(b"one")
    leg.chunk(b"two")
    assert fixture.ports.prefills == [0], "the first chunk counts as the first token"
    leg.terminal(Terminal(1, FinishReason.STOP, usage=usage(4, 2)))
    assert fixture.ports.chunks == [b"one", b"two"]
    outcome = fixture.ports.outcome
    assert (outcome.finish_reason, outcome.error) == (FinishReason.STOP, None)
    assert outcome.usage == usage(4, 2), "the counts of the engine"


def test_a_pass_through_completion_is_sent_as_a_completion() -> None:
    fixture = begin(pass_through_plan(is_chat=False))
    fixture.run(1)
    assert fixture.ports.leg_request.completion_json == b'{"model":"m"}'
    assert fixture.ports.leg_request.chat_json is None


def test_a_pass_through_body_is_retried_until_its_first_chunk() -> None:
    fixture = begin(pass_through_plan())
    fixture.run(1).lost(LOST)
    leg = fixture.run(2)
    leg.chunk(b"one")
    leg.lost(LOST)
    error = fixture.ports.outcome.error
    assert error is not None
    assert error.reason == NOT_MIGRATABLE
    assert fixture.ports.outcome.worker_ids == (1, 2)
    assert fixture.ports.freed == [0, 1]


def test_a_pass_through_body_cannot_run_on_a_pair() -> None:
    fixture = begin(pass_through_plan())
    fixture.machine.placed(0, decided(1, prefill=Placement(2)), 0.0)
    assert isinstance(fixture.ports.outcome.error, Unsupported)
    assert fixture.ports.freed == [0]
    assert fixture.ports.submitted == []


# Retries


def reject(leg: Leg) -> None:
    leg.rejected(Overloaded(1.0))


def lose(leg: Leg) -> None:
    leg.lost(LOST)


def fail_for_now(leg: Leg) -> None:
    leg.accepted()
    leg.terminal(end_of(None, Unavailable("draining")))


@pytest.mark.parametrize("fail", [reject, lose, fail_for_now])
def test_a_leg_that_fails_before_a_token_is_retried_on_another_worker(
    fail: Callable[[Leg], None],
) -> None:
    one = plan()
    fixture = begin(one)
    fail(fixture.place(11))
    assert fixture.ports.freed == [0]
    assert fixture.ports.places == [(0, frozenset()), (1, frozenset({11}))]
    assert not fixture.ports.outcomes
    leg = fixture.run(12, [5], now=1.0)
    assert fixture.ports.leg_request.attempt == 1
    assert fixture.ports.leg_request.changed_request() == one.request, (
        "without generated tokens the request is unchanged"
    )
    leg.terminal(end_of())
    outcome = fixture.ports.outcome
    assert (outcome.attempts, outcome.worker_ids) == (2, (11, 12))
    assert outcome.placed == decided(12)
    assert fixture.ports.freed == [0, 1]


def test_a_worker_that_does_not_accept_in_time_is_excluded() -> None:
    fixture = begin()
    first = fixture.place(11, now=10.0)
    assert fixture.ports.wake == 13.0
    fixture.machine.on_timer(13.0)
    assert fixture.ports.aborted == [(first, "not_accepted")]
    assert fixture.ports.places[-1] == (1, frozenset({11}))
    first.accepted()
    first.tokens([66], ())
    first.terminal(end_of())
    fixture.run(12, [5], now=14.0).terminal(end_of())
    assert fixture.ports.emitted == [5]
    assert fixture.ports.freed == [0, 1]


def test_a_timer_that_fires_slightly_early_is_set_again() -> None:
    fixture = begin()
    fixture.place(11, now=10.0)
    fixture.machine.on_timer(12.999999999)
    assert fixture.ports.aborted == []
    assert fixture.ports.wake == 13.0
    fixture.machine.on_timer(13.0)
    assert fixture.ports.places[-1] == (1, frozenset({11}))


def test_the_deadline_holds_while_a_retry_waits_for_placement() -> None:
    fixture = begin()
    fixture.place(11, now=10.0)
    fixture.machine.on_timer(13.0)
    assert fixture.ports.wake == DEADLINE


def test_an_accepted_leg_may_run_until_the_deadline() -> None:
    fixture = begin()
    fixture.run(11, now=10.0)
    fixture.machine.on_timer(13.0)
    assert fixture.ports.wake == DEADLINE
    assert not fixture.ports.aborted


def test_a_request_that_no_worker_had_before_its_deadline_may_be_sent_again() -> None:
    fixture = begin()
    fixture.machine.on_timer(DEADLINE)
    error = fixture.ports.outcome.error
    assert isinstance(error, DeadlineExceeded)
    assert (error.retryable, error.retry_after_s) == (True, 1.0)
    fixture = begin()
    fixture.run(11, now=10.0)
    fixture.machine.on_timer(DEADLINE)
    error = fixture.ports.outcome.error
    assert isinstance(error, DeadlineExceeded)
    assert (error.retryable, error.retry_after_s) == (False, None)


def test_a_deadline_before_the_acceptance_timeout_wins() -> None:
    fixture = begin()
    fixture.place(11, now=99.0)
    assert fixture.ports.wake == DEADLINE
    assert fixture.ports.leg_request.timeout_s == 1.0
    fixture = begin()
    fixture.place(11, now=100.5)
    assert fixture.ports.leg_request.timeout_s == 0.001, "never zero or less"


@pytest.mark.parametrize(
    ("error", "how"),
    [
        *((InvalidRequest("no", "f"), how) for how in ("rejected", "terminal", "lost")),
        # With a terminal it is a failure of the engine, which is retried once: see below.
        *((InternalError("oops"), how) for how in ("rejected", "lost")),
        *((WorkerLost(retryable=False), how) for how in ("rejected", "terminal", "lost")),
    ],
)
def test_an_error_that_is_not_retryable_ends_the_request(error: MeshError, how: str) -> None:
    fixture = begin()
    leg = fixture.place(11)
    if how == "terminal":
        leg.accepted()
        leg.terminal(end_of(None, error))
    else:
        getattr(leg, how)(error)
    assert fixture.ports.outcome.error is error
    assert fixture.ports.outcome.finish_reason is FinishReason.ERROR
    assert len(fixture.ports.places) == 1
    assert fixture.ports.freed == [0]


def test_attempts_are_counted_and_exclude_workers_that_failed() -> None:
    fixture = begin(plan(attempts_max=3))
    for worker_id in (11, 12, 13):
        fixture.place(worker_id).lost(LOST)
    assert [sorted(excluded) for _, excluded in fixture.ports.places] == [[], [11], [11, 12]]
    assert fixture.ports.outcome.error is LOST
    assert fixture.ports.outcome.attempts == 3
    assert fixture.ports.freed == [0, 1, 2]


def test_attempts_whose_worker_drains_or_has_left_do_not_count() -> None:
    fixture = begin(plan(attempts_max=2))
    fixture.ports.departed = set(range(20, 30))
    for worker_id in range(20, 30):
        fixture.run(worker_id).lost(LOST)
    fixture.place(11).rejected(Unavailable("the worker is draining", reason="DRAINING"))
    fixture.place(12).lost(LOST)
    assert not fixture.ports.outcomes
    fixture.place(13).lost(LOST)
    assert fixture.ports.outcome.error is LOST


def test_a_retry_that_cannot_be_placed_ends_with_the_routers_error() -> None:
    fixture = begin()
    fixture.run(11, [5]).lost(LOST)
    error = Unavailable("no other worker")
    fixture.machine.placement_failed(1, error)
    assert fixture.ports.outcome.error is error
    assert fixture.ports.outcome.usage == usage(3, 1)
    assert fixture.ports.freed == [0]


# Waiting for a worker; see also test_frontend_retry_policy.py

NO_WORKER = Unavailable("no worker", 1.0)
OTHERS_EXCLUDED = Unavailable("no other worker", reason=ALL_EXCLUDED)


def test_a_request_without_a_worker_asks_again_at_growing_intervals_until_its_wait_ends() -> None:
    fixture = begin(worker_wait_s=10.0)
    machine, ports = fixture.machine, fixture.ports
    for number in range(20):
        machine.placement_failed(0, NO_WORKER)
        if ports.outcomes:
            break
        assert len(ports.waits) == number + 1
        ports.time = ports.waits[-1]
        machine.place_again()
        assert len(ports.places) == number + 2
    assert ports.waits == pytest.approx([0.1, 0.3, 0.7, 1.5, 3.1, 6.1, 9.1, 10.0])
    assert ports.outcome.error is NO_WORKER
    assert ports.outcome.attempts == 1
    assert ports.freed == []


def test_while_every_worker_has_an_open_circuit_the_router_is_not_asked() -> None:
    ports = Ports(pool=frozenset({1, 2}), open_circuits=frozenset({1, 2}))
    machine = RequestMachine(plan(), ports, worker_wait_s=10.0)
    machine.start()
    assert (ports.places, ports.waits) == ([], [0.1])
    ports.open_circuits = frozenset({2})
    machine.place_again()
    assert ports.places == [(0, frozenset({2}))]


def test_after_its_wait_a_request_asks_the_router_whatever_the_circuits() -> None:
    ports = Ports(pool=frozenset({1}), open_circuits=frozenset({1}))
    machine = RequestMachine(plan(), ports, worker_wait_s=5.0)
    machine.start()
    ports.time = 5.0
    machine.place_again()
    assert ports.places == [(0, frozenset({1}))]


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("no router", reason=NO_ROUTER),
        Unavailable("no such worker", field="query.routing.worker"),
        Overloaded(1.0),
        InternalError("router"),
    ],
    ids=["no router", "a constraint of the request", "overload", "internal"],
)
def test_a_request_does_not_wait_if_no_new_worker_could_serve_it(error: MeshError) -> None:
    fixture = begin(worker_wait_s=10.0)
    fixture.machine.placement_failed(0, error)
    assert fixture.ports.outcome.error is error
    assert fixture.ports.waits == []


def test_the_worker_that_failed_a_request_is_used_again_if_no_other_is_left() -> None:
    fixture = begin(worker_wait_s=10.0)
    ports = fixture.ports
    ports.pool = frozenset({11, 12})
    fixture.place(11).lost(LOST)
    assert ports.places[-1] == (1, frozenset({11}))
    fixture.machine.placement_failed(1, OTHERS_EXCLUDED)
    assert ports.waits == [0.1]
    fixture.machine.place_again()
    assert ports.places[-1] == (1, frozenset())


def test_after_its_wait_a_request_asks_at_once_for_a_worker_that_failed_it() -> None:
    fixture = begin(worker_wait_s=0.0)
    ports = fixture.ports
    ports.pool = frozenset({11, 12})
    fixture.place(11).lost(LOST)
    fixture.machine.placement_failed(1, OTHERS_EXCLUDED)
    assert ports.waits == []
    assert ports.places[-1] == (1, frozenset())
    fixture.machine.placement_failed(1, OTHERS_EXCLUDED)
    assert ports.outcome.error is OTHERS_EXCLUDED


def test_a_placement_ends_a_wait_and_a_computed_prompt_its_growth() -> None:
    fixture = begin(worker_wait_s=1.0)
    machine, ports = fixture.machine, fixture.ports
    machine.placement_failed(0, NO_WORKER)
    machine.place_again()
    leg = fixture.place(11, now=0.9)
    leg.lost(LOST)
    machine.placement_failed(1, NO_WORKER)
    assert ports.waits[-1] == pytest.approx(1.1), "the second interval, and a new wait"
    machine.place_again()
    fixture.run(12, [5], now=2.0).lost(LOST)
    machine.placement_failed(2, NO_WORKER)
    assert ports.waits[-1] == pytest.approx(2.1), "the first interval again"


def test_a_retried_attempt_is_placed_only_with_a_permit() -> None:
    fixture = begin()
    ports = fixture.ports
    assert ports.permits == 0, "a first attempt needs none"
    ports.has_permit = False
    fixture.place(11).lost(LOST)
    assert [attempt for attempt, _ in ports.places] == [0]
    ports.has_permit = True
    fixture.machine.place_again()
    assert [attempt for attempt, _ in ports.places] == [0, 1]


def test_the_deadline_ends_a_wait_for_a_worker() -> None:
    fixture = begin(worker_wait_s=1000.0)
    fixture.machine.placement_failed(0, NO_WORKER)
    fixture.machine.on_timer(DEADLINE)
    assert isinstance(fixture.ports.outcome.error, DeadlineExceeded)
    fixture.machine.place_again()
    assert len(fixture.ports.places) == 1


# Migration


def test_a_stream_continues_on_another_worker_after_its_last_token() -> None:
    one = plan(max_tokens=10, min_tokens=4)
    fixture = begin(one)
    first = fixture.run(11, [5, 6, 7])
    first.lost(LOST)
    second = fixture.run(12, now=30.0)
    migrated = fixture.ports.leg_request.changed_request()
    assert migrated is not None
    assert migrated.token_ids.tolist() == [*PROMPT, 5, 6, 7]
    assert migrated.stop_conditions == replace(
        one.request.stop_conditions, max_tokens=7, min_tokens=1
    )
    assert migrated.prefill_result is None
    assert migrated.bootstrap_info is None
    assert fixture.ports.leg_request.timeout_s == 70.0
    assert (
        replace(
            migrated,
            token_ids=one.request.token_ids,
            stop_conditions=one.request.stop_conditions,
            prefill_result=one.request.prefill_result,
            bootstrap_info=one.request.bootstrap_info,
        )
        == one.request
    )
    second.tokens([8, 9], ())
    second.lost(LOST)
    third = fixture.run(13)
    migrated = fixture.ports.leg_request.changed_request()
    assert migrated is not None
    assert migrated.token_ids.tolist() == [*PROMPT, 5, 6, 7, 8, 9]
    assert migrated.stop_conditions.max_tokens == 5
    assert migrated.stop_conditions.min_tokens == 0
    third.tokens([10], ())
    third.terminal(end_of(cached_tokens=8))
    assert fixture.ports.emitted == [5, 6, 7, 8, 9, 10]
    assert fixture.ports.prefills == [0, 1, 2]
    outcome = fixture.ports.outcome
    assert outcome.worker_ids == (11, 12, 13)
    assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (3, 6)
    assert one.request.token_ids.tolist() == PROMPT, "the plan is not changed"


def test_a_response_without_limits_migrates_without_limits() -> None:
    fixture = begin(plan(max_tokens=None))
    fixture.run(11, [5]).lost(LOST)
    fixture.run(12)
    migrated = fixture.ports.leg_request.changed_request()
    assert migrated is not None
    assert migrated.stop_conditions.max_tokens is None
    assert migrated.stop_conditions.min_tokens is None


def test_a_request_that_cannot_migrate_fails_only_after_its_first_token() -> None:
    fixture = begin(plan(migratable=False))
    fixture.run(11).lost(LOST)
    assert not fixture.ports.outcomes
    fixture.run(12, [5]).lost(LOST)
    error = fixture.ports.outcome.error
    assert isinstance(error, WorkerLost)
    assert error.reason == NOT_MIGRATABLE
    assert LOST.message in error.message, "the error names the failure of the worker"
    assert fixture.ports.outcome.usage == usage(3, 1)
    assert fixture.ports.emitted == [5]


@pytest.mark.parametrize(
    "one",
    [
        plan(max_tokens=2),
        plan(max_tokens=2, migratable=False),
        plan(max_tokens=2, attempts_max=1),
    ],
)
def test_a_response_of_full_length_is_complete_although_its_terminal_was_lost(
    one: RequestPlan,
) -> None:
    fixture = begin(one)
    fixture.run(11, [5, 6]).lost(LOST)
    assert fixture.ports.outcome.finish_reason is FinishReason.LENGTH
    assert fixture.ports.outcome.error is None
    assert fixture.ports.outcome.usage == usage(3, 2)
    assert len(fixture.ports.places) == 1


def test_a_request_for_zero_tokens_is_complete_only_after_the_workers_terminal() -> None:
    fixture = begin(plan(max_tokens=0))
    fixture.place(11).rejected(Overloaded())
    assert not fixture.ports.outcomes
    fixture.run(12).terminal(end_of(FinishReason.LENGTH))
    assert fixture.ports.outcome.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 3, "logit_bias": {5: 1.0}},
        {"n": 1, "best_of": 1, "use_beam_search": False},
        {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    ],
)
def test_a_response_with_all_its_state_in_tokens_can_migrate(sampling: dict[str, Any]) -> None:
    one = replace(plan().request, sampling_options=SamplingOptions(**sampling))
    alone = replace(plan(), request=one)
    assert migration_blockers(alone) == ""
    assert lacking_traits(alone, EngineTraits(), EngineTraits()) == ""


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 2},
        {"best_of": 2},
        {"use_beam_search": True},
    ],
)
def test_a_response_with_state_outside_its_tokens_cannot_migrate(sampling: dict[str, Any]) -> None:
    one = replace(plan().request, sampling_options=SamplingOptions(**sampling))
    (named,) = sampling
    assert migration_blockers(replace(plan(), request=one)) == named


PENALTIES = SamplingOptions(presence_penalty=0.1, frequency_penalty=-0.1, repetition_penalty=1.1)
PENALISED = replace(plan().request, sampling_options=PENALTIES)


def test_a_continued_leg_states_how_many_tokens_count_for_penalties() -> None:
    changes = leg_changes(PENALISED, [7, 8])
    assert changes["sampling_options"] == replace(PENALTIES, prefix_tokens=2)
    assert "sampling_options" not in leg_changes(PENALISED)
    assert "sampling_options" not in leg_changes(plan().request, [7, 8])


def begun_on(traits: dict[int, EngineTraits], *, penalised: bool = False, **more: Any) -> Fixture:
    """A response that worker 11 has begun. traits: of the workers of its model, which the test may
    change. penalised: whether it has penalties. more: of the machine."""
    request = PENALISED if penalised else plan().request
    fixture = begin(replace(plan(), request=request, engine_traits=traits.__getitem__), **more)
    fixture.ports.pool = frozenset(traits)
    fixture.run(11, [1, 2])
    return fixture


def not_migratable_error(fixture: Fixture) -> str:
    """Returns the text of the error with which a response has ended as not migratable."""
    error = fixture.ports.outcome.error
    assert error is not None
    assert (error.reason, error.retryable) == (NOT_MIGRATABLE, True)
    return error.message


COUNTS, IGNORES = EngineTraits(counts_output=True), EngineTraits()
VLLM, SGLANG = EngineTraits("vllm"), EngineTraits("sglang")


@pytest.mark.parametrize(
    ("own", "other", "lacking"),
    [
        (COUNTS, COUNTS, ""),
        (IGNORES, COUNTS, ""),
        (COUNTS, IGNORES, "presence_penalty, frequency_penalty, repetition_penalty"),
        (replace(VLLM, counts_output=True), replace(SGLANG, counts_output=True), "its engine (s"),
        (VLLM, SGLANG, "repetition_penalty, its engine (sglang, not vllm, which began the resp"),
    ],
)
def test_what_a_worker_lacks_to_continue_a_response_with_penalties(
    own: EngineTraits, other: EngineTraits, lacking: str
) -> None:
    found = lacking_traits(replace(plan(), request=PENALISED), own, other)
    assert lacking in found
    assert bool(lacking) == bool(found)


def test_penalties_continue_on_a_worker_that_counts_output_beside_one_that_does_not() -> None:
    traits = {11: COUNTS, 12: COUNTS}
    fixture = begun_on(traits, penalised=True)
    traits[13] = IGNORES
    fixture.ports.pool = frozenset(traits)
    fixture.ports.leg.lost(LOST)
    assert fixture.ports.places[-1] == (1, frozenset({11, 13}))
    fixture.run(12, [3])
    assert fixture.ports.emitted == [1, 2, 3]
    assert not fixture.ports.outcomes


def test_penalties_that_a_worker_would_not_count_continue_on_one_that_does() -> None:
    fixture = begun_on({11: IGNORES, 12: COUNTS}, penalised=True)
    fixture.ports.leg.lost(LOST)
    fixture.run(12, [3])
    assert fixture.ports.emitted == [1, 2, 3]


def test_penalties_end_at_once_if_no_worker_counts_output_not_even_that_which_began() -> None:
    fixture = begun_on({11: IGNORES, 12: IGNORES}, penalised=True)
    fixture.ports.leg.lost(LOST)
    assert "gone; the response had started" in not_migratable_error(fixture)
    assert "presence_penalty" in not_migratable_error(fixture)
    assert len(fixture.ports.places) == 1


def test_a_constraint_continues_only_on_a_worker_that_does_not_refuse_it() -> None:
    refuses = EngineTraits(continues_constraints=False)
    sampling = SamplingOptions(guided_decoding=GuidedDecoding(regex="a+"))
    one = replace(plan(), request=replace(plan().request, sampling_options=sampling))
    assert lacking_traits(one, refuses, refuses) == "guided_decoding"
    assert lacking_traits(one, refuses, EngineTraits()) == ""
    hint = replace(sampling, guided_decoding=GuidedDecoding(regex="a+", best_effort=True))
    best = replace(one, request=replace(one.request, sampling_options=hint))
    assert lacking_traits(best, refuses, refuses) == ""


@pytest.mark.parametrize("is_penalised", [False, True])
@pytest.mark.parametrize("prefill", [None, Placement(11)], ids=["alone", "as a pair"])
def test_a_started_response_is_refused_on_an_unsuitable_worker_that_joined_before_the_placement(
    prefill: Placement | None, is_penalised: bool
) -> None:
    first, joined = (COUNTS, IGNORES) if is_penalised else (SGLANG, VLLM)
    traits = {11: first}
    fixture = begun_on(traits, penalised=is_penalised)
    fixture.ports.leg.lost(LOST)
    traits[12] = joined
    decision = replace(decided(12), prefill=prefill)
    fixture.machine.placed(fixture.ports.places[-1][0], decision, 0.0)
    engine = "its engine (vllm, not sglang, which began the response)"
    assert ("presence_penalty" if is_penalised else engine) in not_migratable_error(fixture)
    assert fixture.ports.freed == [0, 1]
    assert len(fixture.ports.submitted) == 1


def test_a_started_response_avoids_workers_with_another_engine() -> None:
    unknown = EngineTraits(None)
    fixture = begun_on({11: VLLM, 12: SGLANG, 13: VLLM, 14: EngineTraits(), 15: unknown})
    assert fixture.machine.unsuitable == {}
    fixture.ports.leg.lost(LOST)
    assert fixture.ports.places[-1] == (1, frozenset({11, 12, 15}))
    assert fixture.machine.unsuitable == {
        12: "its engine (sglang, not vllm, which began the response)",
        15: "its engine (unknown, not vllm, which began the response)",
    }
    fixture.run(13, [3])
    assert fixture.ports.emitted == [1, 2, 3]


def test_a_response_that_has_not_started_is_retried_on_any_engine() -> None:
    traits = {11: VLLM, 12: SGLANG}
    fixture = begin(replace(plan(), engine_traits=traits.__getitem__))
    fixture.run(11)
    fixture.ports.leg.lost(LOST)
    assert fixture.ports.places[-1] == (1, frozenset({11}))
    fixture.run(12, [7])
    fixture.ports.leg.lost(LOST)
    assert fixture.machine.unsuitable == {}, "no worker is in the pool"
    fixture.run(11, [8])
    assert "(vllm, not sglang" in not_migratable_error(fixture), "the last one began it"


@pytest.mark.parametrize("is_penalised", [False, True])
def test_a_response_that_no_worker_but_its_own_could_continue_waits_for_one(
    is_penalised: bool,
) -> None:
    suitable, other = (COUNTS, IGNORES) if is_penalised else (SGLANG, VLLM)
    traits = {11: suitable, 12: other}
    fixture = begun_on(traits, penalised=is_penalised, worker_wait_s=5.0)
    fixture.ports.leg.lost(LOST)
    assert len(fixture.ports.waits) == 1
    assert len(fixture.ports.places) == 1
    traits[13] = suitable
    fixture.ports.pool = frozenset(traits)
    fixture.machine.place_again()
    assert fixture.ports.places[-1][1] >= {12}
    fixture.run(13, [3])
    assert fixture.ports.emitted == [1, 2, 3]


@pytest.mark.parametrize("is_penalised", [False, True])
def test_a_wait_for_a_suitable_worker_ends_with_what_the_others_lack(is_penalised: bool) -> None:
    suitable, other = (COUNTS, IGNORES) if is_penalised else (SGLANG, VLLM)
    fixture = begun_on({11: suitable, 12: other}, penalised=is_penalised)
    fixture.ports.leg.lost(LOST)
    refused = Unavailable("all failed", reason=ALL_EXCLUDED)
    for attempt, _ in tuple(fixture.ports.places[1:]):
        fixture.machine.placement_failed(attempt, refused)
    engine = "its engine (vllm, not sglang, which began the response)"
    assert ("presence_penalty" if is_penalised else engine) in not_migratable_error(fixture)


@pytest.mark.parametrize("rest", [SGLANG, VLLM])
def test_the_last_loss_of_a_response_names_what_the_other_workers_lack(rest: EngineTraits) -> None:
    fixture = begun_on({11: VLLM, 12: rest})
    for token in range(3, 2 + fixture.machine.plan.attempts_max):
        fixture.ports.leg.lost(LOST)
        fixture.run(11, [token])
    fixture.ports.leg.lost(LOST)
    error = fixture.ports.outcome.error
    assert error is not None
    if rest is VLLM:
        assert error == LOST, "the other worker was not tried"
    else:
        engine = "its engine (sglang, not vllm, which began the response)"
        assert f"{LOST.message}; the response had started" in not_migratable_error(fixture)
        assert engine in not_migratable_error(fixture)


def test_an_internal_error_of_an_engine_is_not_retried_if_the_others_have_another_one() -> None:
    fixture = begun_on({11: SGLANG, 12: VLLM})
    fixture.ports.leg.rejected(InternalError("broken"))
    assert isinstance(fixture.ports.outcome.error, InternalError)


def test_a_prompt_of_embeddings_cannot_migrate() -> None:
    assert (
        migration_blockers(replace(plan(), request=replace(plan().request, prompt_embeds="AA==")))
        == "prompt_embeds"
    )


@pytest.mark.parametrize("name", ["logits_processors", "custom_logit_processor"])
def test_a_custom_logits_processor_cannot_migrate(name: str) -> None:
    one = replace(plan().request, extra_args={name: "module:Class"})
    assert "processor" in migration_blockers(replace(plan(), request=one))
    assert (
        migration_blockers(replace(plan(), request=replace(one, extra_args={"chunked": True})))
        == ""
    )


def test_the_error_names_what_prevents_a_migration() -> None:
    one = plan()
    sampling = replace(one.request.sampling_options, presence_penalty=0.5, seed=1)
    fixture = begin(replace(one, request=replace(one.request, sampling_options=sampling)))
    fixture.run(11, [5]).lost(LOST)
    error = fixture.ports.outcome.error
    assert error is not None
    assert "presence_penalty" in error.message
    answer = http_error(error)
    assert answer.status == 503
    assert json.loads(answer.body)["error"]["code"] == "not_migratable"


def test_a_migration_reduces_min_tokens_by_the_generated_tokens() -> None:
    fixture = begin(plan(min_tokens=3))
    fixture.run(11, [5, 6]).lost(LOST)
    fixture.run(12)
    migrated = fixture.ports.leg_request.changed_request()
    assert migrated is not None
    assert migrated.stop_conditions.min_tokens == 1


# Stalls of the event loop


def test_a_stall_of_the_frontend_does_not_count_against_a_worker() -> None:
    fixture = begin(replace(plan(), accept_timeout_s=1.0))
    fixture.ports.lost = 7.0
    fixture.place(11, now=10.0)
    fixture.ports.lost = 9.5  # the loop stalled for 2.5 of the 2.6 s
    fixture.machine.on_timer(12.6)
    assert fixture.ports.aborted == [], "the acceptance may be unread"
    assert fixture.ports.wake == pytest.approx(13.5)
    fixture.machine.on_timer(13.5)
    assert [reason for _, reason in fixture.ports.aborted] == ["not_accepted"]


def test_a_stall_of_the_frontend_does_not_extend_the_deadline() -> None:
    fixture = begin()
    fixture.place(11)
    fixture.ports.lost = 50.0
    fixture.machine.on_timer(DEADLINE)
    assert isinstance(fixture.ports.outcome.error, DeadlineExceeded)


# Prefill and decode on separate workers; see also test_frontend_machine_pair.py


def prefill_accepted() -> tuple[Fixture, Leg]:
    """A request with an accepted prefill leg, which completes before decode starts."""
    one = plan()
    bare = replace(one.request, prefill_result=None, bootstrap_info=None)
    fixture = begin(replace(one, request=bare))
    fixture.machine.placed(0, decided(20, prefill=Placement(10)), 0.0)
    fixture.ports.leg.accepted()
    return fixture, fixture.ports.leg


def test_a_response_that_prefill_completes_keeps_its_logprobs() -> None:
    fixture, prefill = prefill_accepted()
    prefill.tokens([5], [TokenLogprob(5, -0.1)])
    prefill.terminal(end_of(FinishReason.EOS))
    assert fixture.ports.emitted == [5]
    assert fixture.ports.logprobs == [TokenLogprob(5, -0.1)]
    assert fixture.ports.outcome.finish_reason is FinishReason.EOS


def test_a_response_of_prefill_may_be_stopped_from_within_emit() -> None:
    fixture, prefill = prefill_accepted()
    fixture.ports.on_emit = fixture.machine.stop
    prefill.tokens([5], ())
    prefill.terminal(end_of(FinishReason.EOS))
    assert fixture.ports.outcome.finish_reason is FinishReason.STOP


def test_a_decode_leg_cancelled_at_its_worker_aborts_only_prefill() -> None:
    fixture = begin()
    room = BootstrapInfo("h", 1, 2)
    fixture.machine.placed(0, decided(20, prefill=Placement(10), bootstrap=room), 0.0)
    (_, _, prefill), (_, _, decode) = fixture.ports.submitted
    decode.accepted()
    decode.terminal(end_of(FinishReason.CANCELLED))
    assert fixture.ports.aborted == [(prefill, "peer_cancelled")]
    assert fixture.ports.outcome.finish_reason is FinishReason.CANCELLED


# External ends


def unplaced() -> Fixture:
    ports = Ports()
    return Fixture(RequestMachine(plan(), ports, worker_wait_s=0.0), ports)


def submitted() -> Fixture:
    fixture = begin()
    fixture.place(11)
    return fixture


def accepted() -> Fixture:
    fixture = begin()
    fixture.run(11)
    return fixture


def streaming() -> Fixture:
    fixture = begin()
    fixture.run(11, [5])
    return fixture


def migrating() -> Fixture:
    fixture = streaming()
    fixture.ports.leg.lost(LOST)
    return fixture


def migrated() -> Fixture:
    fixture = migrating()
    fixture.run(12, [6])
    return fixture


# The state, and the attempts freed and legs aborted by an end in it.
STATES: list[tuple[Callable[[], Fixture], list[int], int]] = [
    (unplaced, [], 0),
    (begin, [0], 0),
    (submitted, [0], 1),
    (accepted, [0], 1),
    (streaming, [0], 1),
    (migrating, [0, 1], 0),
    (migrated, [0, 1], 1),
]


def ends(
    fixture: Fixture, freed: list[int], aborts: int, reason: str, finish_reason: FinishReason
) -> RequestOutcome:
    """Checks an external end, and that later events have no effect."""
    ports = fixture.ports
    assert ports.freed == freed
    assert [why for _, why in ports.aborted] == [reason] * aborts
    if aborts:
        assert ports.aborted[0][0] is ports.leg
    assert ports.outcome.finish_reason is finish_reason
    assert ports.outcome.usage == usage(3, len(ports.emitted))
    for _, _, leg in ports.submitted:
        leg.accepted()
        leg.tokens([99], ())
        leg.rejected(Overloaded())
        leg.terminal(end_of())
        leg.lost(LOST)
    machine = fixture.machine
    for attempt in range(-1, 3):
        machine.placed(attempt, decided(77), 1.0)
        machine.placement_failed(attempt, Unavailable("late"))
    machine.start()
    machine.place_again()
    machine.abort()
    machine.stop()
    machine.fail(InternalError("late"), "late")
    machine.on_timer(1000.0)
    assert ports.freed == freed
    return ports.outcome


@pytest.mark.parametrize(("state", "freed", "aborts"), STATES)
def test_a_disconnect_ends_the_request_in_every_state(
    state: Callable[[], Fixture], freed: list[int], aborts: int
) -> None:
    fixture = state()
    fixture.machine.abort("slow_reader")
    outcome = ends(fixture, freed, aborts, "slow_reader", FinishReason.CANCELLED)
    assert isinstance(outcome.error, RequestCancelled)


@pytest.mark.parametrize(("state", "freed", "aborts"), STATES)
def test_a_stop_string_ends_the_request_successfully_in_every_state(
    state: Callable[[], Fixture], freed: list[int], aborts: int
) -> None:
    fixture = state()
    fixture.machine.stop()
    fixture.machine.on_timer(USAGE_WAIT_S)  # a worker did not report the cached tokens
    outcome = ends(fixture, freed, aborts, "stop_string", FinishReason.STOP)
    assert outcome.error is None


@pytest.mark.parametrize(("state", "freed", "aborts"), STATES)
def test_an_error_of_the_gateway_ends_the_request_in_every_state(
    state: Callable[[], Fixture], freed: list[int], aborts: int
) -> None:
    fixture = state()
    error = Unavailable("draining")
    fixture.machine.fail(error, "drain")
    assert ends(fixture, freed, aborts, "drain", FinishReason.ERROR).error is error


@pytest.mark.parametrize(("state", "freed", "aborts"), STATES[1:])
def test_the_deadline_ends_the_request_in_every_state(
    state: Callable[[], Fixture], freed: list[int], aborts: int
) -> None:
    fixture = state()
    assert fixture.ports.wake is not None
    assert fixture.ports.wake <= DEADLINE
    fixture.machine.on_timer(DEADLINE)
    outcome = ends(fixture, freed, aborts, "deadline", FinishReason.ERROR)
    assert isinstance(outcome.error, DeadlineExceeded)


def test_the_gateway_may_stop_the_request_from_within_emit() -> None:
    fixture = begin()
    fixture.ports.on_emit = fixture.machine.stop
    leg = fixture.run(11, [5, 6])
    leg.tokens([7], ())
    assert fixture.ports.emitted == [5, 6]
    leg.terminal(end_of(FinishReason.CANCELLED))
    assert fixture.ports.outcome.finish_reason is FinishReason.STOP
    assert fixture.ports.aborted == [(leg, "stop_string")]


def stopped() -> tuple[Fixture, Leg]:
    """A response ended by a stop string; its worker has not sent the terminal yet."""
    fixture = begin()
    leg = fixture.run(11, [5, 6], now=5.0)
    fixture.machine.stop()
    assert fixture.ports.aborted == [(leg, "stop_string")]
    assert fixture.ports.freed == [0], "its booking is freed"
    assert fixture.ports.outcomes == []
    return fixture, leg


def test_a_response_ended_by_a_stop_string_waits_for_cached_tokens() -> None:
    fixture, leg = stopped()
    leg.tokens([7], ())  # sent before the abort arrived
    leg.terminal(end_of(FinishReason.CANCELLED, cached_tokens=2))
    outcome = fixture.ports.outcome
    assert (outcome.finish_reason, outcome.error) == (FinishReason.STOP, None)
    details = PromptTokensDetails(cached_tokens=2)
    assert outcome.usage == replace(usage(3, 2), prompt_tokens_details=details)
    assert fixture.ports.emitted == [5, 6]


def test_the_wait_for_cached_tokens_is_bounded() -> None:
    fixture, _ = stopped()
    assert fixture.ports.wake == 5.0 + USAGE_WAIT_S
    fixture.machine.on_timer(5.0 + USAGE_WAIT_S - 0.01)
    assert fixture.ports.outcomes == []
    fixture.machine.on_timer(5.0 + USAGE_WAIT_S)
    assert (fixture.ports.outcome.finish_reason, fixture.ports.outcome.error) == (
        FinishReason.STOP,
        None,
    )
    assert fixture.ports.outcome.usage == usage(3, 2)


@pytest.mark.parametrize(
    "fail",
    [
        lambda leg: leg.lost(LOST),
        lambda leg: leg.terminal(end_of(None, error=InternalError("the engine failed"))),
    ],
)
def test_a_response_ended_by_a_stop_string_stays_complete_if_its_worker_fails(
    fail: Callable[[Leg], None],
) -> None:
    fixture, leg = stopped()
    fail(leg)
    assert (fixture.ports.outcome.finish_reason, fixture.ports.outcome.error) == (
        FinishReason.STOP,
        None,
    )
    assert fixture.ports.places == [(0, frozenset())]


def test_the_deadline_does_not_fail_a_response_ended_by_a_stop_string() -> None:
    fixture = begin()
    fixture.run(11, [5], now=DEADLINE - USAGE_WAIT_S / 2)
    fixture.machine.stop()
    fixture.machine.on_timer(DEADLINE)
    assert (fixture.ports.outcome.finish_reason, fixture.ports.outcome.error) == (
        FinishReason.STOP,
        None,
    )


def test_a_drain_does_not_fail_a_response_ended_by_a_stop_string() -> None:
    fixture, _ = stopped()
    fixture.machine.fail(Unavailable("it drains"), "drain")
    assert (fixture.ports.outcome.finish_reason, fixture.ports.outcome.error) == (
        FinishReason.STOP,
        None,
    )


@pytest.mark.parametrize(("second_cached", "reported"), [(2, 2), (496, len(PROMPT))])
def test_generated_tokens_in_a_migrated_prompt_do_not_count_as_cached(
    second_cached: int, reported: int
) -> None:
    fixture = begin(plan(max_tokens=None))
    fixture.run(11, list(range(500))).lost(LOST)
    second = fixture.run(12, [9])
    second.terminal(end_of(cached_tokens=second_cached))
    details = PromptTokensDetails(cached_tokens=reported)
    assert fixture.ports.outcome.usage == replace(usage(3, 501), prompt_tokens_details=details)


def test_events_of_dead_legs_are_ignored() -> None:
    fixture = begin()
    first = fixture.run(11, [5])
    first.lost(LOST)
    second = fixture.run(12)
    first.tokens([66], ())
    first.terminal(end_of())
    first.lost(LOST)
    first.rejected(Overloaded())
    assert second.is_live
    second.tokens([6], ())
    second.terminal(end_of())
    second.terminal(end_of())
    assert fixture.ports.emitted == [5, 6]


def test_a_placement_of_an_abandoned_attempt_is_ignored() -> None:
    fixture = begin()
    fixture.place(11)
    fixture.machine.placed(0, decided(12), 0.0)
    fixture.machine.placement_failed(0, Unavailable("late"))
    assert len(fixture.ports.submitted) == 1
    fixture.ports.leg.lost(LOST)
    fixture.machine.placed(0, decided(12), 0.0)
    fixture.machine.placement_failed(0, Unavailable("late"))
    assert len(fixture.ports.submitted) == 1
    assert not fixture.ports.outcomes


# Any order of events


class MachineModel(RuleBasedStateMachine):
    """Random events in random order, checked against the invariants of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next_token = 1000
        self.next_worker = 10
        self.delivered: list[int] = []
        self.failed_workers: set[int] = set()
        self.placed: list[int] = []
        self.refused: list[int] = []
        self.fixture: Fixture | None = None
        self.one = plan()
        self.is_stopped = False

    @precondition(lambda self: self.fixture is None)
    @rule(
        max_tokens=st.sampled_from([None, 0, 3, 8, 50]),
        min_tokens=st.sampled_from([None, 2]),
        migratable=st.sampled_from([True, True, False]),
        attempts_max=st.sampled_from([1, 2, 4, 4]),
    )
    def begin(
        self,
        max_tokens: int | None,
        min_tokens: int | None,
        migratable: bool,
        attempts_max: int,
    ) -> None:
        self.one = plan(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            migratable=migratable,
            attempts_max=attempts_max,
        )
        self.fixture = begin(self.one)

    @property
    def alive(self) -> Fixture:
        assert self.fixture is not None
        return self.fixture

    @property
    def ports(self) -> Ports:
        return self.alive.ports

    def awaited(self) -> int | None:
        """The attempt that waits for a placement."""
        attempt = self.ports.places[-1][0]
        answered = attempt in self.placed or attempt in self.refused
        return None if answered or self.ports.outcomes else attempt

    @precondition(lambda self: self.fixture is not None and self.awaited() is not None)
    @rule(count=st.integers(1, 4))
    def leg_delivers_and_fails(self, count: int) -> None:
        """The next leg delivers tokens: without this rule, few runs contain a migration."""
        self.router_replies(0, 1)
        self.leg_is_accepted(8)
        self.leg_delivers(8, count)

    @precondition(lambda self: self.fixture is not None)
    @rule(attempt=st.integers(-1, 4), works=st.integers(0, 9))
    def router_replies(self, attempt: int, works: int) -> None:
        awaited = self.awaited()
        if works and awaited is not None:
            attempt = awaited
        before = len(self.ports.submitted)
        if works:
            self.next_worker += 1
            self.alive.machine.placed(attempt, decided(self.next_worker), self.now)
        else:
            self.alive.machine.placement_failed(attempt, Unavailable("none"))
        if attempt != awaited:
            assert len(self.ports.submitted) == before
            return
        (self.placed if works else self.refused).append(attempt)
        if works:
            self.check_leg_request(self.ports.leg_request)

    def check_leg_request(self, one: LegRequest) -> None:
        request, original = one.changed_request(), self.one.request
        assert one.request is original, "all legs share the request"
        assert request is not None
        assert request.token_ids.tolist() == PROMPT + self.delivered
        done, limit = len(self.delivered), original.stop_conditions.max_tokens
        if limit is None:
            assert request.stop_conditions.max_tokens is None
        else:
            assert request.stop_conditions.max_tokens == limit - done
            assert limit > done or not done, "a leg without remaining tokens"
        least = original.stop_conditions.min_tokens
        assert request.stop_conditions.min_tokens == (least and max(0, least - done))
        assert one.timeout_s == max(0.001, DEADLINE - self.now)

    def some_leg(self, which: int) -> Leg | None:
        """The last leg in most cases, or an older one."""
        legs = [leg for _, _, leg in self.ports.submitted]
        return legs[-1 if which > len(legs) else -which] if legs else None

    @precondition(lambda self: self.fixture is not None)
    @rule(which=st.integers(1, 8))
    def leg_is_accepted(self, which: int) -> None:
        leg = self.some_leg(which)
        if leg is not None:
            leg.accepted()

    @precondition(lambda self: self.fixture is not None)
    @rule(which=st.integers(1, 8), count=st.integers(1, 4))
    def leg_delivers(self, which: int, count: int) -> None:
        leg = self.some_leg(which)
        if leg is None:
            return
        limit = self.one.request.stop_conditions.max_tokens
        if leg.is_live and limit is not None:
            count = min(count, limit - len(self.delivered))
        if count:
            token_ids = list(range(self.next_token, self.next_token + count))
            self.next_token += count
            if leg.is_live and not self.is_stopped:
                self.delivered += token_ids
            leg.tokens(token_ids, ())

    @precondition(lambda self: self.fixture is not None)
    @rule(
        which=st.integers(1, 8),
        how=st.sampled_from(["rejected", "lost", "terminal"]),
        retryable=st.sampled_from([True, True, True, True, True, False]),
    )
    def leg_fails(self, which: int, how: str, retryable: bool) -> None:
        leg = self.some_leg(which)
        if leg is None:
            return
        if leg.is_live:
            self.failed_workers.add(leg.worker_id)
        error = WorkerLost(retryable=retryable)
        if how == "terminal":
            leg.terminal(end_of(None, error))
        else:
            getattr(leg, how)(error)

    @precondition(lambda self: self.fixture is not None)
    @rule(
        which=st.integers(1, 8),
        finish_reason=st.sampled_from(FinishReason),
        rarely=st.integers(0, 5),
    )
    def leg_ends(self, which: int, finish_reason: FinishReason, rarely: int) -> None:
        leg = self.some_leg(which)
        if leg is not None and not rarely:
            was_live = leg.is_live
            leg.terminal(end_of(finish_reason))
            reported = FinishReason.STOP if self.is_stopped else finish_reason
            assert not was_live or self.ports.outcome.finish_reason is reported

    @precondition(lambda self: self.fixture is not None)
    @rule(method=st.sampled_from(["abort", "stop", "fail"]), rarely=st.integers(0, 5))
    def external_end(self, method: str, rarely: int) -> None:
        if rarely:
            return
        machine = self.alive.machine
        if method == "fail":
            machine.fail(InternalError("gateway"), "gateway")
        else:
            getattr(machine, method)()
        # An accepted leg may still report cached tokens.
        leg = self.some_leg(1)
        waits = method == "stop" and leg is not None and leg.is_live and leg.is_accepted
        self.is_stopped |= waits
        assert waits or self.ports.outcome

    @precondition(lambda self: self.fixture is not None)
    @rule(by=st.sampled_from([0.1, 0.5, 1.0, 5.0, 40.0]))
    def time_passes(self, by: float) -> None:
        """Timers fire when due, and sometimes early."""
        self.now += by
        leg = self.some_leg(1)
        was_live = leg is not None and leg.is_live and not leg.is_accepted
        self.alive.machine.on_timer(self.now)
        if was_live and leg is not None and not leg.is_live:
            self.failed_workers.add(leg.worker_id)
        if self.now >= DEADLINE:
            assert self.ports.outcome
        elif not self.ports.outcomes:
            assert self.ports.wake is not None
            assert self.now < self.ports.wake <= DEADLINE

    @invariant()
    def machine_invariants_hold(self) -> None:
        if self.fixture is None:
            return
        ports = self.ports
        assert len(ports.outcomes) <= 1
        assert ports.emitted == self.delivered
        live = [leg for _, _, leg in ports.submitted if leg.is_live]
        assert len(live) <= 1
        assert not (live and ports.outcomes)
        attempts = [attempt for attempt, _ in ports.places]
        assert attempts == list(range(len(attempts)))
        assert len(attempts) <= self.one.attempts_max
        last_excluded = ports.places[-1][1]
        assert last_excluded <= self.failed_workers
        if not ports.outcomes:
            assert last_excluded == self.failed_workers
        assert len(ports.prefills) == len(set(ports.prefills))
        self.check_booking()

    def check_booking(self) -> None:
        ports = self.ports
        assert len(ports.freed) == len(set(ports.freed))
        held = [a for a in self.placed if a not in ports.freed]
        live = [leg.attempt for _, _, leg in ports.submitted if leg.is_live]
        assert held == ([] if self.is_stopped else live), "exactly the live leg's booking exists"
        assert not set(self.refused) & set(ports.freed)
        if ports.outcomes:
            outcome = ports.outcome
            assert outcome.attempts == len(ports.places)
            assert outcome.usage == usage(len(PROMPT), len(self.delivered))
            failed = outcome.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED)
            assert (outcome.error is not None) == failed

    def teardown(self) -> None:
        if self.fixture is not None:
            self.alive.machine.on_timer(DEADLINE)
            assert self.ports.outcome
            self.check_booking()
            placed = {attempt for attempt, _ in self.ports.places}
            assert set(self.ports.freed) == placed - set(self.refused)


@pytest.mark.slow
def test_no_order_of_events_breaks_an_invariant() -> None:
    bounds = settings(max_examples=150, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(MachineModel, settings=bounds)


# Embeddings


def test_an_embedding_is_one_leg_whose_chunk_is_the_vector() -> None:
    fixture = begin(replace(plan(), pooling="embedding"))
    leg = fixture.run(1)
    assert fixture.ports.leg_request.phase == "embedding"
    leg.chunk(b"vector")
    assert fixture.ports.prefills == [0], "the vector counts as the first token"
    leg.terminal(Terminal(1, FinishReason.STOP, usage=usage(3, 0)))
    assert fixture.ports.chunks == [b"vector"]
    assert (fixture.ports.outcome.error, fixture.ports.outcome.usage) == (None, usage(3, 0))
    assert fixture.ports.freed == [0]


def test_an_embedding_is_computed_again_until_its_end() -> None:
    fixture = begin(replace(plan(), pooling="embedding"))
    fixture.run(1).lost(LOST)
    leg = fixture.run(2)
    leg.chunk(b"one")
    leg.lost(LOST)
    again = fixture.run(3)
    assert fixture.ports.leg_request.phase == "embedding"
    again.chunk(b"again")
    again.terminal(Terminal(1, FinishReason.STOP))
    assert fixture.ports.outcome.error is None
    assert fixture.ports.outcome.worker_ids == (1, 2, 3)
    assert fixture.ports.chunks == [b"one", b"again"]


def test_of_a_pair_only_the_prefill_worker_computes_an_embedding() -> None:
    fixture = begin(replace(plan(), pooling="embedding"))
    pair = decided(1, prefill=Placement(2, 1), bootstrap=BootstrapInfo("h", 1, 2))
    fixture.machine.placed(0, pair, 0.0)
    ((worker_id, leg_request, leg),) = fixture.ports.submitted
    assert (worker_id, leg_request.phase) == (2, "embedding")
    assert leg_request.changes == {"routing": RoutingHints(dp_rank=1)}
    leg.chunk(b"vector")
    leg.terminal(Terminal(1, FinishReason.STOP))
    assert fixture.ports.freed == [0]


# Failures of engines

BROKEN = InternalError("the engine failed; the worker's log has the traceback")


def fail_in_engine(leg: Leg, error: MeshError = BROKEN) -> None:
    if not leg.is_accepted:
        leg.accepted()
    leg.terminal(end_of(None, error))


def test_an_internal_error_before_a_token_is_retried_once_on_another_worker() -> None:
    fixture = begin()
    fail_in_engine(fixture.run(1))
    assert fixture.ports.places[-1] == (1, frozenset({1}))
    fixture.run(2, [5])
    assert fixture.ports.failed_workers == [1], "another worker answers the request"
    fixture.ports.leg.terminal(end_of())
    assert fixture.ports.outcome.error is None
    assert fixture.ports.emitted == [5]
    assert fixture.ports.failed_workers == [1]


def test_a_request_that_fails_in_two_engines_ends_with_its_error_and_counts_against_none() -> None:
    fixture = begin()
    fail_in_engine(fixture.run(1))
    fail_in_engine(fixture.run(2))
    assert fixture.ports.outcome.error is BROKEN
    assert fixture.ports.outcome.worker_ids == (1, 2)
    assert fixture.ports.failed_workers == []


def test_a_started_response_continues_once_after_an_internal_error() -> None:
    fixture = begin()
    fail_in_engine(fixture.run(1, [5, 6]))
    assert fixture.ports.failed_workers == []
    leg = fixture.run(2, [7])
    assert fixture.ports.leg_request.prompt == TokenIds.of([*PROMPT, 5, 6]).little_endian
    assert fixture.ports.failed_workers == [1]
    fail_in_engine(leg)
    assert fixture.ports.outcome.error is BROKEN
    assert fixture.ports.emitted == [5, 6, 7]
    assert fixture.ports.failed_workers == [1], "a request counts once"


def test_a_started_response_that_cannot_continue_ends_with_the_internal_error() -> None:
    fixture = begin(plan(migratable=False))
    fail_in_engine(fixture.run(1, [5]))
    assert fixture.ports.outcome.error is BROKEN
    assert fixture.ports.failed_workers == [1], "no other worker can confirm it"


def test_without_another_worker_an_internal_error_is_not_retried() -> None:
    ports = Ports(pool=frozenset({1, 2}), open_circuits=frozenset({2}))
    fixture = Fixture(RequestMachine(plan(), ports), ports)
    fixture.machine.start()
    fail_in_engine(fixture.run(1))
    assert ports.outcome.error is BROKEN
    assert ports.failed_workers == [1]


def test_without_a_retry_budget_an_internal_error_is_the_error_of_the_request() -> None:
    fixture = begin()
    fixture.ports.may_retry = False
    fail_in_engine(fixture.run(1))
    assert fixture.ports.outcome.error is BROKEN
    assert fixture.ports.failed_workers == [1]


def test_an_internal_error_after_the_last_token_ends_the_response() -> None:
    fixture = begin(plan(max_tokens=2))
    fail_in_engine(fixture.run(1, [5, 6]))
    assert fixture.ports.outcome.finish_reason is FinishReason.LENGTH
    assert fixture.ports.failed_workers == [1]


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("bad", "token_ids"),
        Overloaded(1.0),
        Unavailable("draining", reason="DRAINING"),
        DeadlineExceeded("late"),
        WorkerLost("no KV", retryable=True, reason="HANDOFF_PEER_LOST"),
        WorkerLost("hung", retryable=True, reason="HUNG"),
    ],
    ids=lambda error: error.reason,
)
def test_other_errors_count_against_no_worker(error: MeshError) -> None:
    fixture = begin()
    fail_in_engine(fixture.run(1), error)
    if not fixture.ports.outcomes:
        fixture.run(2, [5]).terminal(end_of())
    assert fixture.ports.failed_workers == []


def test_a_lost_stream_counts_against_no_worker_again() -> None:
    """Its circuit is open by then."""
    fixture = begin()
    fixture.run(1).lost(LOST)
    fixture.run(2, [5]).terminal(end_of())
    assert fixture.ports.failed_workers == []


def test_a_stalled_request_counts_against_the_first_worker_only() -> None:
    stalled = WorkerLost("no output", retryable=True, reason="REQUEST_STALLED")
    fixture = begin()
    fail_in_engine(fixture.run(1), stalled)
    fail_in_engine(fixture.run(2), stalled)
    assert fixture.ports.failed_workers == []
    fixture.run(3, [5]).terminal(end_of())
    assert fixture.ports.failed_workers == [1]


def test_an_internal_error_after_a_stalled_request_is_not_retried() -> None:
    fixture = begin()
    stalled = WorkerLost("no output", retryable=True, reason="REQUEST_STALLED")
    fail_in_engine(fixture.run(1), stalled)
    fail_in_engine(fixture.run(2))
    assert fixture.ports.outcome.error is BROKEN, "two engines failed"
