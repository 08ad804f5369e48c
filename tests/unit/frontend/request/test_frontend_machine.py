"""One request's life: placement, retries, migration and ends, with ports that write all down."""

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
from frontend_svc.core.openai.errors import http_error
from frontend_svc.core.request.machine import (
    NOT_MIGRATABLE,
    USAGE_WAIT_S,
    Leg,
    RequestMachine,
    migration_blockers,
)
from frontend_svc.core.request.types import (
    PassThroughPayload,
    Placement,
    RequestOutcome,
    RequestPlan,
    RoutingDecision,
)

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
    """Surroundings that write down what they are asked for, and bear nothing after the end."""

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
    lost: float = 0.0
    chunks: list[bytes] = field(default_factory=list)
    on_emit: Callable[[], None] | None = None

    def place(self, attempt: int, excluded: frozenset[int]) -> None:
        self._alive()
        self.places.append((attempt, excluded))

    def submit(self, worker_id: int, leg_request: LegRequest, leg: Leg) -> None:
        self._alive()
        self.submitted.append((worker_id, leg_request, leg))

    def abort(self, leg: Leg, reason: str) -> None:
        self._alive()
        assert any(leg is known for _, _, known in self.submitted)
        self.aborted.append((leg, reason))

    def prefill_done(self, attempt: int) -> None:
        self._alive()
        self.prefills.append(attempt)

    def free(self, attempt: int) -> None:
        self._alive()
        assert attempt not in self.freed, "freed twice"
        self.freed.append(attempt)

    def emit(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        self._alive()
        self.emitted += token_ids
        self.logprobs += logprobs
        if self.on_emit is not None:
            self.on_emit()

    def emit_chunk(self, json: bytes) -> None:
        self._alive()
        self.chunks.append(json)

    def finish(self, outcome: RequestOutcome) -> None:
        self._alive()
        self.outcomes.append(outcome)

    def wake_at(self, at: float) -> None:
        self._alive()
        self.wake = at

    def now(self) -> float:
        return self.time

    def take_retry(self) -> bool:
        return self.may_retry

    def stalled_s(self) -> float:
        return self.lost

    def silent_s(self, worker_id: int) -> float:
        return math.inf

    def _alive(self) -> None:
        assert not self.outcomes, "asked for something after the end"

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
class Life:
    """A machine in its surroundings, and the steps that tests take most."""

    machine: RequestMachine
    ports: Ports

    def place(self, worker_id: int, now: float = 0.0) -> Leg:
        """The router answers what was asked last."""
        self.ports.time = now
        self.machine.placed(self.ports.places[-1][0], RoutingDecision(worker_id), now)
        return self.ports.leg

    def run(self, worker_id: int, token_ids: Sequence[int] = (), now: float = 0.0) -> Leg:
        """A leg that was accepted and delivered."""
        leg = self.place(worker_id, now)
        leg.accepted()
        if token_ids:
            leg.tokens(list(token_ids), ())
        return leg


def begin(one: RequestPlan | None = None) -> Life:
    ports = Ports()
    life = Life(RequestMachine(one or plan(), ports), ports)
    life.machine.start()
    return life


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


# The ordinary way


@pytest.mark.row("S1-20")
def test_a_request_is_placed_submitted_streamed_and_finished() -> None:
    one = plan()
    life = begin(one)
    ports = life.ports
    assert ports.places == [(0, frozenset())]
    assert ports.wake == DEADLINE
    placed = RoutingDecision(11, 1, 4, 64, ("overlap",))
    life.machine.placed(0, placed, 40.0)
    assert [worker_id for worker_id, _, _ in ports.submitted] == [11]
    assert ports.leg_request == LegRequest(
        "r",
        attempt=0,
        timeout_s=60.0,
        traceparent="00-trace",
        tenant="t",
        priority=3,
        request=replace(one.request, routing=RoutingHints(dp_rank=1)),
    )
    ports.leg.accepted()
    beside = [TokenLogprob(5, -0.1)]
    ports.leg.tokens([5], beside)
    ports.leg.tokens([6, 7], ())
    assert ports.prefills == [0]
    assert ports.freed == []
    ports.leg.terminal(end_of(FinishReason.STOP, cached_tokens=2))
    assert ports.emitted == [5, 6, 7]
    assert ports.logprobs == beside
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
    assert life.machine.is_finished


@pytest.mark.parametrize(
    "finish_reason",
    [FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP, FinishReason.CONTENT_FILTER],
)
def test_the_workers_reason_is_the_requests_reason(finish_reason: FinishReason) -> None:
    life = begin()
    life.run(1, [5]).terminal(end_of(finish_reason))
    assert life.ports.outcome.finish_reason is finish_reason
    assert life.ports.outcome.error is None


def test_an_answer_may_be_empty() -> None:
    life = begin()
    life.run(1).terminal(end_of())
    assert life.ports.prefills == []
    assert life.ports.outcome.usage == usage(3, 0)


def test_a_request_whose_router_finds_no_place_fails_and_frees_nothing() -> None:
    life = begin()
    error = Unavailable("nobody", 1.0)
    life.machine.placement_failed(0, error)
    outcome = life.ports.outcome
    assert (outcome.finish_reason, outcome.error) == (FinishReason.ERROR, error)
    assert (outcome.attempts, outcome.worker_ids, outcome.placed) == (1, (), None)
    assert life.ports.freed == []


def test_a_leg_cancelled_at_the_worker_cancels_the_request() -> None:
    life = begin()
    life.run(1, [5]).terminal(end_of(FinishReason.CANCELLED))
    assert life.ports.outcome.finish_reason is FinishReason.CANCELLED
    assert isinstance(life.ports.outcome.error, RequestCancelled)
    assert life.ports.freed == [0]
    assert life.ports.aborted == []


def test_an_end_in_error_that_says_no_more_is_still_an_error() -> None:
    life = begin()
    life.run(1, [5]).terminal(end_of(FinishReason.ERROR))
    assert life.ports.outcome.finish_reason is FinishReason.ERROR
    assert isinstance(life.ports.outcome.error, WorkerLost)


def test_a_pass_through_chunk_is_a_bug() -> None:
    life = begin()
    with pytest.raises(AssertionError):
        life.run(1).chunk(b"{}")


# A body that is passed through


def pass_through_plan(*, is_chat: bool = True) -> RequestPlan:
    nothing = PreprocessedRequest(model="m", token_ids=TokenIds())
    return RequestPlan("r", nothing, DEADLINE, body=PassThroughPayload(b'{"model":"m"}', is_chat))


def test_a_body_is_passed_through_as_it_is_and_its_chunks_come_back() -> None:
    life = begin(pass_through_plan())
    leg = life.run(1)
    leg_request = life.ports.leg_request
    assert (leg_request.chat_json, leg_request.completion_json, leg_request.request) == (
        b'{"model":"m"}',
        None,
        None,
    )
    leg.chunk(b"one")
    leg.chunk(b"two")
    assert life.ports.prefills == [0], "its first chunk is its first token"
    leg.terminal(Terminal(1, FinishReason.STOP, usage=usage(4, 2)))
    assert life.ports.chunks == [b"one", b"two"]
    outcome = life.ports.outcome
    assert (outcome.finish_reason, outcome.error) == (FinishReason.STOP, None)
    assert outcome.usage == usage(4, 2), "as the engine counted"


def test_a_completion_body_goes_where_completions_go() -> None:
    life = begin(pass_through_plan(is_chat=False))
    life.run(1)
    assert life.ports.leg_request.completion_json == b'{"model":"m"}'
    assert life.ports.leg_request.chat_json is None


def test_a_passed_body_is_tried_elsewhere_until_its_first_chunk() -> None:
    life = begin(pass_through_plan())
    life.run(1).lost(LOST)
    leg = life.run(2)
    leg.chunk(b"one")
    leg.lost(LOST)
    error = life.ports.outcome.error
    assert error is not None
    assert error.reason == NOT_MIGRATABLE
    assert life.ports.outcome.worker_ids == (1, 2)
    assert life.ports.freed == [0, 1]


def test_a_passed_body_cannot_run_on_a_pair() -> None:
    life = begin(pass_through_plan())
    life.machine.placed(0, RoutingDecision(1, prefill=Placement(2)), 0.0)
    assert isinstance(life.ports.outcome.error, Unsupported)
    assert life.ports.freed == [0]
    assert life.ports.submitted == []


# Retries


def reject(leg: Leg) -> None:
    leg.rejected(Overloaded(1.0))


def lose(leg: Leg) -> None:
    leg.lost(LOST)


def fail_for_now(leg: Leg) -> None:
    leg.accepted()
    leg.terminal(end_of(None, Unavailable("draining")))


@pytest.mark.parametrize("fail", [reject, lose, fail_for_now])
def test_a_leg_that_fails_before_a_token_is_tried_elsewhere(fail: Callable[[Leg], None]) -> None:
    one = plan()
    life = begin(one)
    fail(life.place(11))
    assert life.ports.freed == [0]
    assert life.ports.places == [(0, frozenset()), (1, frozenset({11}))]
    assert not life.ports.outcomes
    leg = life.run(12, [5], now=1.0)
    assert life.ports.leg_request.attempt == 1
    assert life.ports.leg_request.request == one.request, (
        "nothing was generated: nothing is changed"
    )
    leg.terminal(end_of())
    outcome = life.ports.outcome
    assert (outcome.attempts, outcome.worker_ids) == (2, (11, 12))
    assert outcome.placed == RoutingDecision(12)
    assert life.ports.freed == [0, 1]


def test_a_worker_that_does_not_accept_in_time_is_left() -> None:
    life = begin()
    first = life.place(11, now=10.0)
    assert life.ports.wake == 13.0
    life.machine.on_timer(13.0)
    assert life.ports.aborted == [(first, "not_accepted")]
    assert life.ports.places[-1] == (1, frozenset({11}))
    first.accepted()
    first.tokens([66], ())
    first.terminal(end_of())
    life.run(12, [5], now=14.0).terminal(end_of())
    assert life.ports.emitted == [5]
    assert life.ports.freed == [0, 1]


def test_a_timer_that_is_early_by_a_hair_does_not_forget_the_acceptance() -> None:
    life = begin()
    life.place(11, now=10.0)
    life.machine.on_timer(12.999999999)
    assert life.ports.aborted == []
    assert life.ports.wake == 13.0
    life.machine.on_timer(13.0)
    assert life.ports.places[-1] == (1, frozenset({11}))


def test_the_deadline_is_kept_while_another_worker_is_looked_for() -> None:
    life = begin()
    life.place(11, now=10.0)
    life.machine.on_timer(13.0)
    assert life.ports.wake == DEADLINE


def test_a_leg_that_was_accepted_has_until_the_deadline() -> None:
    life = begin()
    life.run(11, now=10.0)
    life.machine.on_timer(13.0)
    assert life.ports.wake == DEADLINE
    assert not life.ports.aborted


def test_the_deadline_comes_before_the_acceptance_where_it_is_nearer() -> None:
    life = begin()
    life.place(11, now=99.0)
    assert life.ports.wake == DEADLINE
    assert life.ports.leg_request.timeout_s == 1.0
    life = begin()
    life.place(11, now=100.5)
    assert life.ports.leg_request.timeout_s == 0.001, "never zero or less"


@pytest.mark.parametrize(
    "error", [InvalidRequest("no", "f"), InternalError("oops"), WorkerLost(retryable=False)]
)
@pytest.mark.parametrize("how", ["rejected", "terminal", "lost"])
def test_an_error_that_no_other_worker_cures_is_the_end(error: MeshError, how: str) -> None:
    life = begin()
    leg = life.place(11)
    if how == "terminal":
        leg.accepted()
        leg.terminal(end_of(None, error))
    else:
        getattr(leg, how)(error)
    assert life.ports.outcome.error is error
    assert life.ports.outcome.finish_reason is FinishReason.ERROR
    assert len(life.ports.places) == 1
    assert life.ports.freed == [0]


def test_attempts_are_counted_and_none_goes_to_a_worker_that_failed() -> None:
    life = begin(plan(attempts_max=3))
    for worker_id in (11, 12, 13):
        life.place(worker_id).lost(LOST)
    assert [sorted(excluded) for _, excluded in life.ports.places] == [[], [11], [11, 12]]
    assert life.ports.outcome.error is LOST
    assert life.ports.outcome.attempts == 3
    assert life.ports.freed == [0, 1, 2]


def test_a_retry_that_finds_no_place_ends_with_the_routers_word() -> None:
    life = begin()
    life.run(11, [5]).lost(LOST)
    error = Unavailable("nobody else")
    life.machine.placement_failed(1, error)
    assert life.ports.outcome.error is error
    assert life.ports.outcome.usage == usage(3, 1)
    assert life.ports.freed == [0]


# Migration


def test_a_stream_goes_on_elsewhere_from_where_it_was() -> None:
    one = plan(max_tokens=10, min_tokens=4)
    life = begin(one)
    first = life.run(11, [5, 6, 7])
    first.lost(LOST)
    second = life.run(12, now=30.0)
    moved = life.ports.leg_request.request
    assert moved is not None
    assert moved.token_ids.tolist() == [*PROMPT, 5, 6, 7]
    assert moved.stop_conditions == replace(one.request.stop_conditions, max_tokens=7, min_tokens=1)
    assert moved.prefill_result is None
    assert moved.bootstrap_info is None
    assert life.ports.leg_request.timeout_s == 70.0
    assert (
        replace(
            moved,
            token_ids=one.request.token_ids,
            stop_conditions=one.request.stop_conditions,
            prefill_result=one.request.prefill_result,
            bootstrap_info=one.request.bootstrap_info,
        )
        == one.request
    )
    second.tokens([8, 9], ())
    second.lost(LOST)
    third = life.run(13)
    moved = life.ports.leg_request.request
    assert moved is not None
    assert moved.token_ids.tolist() == [*PROMPT, 5, 6, 7, 8, 9]
    assert moved.stop_conditions.max_tokens == 5
    assert moved.stop_conditions.min_tokens == 0
    third.tokens([10], ())
    third.terminal(end_of(cached_tokens=8))
    assert life.ports.emitted == [5, 6, 7, 8, 9, 10]
    assert life.ports.prefills == [0, 1, 2]
    outcome = life.ports.outcome
    assert outcome.worker_ids == (11, 12, 13)
    assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (3, 6)
    assert one.request.token_ids.tolist() == PROMPT, "the plan is not changed"


def test_an_answer_without_limits_moves_without_limits() -> None:
    life = begin(plan(max_tokens=None))
    life.run(11, [5]).lost(LOST)
    life.run(12)
    moved = life.ports.leg_request.request
    assert moved is not None
    assert moved.stop_conditions.max_tokens is None
    assert moved.stop_conditions.min_tokens is None


def test_what_is_not_migratable_fails_once_it_has_started_but_not_before() -> None:
    life = begin(plan(migratable=False))
    life.run(11).lost(LOST)
    assert not life.ports.outcomes
    life.run(12, [5]).lost(LOST)
    error = life.ports.outcome.error
    assert isinstance(error, WorkerLost)
    assert error.reason == NOT_MIGRATABLE
    assert LOST.message in error.message, "and what happened to the worker"
    assert life.ports.outcome.usage == usage(3, 1)
    assert life.ports.emitted == [5]


@pytest.mark.parametrize(
    "one",
    [
        plan(max_tokens=2),
        plan(max_tokens=2, migratable=False),
        plan(max_tokens=2, attempts_max=1),
    ],
)
def test_an_answer_of_full_length_whose_end_was_lost_is_complete(one: RequestPlan) -> None:
    life = begin(one)
    life.run(11, [5, 6]).lost(LOST)
    assert life.ports.outcome.finish_reason is FinishReason.LENGTH
    assert life.ports.outcome.error is None
    assert life.ports.outcome.usage == usage(3, 2)
    assert len(life.ports.places) == 1


def test_a_request_for_no_tokens_is_not_complete_before_a_worker_says_so() -> None:
    life = begin(plan(max_tokens=0))
    life.place(11).rejected(Overloaded())
    assert not life.ports.outcomes
    life.run(12).terminal(end_of(FinishReason.LENGTH))
    assert life.ports.outcome.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 3, "logit_bias": {5: 1.0}},
        {"n": 1, "best_of": 1, "use_beam_search": False},
        {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    ],
)
def test_an_answer_whose_tokens_say_it_all_may_move(sampling: dict[str, Any]) -> None:
    one = replace(plan().request, sampling_options=SamplingOptions(**sampling))
    assert migration_blockers(one) == ""


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 2},
        {"best_of": 2},
        {"use_beam_search": True},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"guided_decoding": GuidedDecoding(regex="a+")},
    ],
)
def test_an_answer_with_state_outside_of_its_tokens_may_not_move(sampling: dict[str, Any]) -> None:
    one = replace(plan().request, sampling_options=SamplingOptions(**sampling))
    (named,) = sampling
    assert migration_blockers(one) == named.replace("guided_decoding", "guided decoding")


