"""Prefill and decode as one transaction of the request machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import MeshError, Overloaded, Unavailable, WorkerLost
from common.request.placement import Decision, Placement
from common.request.preprocessed import (
    BootstrapInfo,
    FinishReason,
    PrefillResult,
    PreprocessedRequest,
    PromptTokensDetails,
    StopConditions,
    TokenIds,
    TokenLogprob,
    usage,
)
from common.request.token_stream import LegRequest, Terminal
from frontend_svc.errors import http_error
from frontend_svc.request.leg import Leg
from frontend_svc.request.machine import ACCEPT_RECHECK_S, USAGE_WAIT_S, RequestMachine
from frontend_svc.request.types import RequestOutcome, RequestPlan
from tests.kit.placements import decided

PEER_FAULT_REASONS = "HANDOFF_PEER_LOST"
NO_BLOCKS = "HANDOFF_NO_BLOCKS"
PREFILL, DECODE = 21, 22
TRACE = "0af7651916cd43dd8448eb211c80319c"
ROOM = BootstrapInfo(bootstrap_host="127.0.0.1", bootstrap_port=9, bootstrap_room=77)
PAIR = decided(DECODE, prefill=Placement(PREFILL), bootstrap=ROOM)
IN_TURN = decided(DECODE, prefill=Placement(PREFILL))
HANDLE = PrefillResult(disaggregated_params={"handle": 1})


@dataclass
class Ports:
    """Records each call, and fails on a call after the end."""

    places: list[tuple[int, frozenset[int]]] = field(default_factory=list)
    legs: list[tuple[Leg, LegRequest]] = field(default_factory=list)
    aborted: list[tuple[str, str]] = field(default_factory=list)
    prefills: list[int] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)
    wake: float = 0.0
    time: float = 0.0
    may_retry: bool = True
    silent: dict[int, float] = field(default_factory=dict)

    def members(self) -> tuple[frozenset[int], frozenset[int]]:
        return frozenset(), frozenset()

    def take_permit(self) -> bool:
        return True

    def wait_for_worker(self, until: float) -> None:
        raise AssertionError("no request waits here")

    def place(self, attempt: int, excluded: frozenset[int]) -> None:
        assert not self.outcomes
        self.places.append((attempt, excluded))

    def submit(self, worker_id: int, leg_request: LegRequest, leg: Leg) -> None:
        assert not self.outcomes
        assert worker_id == leg.worker_id
        self.legs.append((leg, leg_request))

    def abort_leg(self, leg: Leg, reason: str) -> None:
        assert not self.outcomes
        self.aborted.append((leg.phase, reason))

    def prefill_done(self, attempt: int) -> None:
        self.prefills.append(attempt)

    def free(self, attempt: int) -> None:
        assert attempt not in self.freed
        self.freed.append(attempt)

    def emit(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        assert not self.outcomes
        self.emitted += token_ids

    def emit_chunk(self, json: bytes) -> None:
        raise AssertionError("no pass-through body here")

    def finish(self, outcome: RequestOutcome) -> None:
        assert not self.outcomes
        self.outcomes.append(outcome)

    def wake_at(self, at: float) -> None:
        self.wake = at

    def now(self) -> float:
        return self.time

    def has_left(self, worker_id: int) -> bool:
        return False

    def take_retry(self, error: MeshError) -> bool:
        return self.may_retry

    def stalled_s(self) -> float:
        return 0.0

    def worker_failed(self, worker_id: int) -> None:
        pass

    def silent_s(self, worker_id: int) -> float:
        return self.silent.get(worker_id, math.inf)

    def last(self, phase: str) -> tuple[Leg, LegRequest]:
        return next(pair for pair in reversed(self.legs) if pair[0].phase == phase)


def begin(
    placed: Decision, *, max_tokens: int | None = 8, trace_id: str = ""
) -> tuple[RequestMachine, Ports]:
    request = PreprocessedRequest(
        token_ids=TokenIds.of([1, 2, 3]),
        stop_conditions=StopConditions(max_tokens=max_tokens, min_tokens=2),
    )
    plan = RequestPlan("r", request, deadline=100.0, trace_id=trace_id)
    ports = Ports()
    machine = RequestMachine(plan, ports, Random(1))
    machine.start()
    machine.placed(0, placed, 0.0)
    return machine, ports


def end(reason: FinishReason = FinishReason.LENGTH, cached: int | None = None) -> Terminal:
    counts = None
    if cached is not None:
        details = PromptTokensDetails(cached_tokens=cached)
        counts = replace(usage(3, 1), prompt_tokens_details=details)
    return Terminal(1, reason, usage=counts)


def test_with_a_bootstrap_both_legs_start_at_once_and_prefill_generates_one_token() -> None:
    _, ports = begin(PAIR)
    assert [leg.phase for leg, _ in ports.legs] == ["prefill", "decode"]
    prefill, decode = (leg_request.changed_request() for _, leg_request in ports.legs)
    assert prefill is not None
    assert decode is not None
    assert prefill.bootstrap_info == decode.bootstrap_info == ROOM
    assert prefill.stop_conditions == StopConditions(max_tokens=1, min_tokens=1)
    assert decode.stop_conditions == StopConditions(max_tokens=8, min_tokens=2)
    assert ports.wake == 1.0, "a pair has one second to accept"


def test_a_slow_but_responsive_worker_of_a_pair_has_longer_to_accept() -> None:
    machine, ports = begin(PAIR)
    (prefill, _), _ = ports.legs
    prefill.accepted()
    ports.silent[DECODE] = 0.1
    machine.on_timer(1.0)
    assert ports.aborted == [], "the worker sends frames all the time"
    assert ports.wake == 1.0 + ACCEPT_RECHECK_S
    machine.on_timer(2.9)
    assert ports.wake == 3.0, "no longer than a single worker"
    machine.on_timer(3.0)
    assert [reason for _, reason in ports.aborted] == ["not_accepted"] * 2


@pytest.mark.parametrize("silent", [{DECODE: 0.7}, {}], ids=["silent since", "no frame yet"])
def test_a_silent_worker_of_a_pair_has_one_second_to_accept(silent: dict[int, float]) -> None:
    machine, ports = begin(PAIR)
    (prefill, _), _ = ports.legs
    prefill.accepted()
    ports.silent = {PREFILL: 0.0, **silent}
    machine.on_timer(1.0)
    assert [reason for _, reason in ports.aborted] == ["not_accepted"] * 2
    assert ports.places[-1] == (1, frozenset({DECODE}))


def cached_tokens_of(outcome: RequestOutcome) -> int | None:
    details = outcome.usage.prompt_tokens_details
    return None if details is None else details.cached_tokens


def complete_before_prefill(decode_cached: int | None = None) -> tuple[RequestMachine, Ports, Leg]:
    """The response is complete, the terminal of prefill is missing."""
    machine, ports = begin(PAIR)
    (prefill, _), (decode, _) = ports.legs
    prefill.accepted()
    decode.accepted()
    ports.time = 5.0
    decode.tokens([5, 6], ())
    decode.terminal(end(FinishReason.EOS, cached=decode_cached))
    return machine, ports, prefill


def test_a_complete_response_waits_for_the_cached_tokens_of_prefill() -> None:
    _, ports, prefill = complete_before_prefill(decode_cached=0)
    assert ports.emitted == [5, 6], "the client has all tokens"
    assert ports.outcomes == []
    assert ports.wake == 5.0 + USAGE_WAIT_S
    prefill.tokens([5], ())
    prefill.terminal(end(cached=2))
    (outcome,) = ports.outcomes
    assert (outcome.finish_reason, outcome.error) == (FinishReason.EOS, None)
    assert cached_tokens_of(outcome) == 2
    assert ports.freed == [0]
    assert ports.aborted == []


@pytest.mark.parametrize("decode_cached", [None, 3])
def test_the_wait_for_prefill_is_bounded_and_decodes_cached_tokens_are_the_fallback(
    decode_cached: int | None,
) -> None:
    machine, ports, prefill = complete_before_prefill(decode_cached)
    machine.on_timer(ports.wake - 0.01)
    assert ports.outcomes == []
    machine.on_timer(ports.wake)
    (outcome,) = ports.outcomes
    assert (outcome.finish_reason, cached_tokens_of(outcome)) == (FinishReason.EOS, decode_cached)
    prefill.terminal(end(cached=2))  # too late, ignored


def test_a_complete_response_stays_complete_if_prefill_fails_afterwards() -> None:
    _, ports, prefill = complete_before_prefill()
    prefill.lost(WorkerLost("gone", retryable=True))
    (outcome,) = ports.outcomes
    assert (outcome.finish_reason, outcome.error, outcome.attempts) == (FinishReason.EOS, None, 1)


def test_a_complete_response_stays_complete_during_a_drain() -> None:
    machine, ports, _ = complete_before_prefill()
    machine.fail(Unavailable("it drains"), "drain")
    (outcome,) = ports.outcomes
    assert (outcome.finish_reason, outcome.error) == (FinishReason.EOS, None)


def test_a_stop_string_in_the_last_tokens_of_a_pair_still_waits_for_prefill() -> None:
    machine, ports, prefill = complete_before_prefill(decode_cached=0)
    machine.stop()
    assert ports.outcomes == []
    prefill.terminal(end(cached=2))
    (outcome,) = ports.outcomes
    assert (outcome.finish_reason, cached_tokens_of(outcome)) == (FinishReason.STOP, 2)


def test_a_stop_string_ends_decode_at_once_and_waits_for_prefill() -> None:
    machine, ports = begin(PAIR)
    (prefill, _), (decode, _) = ports.legs
    prefill.accepted()
    decode.accepted()
    decode.tokens([5, 6], ())
    machine.stop()
    decode.tokens([7], ())
    decode.terminal(end(FinishReason.CANCELLED, cached=0))
    assert ports.outcomes == []
    prefill.terminal(end(FinishReason.CANCELLED, cached=2))
    (outcome,) = ports.outcomes
    assert (outcome.finish_reason, cached_tokens_of(outcome)) == (FinishReason.STOP, 2)
    assert ports.emitted == [5, 6]
    assert ports.freed == [0]
    assert [phase for phase, _ in ports.aborted] == ["prefill", "decode"]


def test_a_disconnect_during_the_wait_for_prefill_ends_prefill_too() -> None:
    machine, ports, _ = complete_before_prefill()
    machine.abort()
    assert ports.aborted == [("prefill", "client_gone")]
    assert ports.freed == [0]
    assert len(ports.outcomes) == 1


def test_tokens_come_from_decode_and_cached_tokens_from_prefill() -> None:
    _, ports = begin(PAIR)
    (prefill, _), (decode, _) = ports.legs
    prefill.accepted()
    decode.accepted()
    prefill.tokens([5], ())
    prefill.terminal(end(cached=2))
    assert ports.emitted == []
    assert ports.prefills == [0]
    decode.tokens([5, 6], ())
    decode.terminal(end(FinishReason.EOS, cached=0))
    assert ports.emitted == [5, 6]
    assert ports.prefills == [0], "reported once"
    assert ports.freed == [0]
    details = ports.outcomes[0].usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == 2
    assert ports.outcomes[0].worker_ids == (PREFILL, DECODE)


def test_without_a_bootstrap_decode_starts_with_the_result_of_prefill() -> None:
    _, ports = begin(IN_TURN)
    assert [leg.phase for leg, _ in ports.legs] == ["prefill"]
    prefill = ports.legs[0][0]
    prefill.accepted()
    prefill.tokens([5], ())
    ports.time = 7.0
    prefill.terminal(replace(end(), prefill_result=HANDLE))
    decode, leg_request = ports.legs[1]
    assert decode.phase == "decode"
    assert leg_request.changes.get("prefill_result") == HANDLE
    assert leg_request.timeout_s == 93.0
    assert ports.wake == 10.0, "decode has the whole acceptance timeout"
    decode.tokens([5, 6], ())
    decode.terminal(end())
    assert ports.emitted == [5, 6]


@pytest.mark.parametrize("reason", [FinishReason.EOS, FinishReason.STOP])
def test_a_prefill_that_finishes_at_token_one_is_the_whole_response(reason: FinishReason) -> None:
    _, ports = begin(IN_TURN)
    prefill = ports.legs[0][0]
    prefill.tokens([5], ())
    prefill.terminal(replace(end(reason), prefill_result=HANDLE))
    assert ports.emitted == [5]
    assert ports.outcomes[0].finish_reason is reason
    assert len(ports.legs) == 1


def test_a_response_of_one_token_still_uses_decode_or_its_handoff_would_wait() -> None:
    _, ports = begin(IN_TURN, max_tokens=1)
    prefill = ports.legs[0][0]
    prefill.tokens([5], ())
    prefill.terminal(replace(end(), prefill_result=HANDLE))
    assert ports.emitted == []
    decode, leg_request = ports.legs[1]
    request = leg_request.changed_request()
    assert request is not None
    assert request.stop_conditions.max_tokens == 1
    decode.tokens([5], ())
    decode.terminal(end())
    assert ports.emitted == [5]


def test_a_prefill_without_a_result_is_retried_on_another_worker() -> None:
    _, ports = begin(IN_TURN)
    ports.legs[0][0].terminal(end())
    assert ports.places[-1] == (1, frozenset({PREFILL}))
    assert ports.freed == [0]


def test_the_failure_of_prefill_ends_decode_and_both_are_retried() -> None:
    machine, ports = begin(PAIR)
    (prefill, _), (decode, _) = ports.legs
    prefill.lost(WorkerLost("gone", retryable=True))
    assert ports.aborted == [("decode", "peer_failed")]
    assert ports.freed == [0]
    assert ports.places[-1] == (1, frozenset({PREFILL}))
    decode.tokens([9], ())
    assert ports.emitted == [], "events of dead legs are ignored"
    machine.placed(1, PAIR, 3.0)
    assert len(ports.legs) == 4


def test_the_failure_of_decode_aborts_prefill() -> None:
    _, ports = begin(PAIR)
    ports.legs[1][0].lost(WorkerLost("gone", retryable=True))
    assert ports.aborted == [("prefill", "peer_failed")]
    assert ports.places[-1] == (1, frozenset({DECODE}))


@pytest.mark.parametrize(("failing", "blamed"), [(0, DECODE), (1, PREFILL)])
def test_a_leg_that_lost_its_peer_excludes_the_peer(failing: int, blamed: int) -> None:
    _, ports = begin(PAIR)
    ports.legs[failing][0].terminal(
        Terminal(1, None, error=Unavailable("no peer", reason=PEER_FAULT_REASONS))
    )
    assert ports.places[-1] == (1, frozenset({blamed}))


def full() -> Terminal:
    error = Overloaded(10.0, "no KV blocks to spare", reason=NO_BLOCKS)
    return Terminal(1, None, error=error)


def test_a_decode_worker_without_blocks_is_excluded_and_prefill_is_not() -> None:
    machine, ports = begin(PAIR)
    for attempt in range(3):
        ports.last("decode")[0].terminal(full())
        assert ports.places[-1] == (attempt + 1, frozenset({DECODE}))
        machine.placed(attempt + 1, PAIR, ports.now())
    ports.last("decode")[0].terminal(full())
    (outcome,) = ports.outcomes
    assert outcome.attempts == 4
    assert outcome.error is not None
    answer = http_error(outcome.error)
    assert (answer.status, ("retry-after", "10") in answer.headers) == (503, True)
    assert b"overloaded" in answer.body


def test_a_decode_without_a_handoff_excludes_the_prefill_worker_that_ended() -> None:
    _, ports = begin(IN_TURN)
    ports.legs[0][0].terminal(replace(end(), prefill_result=HANDLE))
    ports.legs[1][0].terminal(
        Terminal(1, None, error=Unavailable("gone", reason=PEER_FAULT_REASONS))
    )
    assert ports.places[-1] == (1, frozenset({PREFILL}))


def test_after_decodes_first_token_a_failure_of_prefill_is_ignored() -> None:
    _, ports = begin(PAIR)
    (prefill, _), (decode, _) = ports.legs
    decode.tokens([5], ())
    prefill.lost(WorkerLost("gone", retryable=True))
    decode.tokens([6], ())
    decode.terminal(end())
    assert ports.emitted == [5, 6]
    assert ports.outcomes[0].error is None
    assert ports.aborted == []


def test_a_pair_that_is_not_accepted_in_time_is_aborted_prefill_first() -> None:
    machine, ports = begin(PAIR)
    ports.legs[0][0].accepted()
    machine.on_timer(1.0)
    assert ports.aborted == [("prefill", "not_accepted"), ("decode", "not_accepted")]
    assert ports.places[-1] == (1, frozenset({DECODE})), (
        "only the worker that did not accept is excluded"
    )


def test_a_disconnect_ends_both_legs_prefill_first() -> None:
    machine, ports = begin(PAIR)
    machine.abort()
    assert ports.aborted == [("prefill", "client_gone"), ("decode", "client_gone")]
    assert ports.freed == [0]


def test_decodes_span_links_to_prefill_and_a_retrys_to_the_failed_decode() -> None:
    machine, ports = begin(PAIR, trace_id=TRACE)
    (prefill, first), (decode, second) = ports.legs
    assert first.span_id == prefill.span_id
    assert len(prefill.span_id) == 16
    assert "migration_link" not in first.changes
    link = second.changes.get("migration_link")
    assert link is not None
    assert (link.trace_id, link.span_id) == (TRACE, prefill.span_id)
    decode.tokens([5], ())
    decode.lost(WorkerLost("gone", retryable=True))
    machine.placed(1, PAIR, 3.0)
    retried, leg_request = ports.last("prefill")
    link = leg_request.changes.get("migration_link")
    assert link is not None
    assert link.span_id == decode.span_id
    again = ports.last("decode")[1].changes.get("migration_link")
    assert again is not None
    assert again.span_id == retried.span_id


def test_a_lost_decode_continues_with_prompt_and_generated_tokens() -> None:
    machine, ports = begin(PAIR)
    ports.legs[1][0].tokens([5, 6], ())
    ports.legs[1][0].lost(WorkerLost("gone", retryable=True))
    machine.placed(1, decided(30), 3.0)
    request = ports.last("")[1].changed_request()
    assert request is not None
    assert list(request.token_ids) == [1, 2, 3, 5, 6]
    assert request.stop_conditions.max_tokens == 6
    assert request.bootstrap_info is None


def test_a_retry_beyond_the_budget_fails_with_a_retry_delay() -> None:
    _, ports = begin(PAIR)
    ports.may_retry = False
    ports.legs[0][0].lost(WorkerLost("gone", retryable=True))
    error = ports.outcomes[0].error
    assert isinstance(error, Unavailable)
    assert error.reason == "RETRY_BUDGET"
    assert error.retry_after_s == 1.0
    assert ports.freed == [0]


EVENTS = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from(["prefill", "decode"]), st.integers(1, 3)),
    max_size=40,
)


@settings(max_examples=300)
@given(events=EVENTS, bootstrap=st.booleans())
def test_no_order_of_events_breaks_the_transaction(
    events: list[tuple[int, str, int]], bootstrap: bool
) -> None:
    placed = PAIR if bootstrap else IN_TURN
    machine, ports = begin(placed, trace_id=TRACE)
    error: MeshError = WorkerLost("gone", retryable=True)
    for kind, phase, count in events:
        legs = [leg for leg, _ in ports.legs if leg.phase == phase]
        leg = legs[-count] if len(legs) >= count else None
        match kind:
            case 0 if leg is not None:
                leg.accepted()
            case 1 if leg is not None:
                leg.tokens(list(range(count)), ())
            case 2 if leg is not None:
                leg.terminal(replace(end(), prefill_result=HANDLE))
            case 3 if leg is not None:
                leg.lost(error)
            case 4:
                machine.placed(ports.places[-1][0], placed, 0.0)
            case 5:
                machine.on_timer(1.0 * count)
            case 6 if count == 3:
                machine.abort()
            case 6 if count == 2:
                machine.stop()
            case 7 if leg is not None:
                leg.terminal(Terminal(1, None, error=Unavailable("x", reason=PEER_FAULT_REASONS)))
        live = [one for one, _ in ports.legs if one.is_live]
        assert len(live) <= 2
        assert {one.attempt for one in live} <= {ports.places[-1][0]}
        assert machine.generated == ports.emitted
    machine.abort()
    assert len(ports.outcomes) == 1
    assert not [one for one, _ in ports.legs if one.is_live]
    assert sorted(ports.freed) == [attempt for attempt, _ in ports.places]
