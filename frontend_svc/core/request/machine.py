"""One request's life: its legs, deadline, retries and migration (pure).

The machine hears of placements, of its legs (it gives `Leg` objects out as slot sinks) and of time,
and says what to do through `RequestPorts`. It holds no socket, task or clock.

An attempt has one leg, or two when prefill and decode are apart: a prefill leg, whose token only
proves that the prompt is computed, and a decode leg, whose tokens are the answer. With a bootstrap
rendezvous both start at once; without, decode starts with what prefill's end hands over. They are
one transaction: the failure of either ends both and the whole is tried again, until decode has
delivered, for then the prompt's KV has arrived and prefill's fate is its own.

Whoever computed the prompt knows how much of it was cached, and says so when its leg ends: an
answer that is complete before (decode's, or one that a stop string ended) waits LAST_WORD_S for it.

Invariants: `finish` is called exactly once and nothing is emitted after it; the tokens emitted are
the concatenation of what main legs delivered, nothing lost, repeated or reordered; at most one
attempt is live; every attempt that was placed is freed exactly once; a worker that failed the
request is asked again only when nobody else is left; prefill is told of an abort before decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, Protocol

from common.errors import (
    DeadlineExceeded,
    MeshError,
    RequestCancelled,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from common.request.preprocessed import (
    BootstrapInfo,
    CompletionUsage,
    FinishReason,
    PrefillResult,
    PreprocessedRequest,
    PromptTokensDetails,
    RoutingHints,
    TokenLogprob,
    TraceLink,
    usage,
)
from common.request.token_stream import LegRequest, Terminal

# A leg that fails so blames the other leg's worker, not its own.
PEER_FAULT_REASONS = frozenset(
    {"HANDOFF_NO_PARTNER", "HANDOFF_PEER_ABORTED", "HANDOFF_PEER_LOST", "TRANSFER_EXPIRED"}
)
# The router's word for "all that could serve it are excluded".
ALL_EXCLUDED = "ALL_EXCLUDED"
# The error of an answer that had begun and cannot go on elsewhere.
NOT_MIGRATABLE = "NOT_MIGRATABLE"
# A worker heard from so lately is there, and only slow: it has `accept_timeout_s`, also in a pair.
RESPONSIVE_WITHIN_S = 0.5
# How soon a slow one is looked at again.
ACCEPT_RECHECK_S = 0.25
# How long an answer that is complete waits to hear what of its prompt was cached.
USAGE_WAIT_S = 0.2


@dataclass(frozen=True, slots=True)
class PassThroughPayload:
    """A client's body that goes to the worker as it is; `field` of `LegRequest` carries it."""

    field: Literal["chat_json", "completion_json"]
    json: bytes


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What is fixed for a request's whole life.

    deadline: on the clock that `now` arguments use, seconds. migratable: whether the request's
    owner lets a started answer go on elsewhere; `migration_blockers` may still forbid it.
    attempts_max:
    tries, the first included. accept_s: how long a worker may take to accept before another one is
    asked; pair_accept_s: the same where two have to, for one that is silent. trace_id: 32 hex
    digits, "" when not sampled. body: sent in place of the request; then chunks come back, and
    nothing is known of tokens.
    """

    request_id: str
    request: PreprocessedRequest
    deadline: float
    migratable: bool = True
    attempts_max: int = 4
    accept_timeout_s: float = 3.0
    pair_accept_timeout_s: float = 1.0
    traceparent: str = ""
    trace_id: str = ""
    tenant: str = ""
    priority: int | None = None
    body: PassThroughPayload | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker and one of its ranks. address: where the router knows it, "" if it does not say."""

    worker_id: int
    dp_rank: int = 0
    address: str = ""


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """The router's answer, as far as the machine needs it.

    worker_id: where the whole request, or its decode, runs. prefill: where its prefill runs, None
    when it is not split. bootstrap: how the two meet; None: prefill completes first. is_unrouted:
    no router said so, and nothing was predicted. address: of worker_id, as in Place.
    """

    worker_id: int
    dp_rank: int = 0
    overlap_blocks: int = 0
    predicted_cached_tokens: int = 0
    reasons: tuple[str, ...] = ()
    prefill: Placement | None = None
    bootstrap: BootstrapInfo | None = None
    is_unrouted: bool = False
    address: str = ""


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How a request ended. error: why it failed, else None. usage: as the client is to see it.

    worker_ids: who was asked, in order.
    """

    finish_reason: FinishReason | None
    error: MeshError | None
    usage: CompletionUsage
    attempts: int
    worker_ids: tuple[int, ...]
    placed: RoutingDecision | None


def migration_blockers(request: PreprocessedRequest) -> str:
    """What keeps a started answer at its worker, "" if nothing: it may go on elsewhere.

    Where prompt + generated tokens do not say all that an engine needs to go on: guided decoding
    (the grammar's state), several choices or beams, penalties (they count the output apart from
    the prompt; no engine takes an output prefix yet), custom logits processors (their state), and
    prompt_embeds (a prompt that cannot be made longer by ids). min_tokens moves: what was
    generated is taken off it.
    """
    sampling = request.sampling_options
    blockers = {
        "guided decoding": sampling.guided_decoding is not None,
        "n": sampling.n not in (None, 1),
        "best_of": sampling.best_of not in (None, 1),
        "use_beam_search": bool(sampling.use_beam_search),
        "presence_penalty": bool(sampling.presence_penalty),
        "frequency_penalty": bool(sampling.frequency_penalty),
        "repetition_penalty": sampling.repetition_penalty not in (None, 1.0),
        "a custom logits processor": has_custom_logits_processor(request),
        "prompt_embeds": request.prompt_embeds is not None,
    }
    return ", ".join(name for name, is_blocking in blockers.items() if is_blocking)


def has_custom_logits_processor(request: PreprocessedRequest) -> bool:
    """Whether engine-specific arguments name a logits processor of the client's own."""
    extra = request.extra_args
    return isinstance(extra, dict) and any("processor" in key for key in extra)