def test_a_prompt_that_is_not_tokens_may_not_move() -> None:
    assert migration_blockers(replace(plan().request, prompt_embeds="AA==")) == "prompt_embeds"


@pytest.mark.parametrize("name", ["logits_processors", "custom_logit_processor"])
def test_a_logits_processor_of_the_clients_own_may_not_move(name: str) -> None:
    one = replace(plan().request, extra_args={name: "module:Class"})
    assert "processor" in migration_blockers(one)
    assert migration_blockers(replace(one, extra_args={"chunked": True})) == ""


def test_what_pins_an_answer_is_named_in_its_error() -> None:
    one = plan()
    sampling = replace(one.request.sampling_options, presence_penalty=0.5, seed=1)
    life = begin(replace(one, request=replace(one.request, sampling_options=sampling)))
    life.run(11, [5]).lost(LOST)
    error = life.ports.outcome.error
    assert error is not None
    assert "presence_penalty" in error.message
    answer = http_error(error)
    assert answer.status == 503
    assert json.loads(answer.body)["error"]["code"] == "not_migratable"


def test_min_tokens_moves_for_what_was_generated_is_taken_off_it() -> None:
    life = begin(plan(min_tokens=3))
    life.run(11, [5, 6]).lost(LOST)
    life.run(12)
    moved = life.ports.leg_request.request
    assert moved is not None
    assert moved.stop_conditions.min_tokens == 1


# A loop that stood still


def test_time_that_the_frontend_lost_itself_is_not_held_against_a_worker() -> None:
    life = begin(replace(plan(), accept_timeout_s=1.0))
    life.ports.lost = 7.0
    life.place(11, now=10.0)
    life.ports.lost = 9.5  # the loop stood still for 2.5 s of the 2.6 since
    life.machine.on_timer(12.6)
    assert life.ports.aborted == [], "it may have accepted, unread"
    assert life.ports.wake == pytest.approx(13.5)
    life.machine.on_timer(13.5)
    assert [reason for _, reason in life.ports.aborted] == ["not_accepted"]


def test_a_deadline_is_the_clients_whoever_lost_the_time() -> None:
    life = begin()
    life.place(11)
    life.ports.lost = 50.0
    life.machine.on_timer(DEADLINE)
    assert isinstance(life.ports.outcome.error, DeadlineExceeded)


# Prefill and decode apart; the rest of it is in test_frontend_request_pair.py


def in_turn() -> tuple[Life, Leg]:
    """A request whose prefill, which completes first, was accepted."""
    one = plan()
    bare = replace(one.request, prefill_result=None, bootstrap_info=None)
    life = begin(replace(one, request=bare))
    life.machine.placed(0, RoutingDecision(20, prefill=Placement(10)), 0.0)
    life.ports.leg.accepted()
    return life, life.ports.leg