class RequestPorts(Protocol):
    """What the machine asks of its surroundings. No call blocks; answers come as events."""

    def place(self, attempt: int, excluded: frozenset[int]) -> None:
        """Ask the router; answer with `placed` or `placement_failed` of the same attempt."""

    def submit(self, worker_id: int, leg_request: LegRequest, leg: Leg) -> None:
        """Submit an order; `leg` is its sink, told of what comes of it later, never from here."""

    def abort(self, leg: Leg, reason: str) -> None:
        """End a leg that was submitted."""

    def prefill_done(self, attempt: int) -> None:
        """Tell the router that the first token is there."""

    def free(self, attempt: int) -> None:
        """Tell the router that the attempt holds nothing any more."""

    def emit(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Tokens for the client."""

    def emit_chunk(self, json: bytes) -> None:
        """A chunk for the client, of a body that was passed through."""

    def finish(self, outcome: RequestOutcome) -> None:
        """The end."""

    def wake_at(self, at: float) -> None:
        """Call `on_timer` at that time; an earlier wish is replaced."""

    def now(self) -> float:
        """The time, on the deadline's clock."""

    def take_retry(self) -> bool:
        """Whether the frontend's budget allows one more retry; counts it if so."""

    def stalled_s(self) -> float:
        """Seconds that the frontend itself has lost so far; see `core/patience.py`."""

    def silent_s(self, worker_id: int) -> float:
        """Seconds since something was heard of the worker; infinite when nothing was."""


class Leg:
    """One submission of one attempt: the sink of its slot. phase: "", "prefill" or "decode"."""

    __slots__ = ("_machine", "attempt", "delivered", "is_accepted", "is_live", "phase", "span_id",
                 "worker_id")  # fmt: skip

    def __init__(
        self, machine: RequestMachine, attempt: int, worker_id: int, phase: str, span_id: str
    ) -> None:
        self._machine = machine
        self.attempt = attempt
        self.worker_id = worker_id
        self.phase = phase
        self.span_id = span_id
        self.is_live = True
        self.is_accepted = False
        self.delivered = 0

    def accepted(self) -> None:
        """The worker took it."""
        self.is_accepted = True

    def rejected(self, error: MeshError) -> None:
        """The worker refused it; nothing ran."""
        if self.is_live:
            self._machine.leg_failed(self, error)

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """The next tokens."""
        if self.is_live:
            self._machine.leg_tokens(self, token_ids, logprobs)

    def chunk(self, json: bytes) -> None:
        """The next chunk."""
        if self.is_live:
            self._machine.leg_chunk(self, json)

    def terminal(self, terminal: Terminal) -> None:
        """The end."""
        if self.is_live:
            self._machine.leg_ended(self, terminal)

    def lost(self, error: MeshError) -> None:
        """The stream is gone."""
        if self.is_live:
            self._machine.leg_failed(self, error)


class RequestMachine:
    """See the module. Events: start, placed, place_failed, client_gone, stop, on_time, and legs.

    rng: makes span ids; needed only when the plan is traced.
    """

    def __init__(self, plan: RequestPlan, ports: RequestPorts, rng: Random | None = None) -> None:
        self.plan = plan
        self.generated: list[int] = []
        self._chunks = 0
        self._engine_usage: CompletionUsage | None = None
        self.is_finished = False
        self._ports = ports
        self._rng = rng
        self._attempt = -1
        self._main_leg: Leg | None = None
        self._prefill_leg: Leg | None = None
        self._prefill_tokens: list[int] = []
        self._prefill_logprobs: list[TokenLogprob] = []
        self._prefill_result: PrefillResult | None = None
        self._prefill_reported = False
        self._placed: RoutingDecision | None = None
        self._booked = False
        self._submitted_at: float | None = None
        self._accept_timeout_s = 0.0
        self._stalled_before = 0.0
        # What the answer ended with, while it waits until then for a last word.
        self._pending_finish_reason: FinishReason | None = None
        self._usage_wait_until = 0.0
        self._excluded: frozenset[int] = frozenset()
        self._worker_ids: list[int] = []
        self._cached_tokens: int | None = None
        self._decode_cached_tokens: int | None = None
        # The span that the next leg continues: prefill's, or that of a leg which failed.
        self._linked_span_id = ""

    # -- events ---------------------------------------------------------------------------------

    def start(self) -> None:
        """The request is ready to be placed."""
        if not self.is_finished:
            self._start_attempt()

    def placed(self, attempt: int, placed: RoutingDecision, now: float) -> None:
        """The router chose, and booked it."""
        if not self.is_awaiting_placement(attempt):
            return  # freed when it was given up
        self._placed = placed
        if self.plan.body is not None and placed.prefill is not None:
            self._free_booking()
            message = "prefill and decode workers take token ids, and this body is passed through"
            self._finish(FinishReason.ERROR, Unsupported("model", message))
        elif placed.prefill is None:
            self._await_acceptance(now, self.plan.accept_timeout_s)
            self._submit_main("", now)
        else:
            self._await_acceptance(now, self.plan.pair_accept_timeout_s)
            self._submit_prefill(placed.prefill, now)
            if placed.bootstrap is not None:
                self._submit_main("decode", now)

    def placement_failed(self, attempt: int, error: MeshError) -> None:
        """The router found no place. Nothing is booked."""
        if not self.is_awaiting_placement(attempt):
            return
        self._booked = False
        is_last = self._attempt + 1 >= self.plan.attempts_max
        if error.reason == ALL_EXCLUDED and self._excluded and not is_last:
            # Nobody else is left: whoever failed it may be whole again.
            self._excluded = frozenset()
            if self._ports.take_retry():
                self._start_attempt()
                return
        self._finish(FinishReason.ERROR, error)

    def client_gone(self, reason: str = "client_gone") -> None:
        """Nobody listens any more."""
        if self.is_finished:
            return
        self._abandon_attempt(reason)
        self._finish(FinishReason.CANCELLED, RequestCancelled("the client went away"))

    def stop(self) -> None:
        """The gateway saw the end of the answer (a stop string): end it well."""
        if self.is_finished:
            return
        if self._pending_finish_reason is not None:
            self._pending_finish_reason = FinishReason.STOP
            return
        reporting_leg = self._leg_reporting_usage()
        if reporting_leg is None:
            self._abandon_attempt("stop_string")
            self._finish(FinishReason.STOP, None)
            return
        for leg in self._live_legs():
            leg.is_live = leg is reporting_leg
            self._ports.abort(leg, "stop_string")
        self._free_booking()
        self._await_usage(FinishReason.STOP)

    def _leg_reporting_usage(self) -> Leg | None:
        """The leg that is still to say how much of the prompt was cached; None if none will."""
        leg = self._prefill_leg or self._main_leg
        if leg is None or self.plan.body is not None or self._cached_tokens is not None:
            return None
        return leg if leg.is_accepted and leg.phase != "decode" else None

    def fail(self, error: MeshError, reason: str) -> None:
        """The gateway cannot go on with the request (say, a slow reader)."""
        if self.is_finished:
            return
        self._abandon_attempt(reason)
        if self._pending_finish_reason is not None:
            self._finish(self._pending_finish_reason, None)
            return
        self._finish(FinishReason.ERROR, error)

    def on_timer(self, now: float) -> None:
        """A time that was asked for has come."""
        if self.is_finished:
            return
        if self._pending_finish_reason is not None:
            if now >= self._usage_wait_until:
                self._finish(self._pending_finish_reason, None)
            else:  # a timer may be early by a tick of its clock
                self._ports.wake_at(self._usage_wait_until)
            return
        if now >= self.plan.deadline:
            self._abandon_attempt("deadline")
            self._finish(FinishReason.ERROR, DeadlineExceeded("the request took too long"))
            return
        self._check_acceptance(now)

    def _check_acceptance(self, now: float) -> None:
        late = [leg for leg in self._live_legs() if not leg.is_accepted]
        if not late or self._submitted_at is None:
            self._ports.wake_at(self.plan.deadline)
            return
        # While we stood still ourselves they may well have accepted, unread.
        submitted_at = self._submitted_at + self._ports.stalled_s() - self._stalled_before
        accept_by = submitted_at + self._accept_timeout_s
        if now >= accept_by and all(
            self._ports.silent_s(leg.worker_id) < RESPONSIVE_WITHIN_S for leg in late
        ):
            accept_by = min(
                max(accept_by, now + ACCEPT_RECHECK_S), submitted_at + self.plan.accept_timeout_s
            )
        if now < accept_by:
            self._ports.wake_at(min(accept_by, self.plan.deadline))
            return
        self._excluded |= {leg.worker_id for leg in late}
        names = " and ".join(str(leg.worker_id) for leg in late)
        error = WorkerLost(f"worker {names} did not accept in time", retryable=True)
        self._retry(error, "not_accepted")

    # -- legs -----------------------------------------------------------------------------------

    def leg_tokens(self, leg: Leg, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """A live leg delivered tokens."""
        leg.delivered += len(token_ids)
        self._report_prefill_done(leg.attempt)
        if leg is self._prefill_leg:
            self._prefill_tokens += token_ids
            self._prefill_logprobs += logprobs
            return
        if self._pending_finish_reason is not None:
            return  # they come after the stop string
        self.generated += token_ids
        self._ports.emit(token_ids, logprobs)

    def leg_chunk(self, leg: Leg, json: bytes) -> None:
        """A live leg delivered a chunk."""
        assert self.plan.body is not None, "a preprocessed request got a pass-through chunk"
        leg.delivered += 1
        self._report_prefill_done(leg.attempt)
        self._chunks += 1
        self._ports.emit_chunk(json)

    def leg_ended(self, leg: Leg, terminal: Terminal) -> None:
        """A live leg came to its end."""
        error: MeshError | None = terminal.error
        if error is None and terminal.finish_reason in (None, FinishReason.ERROR):
            error = WorkerLost("the worker failed and did not say why", retryable=False)
        if error is not None:
            self.leg_failed(leg, error)
            return
        if self.plan.body is not None:
            self._engine_usage = terminal.usage
        # The leg that computed the prompt knows; of several attempts, the first.
        if self._cached_tokens is None and leg.phase != "decode":
            self._cached_tokens = _cached_tokens(terminal)
        leg.is_live = False
        if self._pending_finish_reason is not None:
            self._finish(self._pending_finish_reason, None)
        elif terminal.finish_reason is FinishReason.CANCELLED:
            self._abandon_attempt("peer_cancelled")
            cancelled = RequestCancelled("the worker was told to end the request")
            self._finish(FinishReason.CANCELLED, cancelled)
        elif leg is self._prefill_leg:
            self._prefill_ended(leg, terminal)
        elif self._prefill_leg is not None and self._cached_tokens is None:
            self._main_leg = None
            self._decode_cached_tokens = _cached_tokens(terminal)
            self._await_usage(terminal.finish_reason)
        else:
            self._finish(terminal.finish_reason, None)

    def _await_usage(self, finish_reason: FinishReason | None) -> None:
        """The answer is complete; what was cached is on its way, or lost with its worker."""
        self._pending_finish_reason = finish_reason
        self._usage_wait_until = min(self._ports.now() + USAGE_WAIT_S, self.plan.deadline)
        self._ports.wake_at(self._usage_wait_until)

    def _prefill_ended(self, leg: Leg, terminal: Terminal) -> None:
        self._prefill_leg = None
        self._report_prefill_done(leg.attempt)
        if self._main_leg is not None:
            return  # with a bootstrap: decode is under way and has it all
        reason = terminal.finish_reason
        if reason is not FinishReason.LENGTH:
            # It was the whole answer: nothing is handed over.
            if self._prefill_tokens:
                self.generated += self._prefill_tokens
                self._ports.emit(self._prefill_tokens, self._prefill_logprobs)
            if not self.is_finished:  # who hears of tokens may end the request
                self._finish(reason, None)
        elif terminal.prefill_result is None:
            missing = WorkerLost("prefill ended and handed nothing over", retryable=True)
            self._excluded |= {leg.worker_id}
            self._retry(missing, "no_handoff")
        else:
            self._prefill_result = terminal.prefill_result
            now = self._ports.now()
            self._await_acceptance(now, self.plan.accept_timeout_s)
            self._submit_main("decode", now)

    def leg_failed(self, leg: Leg, error: MeshError) -> None:
        """A live leg failed: try elsewhere where that is right, else end."""
        leg.is_live = False
        if self._pending_finish_reason is not None:
            self._finish(self._pending_finish_reason, None)
            return
        main = self._main_leg
        if leg is self._prefill_leg and main is not None and main.delivered:
            self._prefill_leg = None  # decode has the prompt's KV: what it sends is whole
            return
        self._excluded |= {self._failed_worker(leg, error)}
        self._retry(error, "peer_failed")

    def _failed_worker(self, leg: Leg, error: MeshError) -> int:
        """The worker not to be asked again."""
        placed = self._placed
        if error.reason not in PEER_FAULT_REASONS or placed is None or placed.prefill is None:
            return leg.worker_id
        return placed.worker_id if leg.phase == "prefill" else placed.prefill.worker_id

    def _retry(self, error: MeshError, reason: str) -> None:
        """The attempt is over; another one, linked to this one's answer, or the end."""
        last = self._main_leg or self._prefill_leg
        if last is not None:
            self._linked_span_id = last.span_id
        self._abandon_attempt(reason)
        if error.retryable and self.generated and self._remaining_tokens() == 0:
            self._finish(FinishReason.LENGTH, None)  # all was delivered, only the end got lost
        elif not error.retryable or self._attempt + 1 >= self.plan.attempts_max:
            self._finish(FinishReason.ERROR, error)
        elif (self.generated or self._chunks) and (blocker := self._migration_blocker()):
            self._finish(FinishReason.ERROR, _not_migratable(error, blocker))
        elif self._ports.take_retry():
            self._start_attempt()
        else:
            message = (
                f"too many requests are being tried again; this one failed with: {error.message}"
            )
            self._finish(FinishReason.ERROR, Unavailable(message, 1.0, reason="RETRY_BUDGET"))

    def _migration_blocker(self) -> str:
        if self.plan.body is not None:
            return "its body, which only its worker has read"
        return migration_blockers(self.plan.request) if self.plan.migratable else "its owner's wish"

    # -- doing ----------------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        """The try under way, from 0; -1 before the first."""
        return self._attempt

    def is_awaiting_placement(self, attempt: int) -> bool:
        """Whether an answer of the router to this attempt is still of use."""
        is_placed = self._main_leg is not None or self._prefill_leg is not None
        return not self.is_finished and attempt == self._attempt and not is_placed

    def _live_legs(self) -> list[Leg]:
        """Live legs, prefill first: the order in which they are told of an abort."""
        return [
            leg for leg in (self._prefill_leg, self._main_leg) if leg is not None and leg.is_live
        ]

    def _start_attempt(self) -> None:
        self._attempt += 1
        self._booked = True
        self._prefill_tokens, self._prefill_logprobs = [], []
        self._prefill_result, self._prefill_reported = None, False
        self._ports.wake_at(self.plan.deadline)
        self._ports.place(self._attempt, self._excluded)

    def _await_acceptance(self, now: float, accept_timeout_s: float) -> None:
        self._submitted_at, self._accept_timeout_s = now, accept_timeout_s
        self._stalled_before = self._ports.stalled_s()
        self._ports.wake_at(min(now + accept_timeout_s, self.plan.deadline))

    def _submit_prefill(self, place: Placement, now: float) -> None:
        request = self._continued_request()
        stop = request.stop_conditions
        # The first token may be EOS for prefill exactly when it may be for decode.
        min_tokens = None if stop.min_tokens is None else min(1, stop.min_tokens)
        stop = replace(stop, max_tokens=1, min_tokens=min_tokens)
        request = self._with_decision(replace(request, stop_conditions=stop), place.dp_rank)
        leg = self._prefill_leg = self._new_leg(place.worker_id, "prefill")
        self._linked_span_id = leg.span_id  # decode begins with a link to it
        self._submit(leg, request, now)

    def _submit_main(self, phase: str, now: float) -> None:
        placed = self._placed
        assert placed is not None, "a leg follows a placement"
        request = self._with_decision(self._continued_request(), placed.dp_rank)
        if self._prefill_result is not None:
            request = replace(request, prefill_result=self._prefill_result)
        leg = self._main_leg = self._new_leg(placed.worker_id, phase)
        self._submit(leg, request, now)

    def _with_decision(self, request: PreprocessedRequest, dp_rank: int) -> PreprocessedRequest:
        """The request with what the placement decided."""
        placed = self._placed
        assert placed is not None, "a leg follows a placement"
        if dp_rank:
            hints = replace(request.routing or RoutingHints(), dp_rank=dp_rank)
            request = replace(request, routing=hints)
        if placed.bootstrap is not None:
            request = replace(request, bootstrap_info=placed.bootstrap)
        if self._linked_span_id:
            link = TraceLink(trace_id=self.plan.trace_id, span_id=self._linked_span_id)
            request = replace(request, migration_link=link)
        return request

    def _new_leg(self, worker_id: int, phase: str) -> Leg:
        span_id = ""
        if self.plan.trace_id:
            assert self._rng is not None, "a traced request needs chance for its span ids"
            span_id = f"{self._rng.getrandbits(64) or 1:016x}"
        self._worker_ids.append(worker_id)
        return Leg(self, self._attempt, worker_id, phase, span_id)

    def _submit(self, leg: Leg, request: PreprocessedRequest, now: float) -> None:
        plan = self.plan
        body = plan.body
        leg_request = LegRequest(
            request_id=plan.request_id,
            attempt=leg.attempt,
            timeout_s=max(0.001, plan.deadline - now),
            traceparent=plan.traceparent,
            span_id=leg.span_id,
            tenant=plan.tenant,
            priority=plan.priority,
            request=request if body is None else None,
            chat_json=body.json if body is not None and body.field == "chat_json" else None,
            completion_json=(
                body.json if body is not None and body.field == "completion_json" else None
            ),
            phase=leg.phase,
        )
        self._ports.submit(leg.worker_id, leg_request, leg)

    def _continued_request(self) -> PreprocessedRequest:
        """The request, going on after what was generated: longer prompt, smaller limits."""
        request = self.plan.request
        if not self.generated:
            return request
        stop = request.stop_conditions
        done = len(self.generated)
        reduced = replace(
            stop,
            max_tokens=self._remaining_tokens(),
            min_tokens=None if stop.min_tokens is None else max(0, stop.min_tokens - done),
        )
        return replace(
            request,
            token_ids=request.token_ids.extended(self.generated),
            stop_conditions=reduced,
            prefill_result=None,
            bootstrap_info=None,
        )

    def _remaining_tokens(self) -> int | None:
        limit = self.plan.request.stop_conditions.max_tokens
        return None if limit is None else max(0, limit - len(self.generated))

    def _report_prefill_done(self, attempt: int) -> None:
        if not self._prefill_reported:
            self._prefill_reported = True
            self._ports.prefill_done(attempt)

    def _abandon_attempt(self, reason: str) -> None:
        """Ends the attempt: live legs are aborted, its booking is freed."""
        for leg in self._live_legs():
            leg.is_live = False
            self._ports.abort(leg, reason)
        self._main_leg = self._prefill_leg = None
        self._submitted_at = None
        self._free_booking()

    def _free_booking(self) -> None:
        if self._booked:
            self._booked = False
            self._ports.free(self._attempt)

    def _finish(self, finish_reason: FinishReason | None, error: MeshError | None) -> None:
        assert not self.is_finished, "a request ends once"
        # A prefill leg that outlives its decode has nothing left to do: it ends by itself.
        for leg in self._live_legs():
            leg.is_live = False
        self._free_booking()
        self.is_finished = True
        self._ports.finish(
            RequestOutcome(
                finish_reason=finish_reason,
                error=error,
                usage=self.usage(),
                attempts=self._attempt + 1,
                worker_ids=tuple(self._worker_ids),
                placed=self._placed,
            )
        )

    def usage(self) -> CompletionUsage:
        """Prompt as the client sent it, completion as it was delivered.

        Of a body that was passed through: as its engine counted, if it did.
        """
        if self._engine_usage is not None:
            return self._engine_usage
        counts = usage(len(self.plan.request.token_ids), len(self.generated))
        cached_tokens = (
            self._decode_cached_tokens if self._cached_tokens is None else self._cached_tokens
        )
        if cached_tokens is None:
            return counts
        # Whoever went on with the answer had what was generated before in its prompt, too.
        details = PromptTokensDetails(cached_tokens=min(cached_tokens, counts.prompt_tokens))
        return replace(counts, prompt_tokens_details=details)


def _cached_tokens(terminal: Terminal) -> int | None:
    details = terminal.usage.prompt_tokens_details if terminal.usage is not None else None
    return None if details is None else details.cached_tokens


def _not_migratable(error: MeshError, blocker: str) -> WorkerLost:
    message = (
        f"{error.message}; the answer had begun and cannot go on elsewhere because of {blocker}"
    )
    return WorkerLost(message, retryable=True, reason=NOT_MIGRATABLE)