def test_an_answer_that_prefill_completes_keeps_its_logprobs() -> None:
    life, prefill = in_turn()
    prefill.tokens([5], [TokenLogprob(5, -0.1)])
    prefill.terminal(end_of(FinishReason.EOS))
    assert life.ports.emitted == [5]
    assert life.ports.logprobs == [TokenLogprob(5, -0.1)]
    assert life.ports.outcome.finish_reason is FinishReason.EOS


def test_prefills_answer_may_be_stopped_from_within_emit() -> None:
    life, prefill = in_turn()
    life.ports.on_emit = life.machine.stop
    prefill.tokens([5], ())
    prefill.terminal(end_of(FinishReason.EOS))
    assert life.ports.outcome.finish_reason is FinishReason.STOP


def test_a_decode_cancelled_at_its_worker_aborts_prefill_and_not_itself() -> None:
    life = begin()
    room = BootstrapInfo("h", 1, 2)
    life.machine.placed(0, RoutingDecision(20, prefill=Placement(10), bootstrap=room), 0.0)
    (_, _, prefill), (_, _, decode) = life.ports.submitted
    decode.accepted()
    decode.terminal(end_of(FinishReason.CANCELLED))
    assert life.ports.aborted == [(prefill, "peer_cancelled")]
    assert life.ports.outcome.finish_reason is FinishReason.CANCELLED


# Ends from outside


def not_started() -> Life:
    ports = Ports()
    return Life(RequestMachine(plan(), ports), ports)


def submitted() -> Life:
    life = begin()
    life.place(11)
    return life


def accepted() -> Life:
    life = begin()
    life.run(11)
    return life


def streaming() -> Life:
    life = begin()
    life.run(11, [5])
    return life


def moving() -> Life:
    life = streaming()
    life.ports.leg.lost(LOST)
    return life


def moved() -> Life:
    life = moving()
    life.run(12, [6])
    return life


# The state, the attempts freed, the legs aborted when it ends there.
STATES: list[tuple[Callable[[], Life], list[int], int]] = [
    (not_started, [], 0),
    (begin, [0], 0),
    (submitted, [0], 1),
    (accepted, [0], 1),
    (streaming, [0], 1),
    (moving, [0, 1], 0),
    (moved, [0, 1], 1),
]


def ends(
    life: Life, freed: list[int], aborts: int, reason: str, finish_reason: FinishReason
) -> RequestOutcome:
    """What every end from outside must have done; then what comes late is tried on it."""
    ports = life.ports
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
    machine = life.machine
    for attempt in range(-1, 3):
        machine.placed(attempt, RoutingDecision(77), 1.0)
        machine.placement_failed(attempt, Unavailable("late"))
    machine.start()
    machine.client_gone()
    machine.stop()
    machine.fail(InternalError("late"), "late")
    machine.on_timer(1000.0)
    assert ports.freed == freed
    return ports.outcome


@pytest.mark.parametrize(("state", "freed", "aborts"), STATES)
def test_a_client_that_goes_away_ends_the_request_in_every_state(
    state: Callable[[], Life], freed: list[int], aborts: int
) -> None:
    life = state()
    life.machine.client_gone("slow_reader")
    outcome = ends(life, freed, aborts, "slow_reader", FinishReason.CANCELLED)
    assert isinstance(outcome.error, RequestCancelled)


@pytest.mark.parametrize(("state", "freed", "aborts"), STATES)
def test_the_gateway_stops_the_request_well_in_every_state(
    state: Callable[[], Life], freed: list[int], aborts: int
) -> None:
    life = state()
    life.machine.stop()
    life.machine.on_timer(USAGE_WAIT_S)  # where a worker was to say what was cached: it did not
    outcome = ends(life, freed, aborts, "stop_string", FinishReason.STOP)
    assert outcome.error is None


@pytest.mark.parametrize(("state", "freed", "aborts"), STATES)
def test_the_gateway_fails_the_request_in_every_state(
    state: Callable[[], Life], freed: list[int], aborts: int
) -> None:
    life = state()
    error = Unavailable("draining")
    life.machine.fail(error, "drain")
    assert ends(life, freed, aborts, "drain", FinishReason.ERROR).error is error


@pytest.mark.parametrize(("state", "freed", "aborts"), STATES[1:])
def test_the_deadline_ends_the_request_in_every_state(
    state: Callable[[], Life], freed: list[int], aborts: int
) -> None:
    life = state()
    assert life.ports.wake is not None
    assert life.ports.wake <= DEADLINE
    life.machine.on_timer(DEADLINE)
    outcome = ends(life, freed, aborts, "deadline", FinishReason.ERROR)
    assert isinstance(outcome.error, DeadlineExceeded)


def test_the_gateway_may_stop_the_request_from_within_emit() -> None:
    life = begin()
    life.ports.on_emit = life.machine.stop
    leg = life.run(11, [5, 6])
    leg.tokens([7], ())
    assert life.ports.emitted == [5, 6]
    leg.terminal(end_of(FinishReason.CANCELLED))
    assert life.ports.outcome.finish_reason is FinishReason.STOP
    assert life.ports.aborted == [(leg, "stop_string")]


def stopped() -> tuple[Life, Leg]:
    """A stop string ended the answer; its worker was told, and has not said anything yet."""
    life = begin()
    leg = life.run(11, [5, 6], now=5.0)
    life.machine.stop()
    assert life.ports.aborted == [(leg, "stop_string")]
    assert life.ports.freed == [0], "it holds nothing any more"
    assert life.ports.outcomes == []
    return life, leg


def test_an_answer_that_a_stop_string_ended_waits_for_what_was_cached() -> None:
    life, leg = stopped()
    leg.tokens([7], ())  # it was on its way
    leg.terminal(end_of(FinishReason.CANCELLED, cached_tokens=2))
    outcome = life.ports.outcome
    assert (outcome.finish_reason, outcome.error) == (FinishReason.STOP, None)
    details = PromptTokensDetails(cached_tokens=2)
    assert outcome.usage == replace(usage(3, 2), prompt_tokens_details=details)
    assert life.ports.emitted == [5, 6]


def test_the_wait_for_what_was_cached_is_bounded() -> None:
    life, _ = stopped()
    assert life.ports.wake == 5.0 + USAGE_WAIT_S
    life.machine.on_timer(5.0 + USAGE_WAIT_S - 0.01)
    assert life.ports.outcomes == []
    life.machine.on_timer(5.0 + USAGE_WAIT_S)
    assert (life.ports.outcome.finish_reason, life.ports.outcome.error) == (FinishReason.STOP, None)
    assert life.ports.outcome.usage == usage(3, 2)


@pytest.mark.parametrize(
    "fail",
    [
        lambda leg: leg.lost(LOST),
        lambda leg: leg.terminal(end_of(None, error=InternalError("the engine failed"))),
    ],
)
def test_an_answer_that_a_stop_string_ended_stays_complete_when_its_worker_fails(
    fail: Callable[[Leg], None],
) -> None:
    life, leg = stopped()
    fail(leg)
    assert (life.ports.outcome.finish_reason, life.ports.outcome.error) == (FinishReason.STOP, None)
    assert life.ports.places == [(0, frozenset())]


def test_the_deadline_does_not_undo_an_answer_that_a_stop_string_ended() -> None:
    life = begin()
    life.run(11, [5], now=DEADLINE - USAGE_WAIT_S / 2)
    life.machine.stop()
    life.machine.on_timer(DEADLINE)
    assert (life.ports.outcome.finish_reason, life.ports.outcome.error) == (FinishReason.STOP, None)


def test_an_answer_that_a_stop_string_ended_is_not_undone_by_a_gateway_that_must_end() -> None:
    life, _ = stopped()
    life.machine.fail(Unavailable("it drains"), "drain")
    assert (life.ports.outcome.finish_reason, life.ports.outcome.error) == (FinishReason.STOP, None)


@pytest.mark.parametrize(("second_says", "told"), [(2, 2), (496, len(PROMPT))])
def test_what_was_generated_before_a_move_counts_as_no_cached_prompt(
    second_says: int, told: int
) -> None:
    life = begin(plan(max_tokens=None))
    life.run(11, list(range(500))).lost(LOST)
    second = life.run(12, [9])
    second.terminal(end_of(cached_tokens=second_says))
    details = PromptTokensDetails(cached_tokens=told)
    assert life.ports.outcome.usage == replace(usage(3, 501), prompt_tokens_details=details)


def test_events_of_dead_legs_are_not_heard() -> None:
    life = begin()
    first = life.run(11, [5])
    first.lost(LOST)
    second = life.run(12)
    first.tokens([66], ())
    first.terminal(end_of())
    first.lost(LOST)
    first.rejected(Overloaded())
    assert second.is_live
    second.tokens([6], ())
    second.terminal(end_of())
    second.terminal(end_of())
    assert life.ports.emitted == [5, 6]


def test_a_placement_nobody_waits_for_is_ignored() -> None:
    life = begin()
    life.place(11)
    life.machine.placed(0, RoutingDecision(12), 0.0)
    life.machine.placement_failed(0, Unavailable("late"))
    assert len(life.ports.submitted) == 1
    life.ports.leg.lost(LOST)
    life.machine.placed(0, RoutingDecision(12), 0.0)
    life.machine.placement_failed(0, Unavailable("late"))
    assert len(life.ports.submitted) == 1
    assert not life.ports.outcomes


# Any order of events


class Lives(RuleBasedStateMachine):
    """Random events in random order, held against the invariants of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.next_token = 1000
        self.next_worker = 10
        self.delivered: list[int] = []
        self.failed_workers: set[int] = set()
        self.placed: list[int] = []
        self.refused: list[int] = []
        self.life: Life | None = None
        self.one = plan()
        self.is_stopped = False

    @precondition(lambda self: self.life is None)
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
        self.life = begin(self.one)

    @property
    def alive(self) -> Life:
        assert self.life is not None
        return self.life

    @property
    def ports(self) -> Ports:
        return self.alive.ports

    def awaited(self) -> int | None:
        """The attempt whose placement the machine waits for."""
        attempt = self.ports.places[-1][0]
        answered = attempt in self.placed or attempt in self.refused
        return None if answered or self.ports.outcomes else attempt

    @precondition(lambda self: self.life is not None and self.awaited() is not None)
    @rule(count=st.integers(1, 4))
    def goes_on(self, count: int) -> None:
        """The next leg gets somewhere: without this, few runs come as far as a migration."""
        self.router_answers(0, 1)
        self.leg_is_accepted(8)
        self.leg_delivers(8, count)

    @precondition(lambda self: self.life is not None)
    @rule(attempt=st.integers(-1, 4), works=st.integers(0, 9))
    def router_answers(self, attempt: int, works: int) -> None:
        awaited = self.awaited()
        if works and awaited is not None:
            attempt = awaited
        before = len(self.ports.submitted)
        if works:
            self.next_worker += 1
            self.alive.machine.placed(attempt, RoutingDecision(self.next_worker), self.now)
        else:
            self.alive.machine.placement_failed(attempt, Unavailable("none"))
        if attempt != awaited:
            assert len(self.ports.submitted) == before
            return
        (self.placed if works else self.refused).append(attempt)
        if works:
            self.check_order(self.ports.leg_request)

    def check_order(self, one: LegRequest) -> None:
        request, asked = one.request, self.one.request
        assert request is not None
        assert request.token_ids.tolist() == PROMPT + self.delivered
        done, limit = len(self.delivered), asked.stop_conditions.max_tokens
        if limit is None:
            assert request.stop_conditions.max_tokens is None
        else:
            assert request.stop_conditions.max_tokens == limit - done
            assert limit > done or not done, "a leg with nothing left to do"
        least = asked.stop_conditions.min_tokens
        assert request.stop_conditions.min_tokens == (least and max(0, least - done))
        assert one.timeout_s == max(0.001, DEADLINE - self.now)

    def some_leg(self, which: int) -> Leg | None:
        """The last leg most of the time, or an older one."""
        legs = [leg for _, _, leg in self.ports.submitted]
        return legs[-1 if which > len(legs) else -which] if legs else None

    @precondition(lambda self: self.life is not None)
    @rule(which=st.integers(1, 8))
    def leg_is_accepted(self, which: int) -> None:
        leg = self.some_leg(which)
        if leg is not None:
            leg.accepted()

    @precondition(lambda self: self.life is not None)
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

    @precondition(lambda self: self.life is not None)
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

    @precondition(lambda self: self.life is not None)
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
            told = FinishReason.STOP if self.is_stopped else finish_reason
            assert not was_live or self.ports.outcome.finish_reason is told

    @precondition(lambda self: self.life is not None)
    @rule(way=st.sampled_from(["client_gone", "stop", "fail"]), rarely=st.integers(0, 5))
    def ends_from_outside(self, way: str, rarely: int) -> None:
        if rarely:
            return
        machine = self.alive.machine
        if way == "fail":
            machine.fail(InternalError("gateway"), "gateway")
        else:
            getattr(machine, way)()
        # Who was accepted may still say what was cached.
        leg = self.some_leg(1)
        waits = way == "stop" and leg is not None and leg.is_live and leg.is_accepted
        self.is_stopped |= waits
        assert waits or self.ports.outcome

    @precondition(lambda self: self.life is not None)
    @rule(by=st.sampled_from([0.1, 0.5, 1.0, 5.0, 40.0]))
    def time_passes(self, by: float) -> None:
        """Timers go off when they are due, and now and then for nothing."""
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
    def holds(self) -> None:
        if self.life is None:
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
        self.check_books()

    def check_books(self) -> None:
        ports = self.ports
        assert len(ports.freed) == len(set(ports.freed))
        held = [a for a in self.placed if a not in ports.freed]
        live = [leg.attempt for _, _, leg in ports.submitted if leg.is_live]
        assert held == ([] if self.is_stopped else live), "exactly the live leg's booking is held"
        assert not set(self.refused) & set(ports.freed)
        if ports.outcomes:
            outcome = ports.outcome
            assert outcome.attempts == len(ports.places)
            assert outcome.usage == usage(len(PROMPT), len(self.delivered))
            failed = outcome.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED)
            assert (outcome.error is not None) == failed

    def teardown(self) -> None:
        if self.life is not None:
            self.alive.machine.on_timer(DEADLINE)
            assert self.ports.outcome
            self.check_books()
            asked = {attempt for attempt, _ in self.ports.places}
            assert set(self.ports.freed) == asked - set(self.refused)


@pytest.mark.slow
def test_no_order_of_events_breaks_an_invariant() -> None:
    bounds = settings(max_examples=150, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(Lives, settings=bounds)
