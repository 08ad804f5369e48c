"""The state machine of one request: its legs, deadline, retries and migration (pure).

Events are routing decisions, reports of legs (`Leg` objects are the sinks of slots) and time. The
machine acts through `RequestPorts`; it holds no socket, task or clock.

An attempt has one leg, or two when prefill and decode run on separate workers. The token
of the prefill leg only proves that the prompt is computed; the tokens of the decode leg are the
response. With a bootstrap rendezvous both start at once; without one, decode starts with the result
of prefill. The two are one transaction: if either fails, both end and the whole attempt is retried.
After the first token of decode this no longer holds: the prompt's KV has arrived, and a failure of
prefill is ignored.

A request that lacks a worker waits: if every worker of its model has an open circuit or failed it,
or if the router refuses it for lack of one. It asks the router again when a worker appears or
recovers, and at growing intervals, until it has waited `worker_wait_s`. A retried attempt also
needs a permit of the migration limiter.

An internal error of an engine is retried once, if another worker is left: a started response then
continues like after the loss of a worker. A failure of an engine counts against its worker
(`worker_failed`) when another worker sends output for the request, or at once if the request is not
retried. So a request counts once at most, and not if it fails on two workers.

The leg that computed the prompt reports `cached_tokens` when it ends. A response that is complete
earlier (by decode, or by a stop string) waits USAGE_WAIT_S for this report.

Invariants: `finish` is called exactly once and nothing is emitted after it; the emitted tokens are
the concatenation of the main legs' tokens, nothing lost, repeated or reordered; at most one attempt
is live; every placed attempt is freed exactly once; a worker that failed the request is used again
only when no other worker is left; on an abort, prefill is aborted before decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from common.errors import (
    DeadlineExceeded,
    InternalError,
    MeshError,
    RequestCancelled,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from common.request.placement import Decision, Placement
from common.request.preprocessed import (
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
    PrefillResult,
    PromptTokensDetails,
    TokenLogprob,
    TraceLink,
    sum_completion_details,
    usage,
)
from common.request.token_stream import LegChanges, LegRequest, Terminal
from frontend_svc.models.engine_options import EngineTraits
from frontend_svc.request.continuation import (
    lacking_traits,
    migration_blockers,
    not_migratable,
    placement_blockers,
    traits_of,
    unsuitable_workers,
)
from frontend_svc.request.leg import Leg, RequestPorts
from frontend_svc.request.leg_request import leg_changes, remaining_tokens
from frontend_svc.request.retry_policy import (
    ALL_EXCLUDED,
    DRAINING,
    WORKER_WAIT_S,
    ExclusionPolicy,
    WorkerWait,
    is_engine_failure,
)
from frontend_svc.request.types import RequestOutcome, RequestPlan

# Failures of a leg that are the fault of the other leg's worker.
PEER_FAULT_REASONS = frozenset(
    {"HANDOFF_NO_PARTNER", "HANDOFF_PEER_ABORTED", "HANDOFF_PEER_LOST", "TRANSFER_EXPIRED"}
)
# A worker that sent a frame within this time is slow, not lost: it has `accept_timeout_s`, also in
# a pair.
RESPONSIVE_WITHIN_S = 0.5
# Interval of checks on a slow worker.
ACCEPT_RECHECK_S = 0.25
# How the worker of a response ended that another worker was to continue.
_LOST = "the worker was lost"
# How long a complete response waits for the report of `cached_tokens`.
USAGE_WAIT_S = 0.2


class RequestMachine:
    """The state machine; see the module.

    rng: makes span ids, required when the plan is traced.
    worker_wait_s: how long the request waits while its model has no worker.
    """

    # For mypyc: `_finish` deletes it.
    __deletable__ = ("_ports",)

    def __init__(
        self,
        plan: RequestPlan,
        ports: RequestPorts,
        rng: Random | None = None,
        *,
        worker_wait_s: float = WORKER_WAIT_S,
    ) -> None:
        self.plan = plan
        self.generated: list[int] = []
        self._chunks = 0
        self._engine_usage: CompletionUsage | None = None
        self.is_finished = False
        self._ports = ports
        self._rng = rng
        self.attempt = -1  # number of the current attempt, from 0
        # Attempts that continue a started response.
        self._migrations = 0
        # Attempts that failed; those that ended with the departure of their worker do not count.
        self._failures = 0
        self._main_leg: Leg | None = None
        self._prefill_leg: Leg | None = None
        self._prefill_tokens: list[int] = []
        self._prefill_logprobs: list[TokenLogprob] = []
        self._prefill_chunks: list[bytes] = []
        self._prefill_result: PrefillResult | None = None
        self._prefill_reported = False
        self._placed: Decision | None = None
        self._booked = False
        self._submitted_at: float | None = None
        # Whether any attempt was sent to a worker.
        self._was_submitted = False
        self._accept_timeout_s = 0.0
        self._stalled_before = 0.0
        # Finish reason of a complete response that waits for the report of `cached_tokens`.
        self._pending_finish_reason: FinishReason | None = None
        self._usage_wait_until = 0.0
        # Workers that failed the request, and those that the current attempt avoids.
        self._excluded: frozenset[int] = frozenset()
        self._exclusions = ExclusionPolicy()
        # Of the worker that has begun the response; and by worker, why it cannot continue there.
        self._begun_on = EngineTraits()
        self.unsuitable: dict[int, str] = {}
        self._engine_failures = 0
        # Worker of the first engine failure, and its attempt, until it counts.
        self._suspect: int | None = None
        self._suspect_attempt = 0
        self._worker_wait_s = worker_wait_s
        # None: the request has never waited.
        self._worker_wait: WorkerWait | None = None
        self._worker_ids: list[int] = []
        # Of the prompt: by the leg that computed it, and by decode.
        self._prompt_details: PromptTokensDetails | None = None
        self._decode_prompt_details: PromptTokensDetails | None = None
        # Of the response, over the legs that have ended.
        self._completion_details: CompletionTokensDetails | None = None
        # Span that the next leg links to: of prefill, or of the failed leg.
        self._linked_span_id = ""

    @property
    def is_pair(self) -> bool:
        """Returns whether the last placement has a prefill and a decode worker."""
        return self._placed is not None and self._placed.prefill is not None

    # -- events ---------------------------------------------------------------------------------

    def start(self) -> None:
        if not self.is_finished:
            self._start_attempt()

    def placed(self, attempt: int, placed: Decision, now: float) -> None:
        if not self._is_awaiting_placement(attempt):
            return  # freed when the attempt was abandoned
        if self._worker_wait is not None:
            self._worker_wait.end()
        if self.plan.pooling:
            placed = _prefill_only(placed)
        self._placed = placed
        if not self.generated:
            self._begun_on = traits_of(self.plan, placed.worker.worker_id)
        if self.plan.is_query_only:
            self._booked = False
            self._finish(FinishReason.STOP, None)
        elif self.plan.body is not None and placed.prefill is not None:
            self._free_booking()
            message = "a pass-through body cannot run on separate prefill and decode workers"
            self._finish(FinishReason.ERROR, Unsupported("model", message))
        elif self.generated and (blockers := placement_blockers(self.plan, self._begun_on, placed)):
            self._free_booking()
            self._finish(FinishReason.ERROR, not_migratable(_LOST, blockers))
        elif placed.prefill is None:
            self._await_acceptance(now, self.plan.accept_timeout_s)
            self._submit_main(self.plan.pooling, now)
        else:
            self._await_acceptance(now, self.plan.pair_accept_timeout_s)
            self._submit_prefill(placed.prefill, now)
            if placed.bootstrap is not None:
                self._submit_main("decode", now)

    def placement_failed(self, attempt: int, error: MeshError) -> None:
        """Handles the router's refusal; nothing is booked. If a worker may appear or recover, the
        request waits."""
        if not self._is_awaiting_placement(attempt):
            return
        if self._exclusions.readmits_after(error):
            if not self._wait_for_worker():
                self._place()
        elif not (self._exclusions.waits_after(error) and self._wait_for_worker()):
            self._booked = False
            if error.reason == ALL_EXCLUDED and self.unsuitable:
                error = not_migratable(_LOST, next(iter(self.unsuitable.values())))
            self._finish(FinishReason.ERROR, error)

    def place_again(self) -> None:
        """Handles the end of a wait for a worker, or for a permit."""
        if self._is_awaiting_placement(self.attempt):
            self._place()

    def abort(self, reason: str = "client_gone") -> None:
        """Ends the request because the client does not need its result."""
        if self.is_finished:
            return
        self._abort_attempt(reason)
        self._finish(FinishReason.CANCELLED, RequestCancelled("the client disconnected"))

    def stop(self) -> None:
        """Ends the request successfully: a stop string completed the response."""
        if self.is_finished:
            return
        if self._pending_finish_reason is not None:
            self._pending_finish_reason = FinishReason.STOP
            return
        reporting_leg = self._leg_reporting_usage()
        if reporting_leg is None:
            self._abort_attempt("stop_string")
            self._finish(FinishReason.STOP, None)
            return
        for leg in self._live_legs():
            leg.is_live = leg is reporting_leg
            self._ports.abort_leg(leg, "stop_string")
        self._free_booking()
        self._await_usage(FinishReason.STOP)

    def _leg_reporting_usage(self) -> Leg | None:
        """Returns the leg expected to report `cached_tokens`, or None."""
        leg = self._prefill_leg or self._main_leg
        if leg is None or self.plan.body is not None or self._prompt_details is not None:
            return None
        return leg if leg.is_accepted and leg.phase != "decode" else None

    def fail(self, error: MeshError, reason: str) -> None:
        """Ends the request with an error of the gateway, for example a slow reader."""
        if self.is_finished:
            return
        self._abort_attempt(reason)
        if self._pending_finish_reason is not None:
            self._finish(self._pending_finish_reason, None)
            return
        self._finish(FinishReason.ERROR, error)

    def on_timer(self, now: float) -> None:
        if self.is_finished:
            return
        if self._pending_finish_reason is not None:
            if now >= self._usage_wait_until:
                self._finish(self._pending_finish_reason, None)
            else:  # a timer may fire one clock tick early
                self._ports.wake_at(self._usage_wait_until)
            return
        if now >= self.plan.deadline:
            self._abort_attempt("deadline")
            self._finish(FinishReason.ERROR, self._late())
            return
        self._check_acceptance(now)

    def _late(self) -> DeadlineExceeded:
        """Returns the error of the deadline; another try may help if no worker had the request."""
        if self._was_submitted:
            return DeadlineExceeded("the request exceeded its time limit")
        text = "the request was not placed on a worker within its time limit"
        return DeadlineExceeded.restore(text, retry_after_s=1.0, retryable=True)

    def _check_acceptance(self, now: float) -> None:
        late = [leg for leg in self._live_legs() if not leg.is_accepted]
        if not late or self._submitted_at is None:
            self._ports.wake_at(self.plan.deadline)
            return
        # During a stall of this process, acceptances may have arrived without being read.
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
        names = " and ".join(f"worker {leg.worker_id}" for leg in late)
        message = f"{names} did not accept the request within {accept_by - submitted_at:.3g} s"
        self._failures += 1
        self._retry(WorkerLost(message, retryable=True), "not_accepted")

    # -- legs -----------------------------------------------------------------------------------

    def leg_tokens(self, leg: Leg, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        leg.delivered += len(token_ids)
        self._report_prefill_done(leg.attempt)
        if leg is self._prefill_leg:
            self._prefill_tokens += token_ids
            self._prefill_logprobs += logprobs
            return
        if self._pending_finish_reason is not None:
            return  # tokens after the stop string
        if self._suspect is not None:
            self._count_engine_failure(self._suspect)
        self.generated += token_ids
        self._ports.emit(token_ids, logprobs)

    def leg_chunk(self, leg: Leg, json: bytes) -> None:
        if self.plan.body is None and not self.plan.pooling:
            self._prompt_chunk(leg, json)
            return
        leg.delivered += 1
        self._report_prefill_done(leg.attempt)
        if self._suspect is not None:
            self._count_engine_failure(self._suspect)
        self._chunks += 1
        self._ports.emit_chunk(json)

    def _prompt_chunk(self, leg: Leg, json: bytes) -> None:
        """Takes log probabilities of the prompt. Of a pair, both legs send them: those of prefill
        count only if it produces the whole response."""
        assert self.plan.request.output_options.prompt_logprobs is not None, "tokens are no chunks"
        if leg is self._prefill_leg:
            self._prefill_chunks.append(json)
            return
        self._chunks += 1
        self._ports.emit_chunk(json)

    def leg_ended(self, leg: Leg, terminal: Terminal) -> None:
        error: MeshError | None = terminal.error
        if error is None and terminal.finish_reason in (None, FinishReason.ERROR):
            error = WorkerLost("the worker reported a failure without an error", retryable=False)
        if error is not None:
            if is_engine_failure(error):
                self._engine_failures += 1
                if self._engine_failures == 1:
                    self._suspect, self._suspect_attempt = leg.worker_id, leg.attempt
            self.leg_failed(leg, error)
            return
        if self.plan.body is not None:
            self._engine_usage = terminal.usage
        # The leg that computed the prompt reports it; of several attempts, the first counts.
        if self._prompt_details is None and leg.phase != "decode":
            self._prompt_details = _prompt_details(terminal)
        if terminal.usage is not None:
            self._completion_details = sum_completion_details(
                (self._completion_details, terminal.usage.completion_tokens_details)
            )
        leg.is_live = False
        if self._pending_finish_reason is not None:
            self._finish(self._pending_finish_reason, None)
        elif terminal.finish_reason is FinishReason.CANCELLED:
            self._abort_attempt("peer_cancelled")
            cancelled = RequestCancelled("the worker cancelled the request")
            self._finish(FinishReason.CANCELLED, cancelled)
        elif leg is self._prefill_leg:
            self._prefill_ended(leg, terminal)
        elif self._prefill_leg is not None and self._prompt_details is None:
            self._main_leg = None
            self._decode_prompt_details = _prompt_details(terminal)
            self._await_usage(terminal.finish_reason)
        else:
            self._finish(terminal.finish_reason, None)

    def _await_usage(self, finish_reason: FinishReason | None) -> None:
        """Waits for the report of `cached_tokens` of a complete response; it may be lost."""
        self._pending_finish_reason = finish_reason
        self._usage_wait_until = min(self._ports.now() + USAGE_WAIT_S, self.plan.deadline)
        self._ports.wake_at(self._usage_wait_until)

    def _prefill_ended(self, leg: Leg, terminal: Terminal) -> None:
        self._prefill_leg = None
        self._report_prefill_done(leg.attempt)
        if self._main_leg is not None:
            return  # with a bootstrap, decode is running and needs no result
        reason = terminal.finish_reason
        if reason is not FinishReason.LENGTH:
            # Prefill produced the whole response.
            for json in self._prefill_chunks:
                self._ports.emit_chunk(json)
            if self._prefill_tokens:
                self.generated += self._prefill_tokens
                self._ports.emit(self._prefill_tokens, self._prefill_logprobs)
            if not self.is_finished:  # the token sink may have ended the request
                self._finish(reason, None)
        elif terminal.prefill_result is None:
            missing = WorkerLost("prefill ended without a handoff result", retryable=True)
            self._excluded |= {leg.worker_id}
            self._failures += 1
            self._retry(missing, "no_handoff")
        else:
            self._prefill_result = terminal.prefill_result
            now = self._ports.now()
            self._await_acceptance(now, self.plan.accept_timeout_s)
            self._submit_main("decode", now)

    def leg_failed(self, leg: Leg, error: MeshError) -> None:
        """Handles the failure of a live leg: retries on another worker, or ends the request."""
        leg.is_live = False
        if self._pending_finish_reason is not None:
            self._finish(self._pending_finish_reason, None)
            return
        main = self._main_leg
        if leg is self._prefill_leg and main is not None and main.delivered:
            self._prefill_leg = None  # decode has the prompt's KV
            return
        failed_worker = self._failed_worker(leg, error)
        self._excluded |= {failed_worker}
        # A worker that stops as planned leaves the mesh, then drains: not the request's fault.
        has_departed = leg.is_accepted and self._ports.has_left(failed_worker)
        self._failures += error.reason != DRAINING and not has_departed
        self._retry(error, "peer_failed")

    def _failed_worker(self, leg: Leg, error: MeshError) -> int:
        """Returns the worker to exclude from further attempts."""
        placed = self._placed
        if error.reason not in PEER_FAULT_REASONS or placed is None or placed.prefill is None:
            return leg.worker_id
        return placed.worker.worker_id if leg.phase == "prefill" else placed.prefill.worker_id

    def _retry(self, error: MeshError, reason: str) -> None:
        """Ends the attempt, then starts another one or ends the request."""
        last = self._main_leg or self._prefill_leg
        if last is not None:
            self._linked_span_id = last.span_id
        self._abort_attempt(reason)
        is_retryable = error.retryable or self._retries_internal_error(error)
        if (
            is_retryable
            and self.generated
            and remaining_tokens(self.plan.request, len(self.generated)) == 0
        ):
            self._finish(FinishReason.LENGTH, None)  # only the terminal was lost
        elif not is_retryable or self._failures >= self.plan.attempts_max:
            self._finish(FinishReason.ERROR, self._last_error(error))
        elif (self.generated or self._chunks) and (blockers := self._migration_blockers()):
            lost = not_migratable(error.message, blockers)
            self._finish(FinishReason.ERROR, lost if error.retryable else error)
        elif self._ports.take_retry(error):
            self._migrations += bool(self.generated)
            self._start_attempt()
        else:
            message = f"retry budget exhausted after: {error.message}; retry after 1 s"
            exhausted = Unavailable(message, 1.0, reason="RETRY_BUDGET")
            self._finish(FinishReason.ERROR, exhausted if error.retryable else error)

    def _last_error(self, error: MeshError) -> MeshError:
        """Returns the error of a request that gets no further attempt. If every worker that has not
        failed it cannot continue the response, it states why."""
        pool, _ = self._candidates()
        if not (error.retryable and self.unsuitable and pool <= self._excluded):
            return error
        return not_migratable(error.message, next(iter(self.unsuitable.values())))

    def _migration_blockers(self) -> str:
        """Returns why the started response ends, "" if it continues on another worker. It waits for
        one if that which began it could have continued it: its like may return."""
        if blockers := migration_blockers(self.plan):
            return blockers
        lacking = lacking_traits(self.plan, self._begun_on, self._begun_on)
        return "" if not lacking or self._candidates()[0] else lacking

    def _retries_internal_error(self, error: MeshError) -> bool:
        """Returns whether the error is the request's first failure of an engine, is internal, and
        another worker is left."""
        if not isinstance(error, InternalError) or self._engine_failures != 1:
            return False
        pool, open_circuits = self._candidates()
        return not pool or not pool <= self._excluded | open_circuits

    def _count_engine_failure(self, worker_id: int) -> None:
        self._suspect = None
        self._ports.worker_failed(worker_id)

    # -- actions --------------------------------------------------------------------------------

    def _is_awaiting_placement(self, attempt: int) -> bool:
        is_placed = self._main_leg is not None or self._prefill_leg is not None
        return not self.is_finished and attempt == self.attempt and not is_placed

    def _live_legs(self) -> list[Leg]:
        """Returns the live legs, prefill first: the order in which they are aborted."""
        legs = (self._prefill_leg, self._main_leg)
        return [leg for leg in legs if leg is not None and leg.is_live]

    def _start_attempt(self) -> None:
        self.attempt += 1
        self._booked = True
        self._prefill_tokens, self._prefill_logprobs, self._prefill_chunks = [], [], []
        self._prefill_result, self._prefill_reported = None, False
        self._ports.wake_at(self.plan.deadline)
        self._exclusions.start_attempt(self._excluded)
        self._place()

    def _place(self) -> None:
        """Requests a placement, unless the attempt waits for a worker or for a permit."""
        pool, open_circuits = self._candidates()
        if self._exclusions.must_wait(pool, open_circuits) and self._wait_for_worker():
            return
        if self.attempt and not self._ports.take_permit():
            return
        # Methods: an operator with keys makes a set, which a compiled module refuses.
        excluded = self._exclusions.excluded().union(self.unsuitable)
        self._ports.place(self.attempt, excluded)

    def _candidates(self) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the workers on which the request can run, and those of them with an open
        circuit. Sets `unsuitable`."""
        pool, open_circuits = self._ports.members()
        if not self.generated:
            return pool, open_circuits
        self.unsuitable = unsuitable = unsuitable_workers(self.plan, self._begun_on, pool)
        return pool.difference(unsuitable), open_circuits.difference(unsuitable)

    def _wait_for_worker(self) -> bool:
        """Returns whether the request waits for a worker: not if it has waited long enough."""
        if self._worker_wait is None:
            self._worker_wait = WorkerWait(self._worker_wait_s)
        ask_again_at = self._worker_wait.ask_again_at(self._ports.now())
        if ask_again_at is None:
            return False
        self._ports.wait_for_worker(ask_again_at)
        return True

    def _await_acceptance(self, now: float, accept_timeout_s: float) -> None:
        self._submitted_at, self._accept_timeout_s = now, accept_timeout_s
        self._was_submitted = True
        self._stalled_before = self._ports.stalled_s()
        self._ports.wake_at(min(now + accept_timeout_s, self.plan.deadline))

    def _submit_prefill(self, place: Placement, now: float) -> None:
        changes = self._leg_changes(place.dp_rank, is_prefill=True)
        leg = self._prefill_leg = self._new_leg(place.worker_id, "prefill")
        self._linked_span_id = leg.span_id  # decode's span links to it
        self._submit(leg, changes, now)

    def _submit_main(self, phase: str, now: float) -> None:
        placed = self._placed
        assert placed is not None, "a leg follows a placement"
        changes = self._leg_changes(placed.worker.dp_rank)
        if self._prefill_result is not None:
            changes["prefill_result"] = self._prefill_result
        leg = self._main_leg = self._new_leg(placed.worker.worker_id, phase)
        self._submit(leg, changes, now)

    def _leg_changes(self, dp_rank: int, *, is_prefill: bool = False) -> LegChanges:
        """Returns what the next leg changes of the request, with the bootstrap and the trace
        link."""
        assert self._placed is not None, "a leg follows a placement"
        if self.plan.body is not None:
            return {}
        changes = leg_changes(self.plan.request, self.generated, dp_rank, is_prefill=is_prefill)
        if self._placed.bootstrap is not None:
            changes["bootstrap_info"] = self._placed.bootstrap
        if self._linked_span_id:
            changes["migration_link"] = TraceLink(
                trace_id=self.plan.trace_id, span_id=self._linked_span_id
            )
        return changes

    def _new_leg(self, worker_id: int, phase: str) -> Leg:
        span_id = ""
        if self.plan.trace_id:
            assert self._rng is not None, "a traced request needs a generator for its span ids"
            span_id = f"{self._rng.getrandbits(64) or 1:016x}"
        self._worker_ids.append(worker_id)
        return Leg(self, self.attempt, worker_id, phase, span_id)

    def _submit(self, leg: Leg, changes: LegChanges, now: float) -> None:
        plan, body = self.plan, self.plan.body
        message = LegRequest(
            request_id=plan.request_id,
            attempt=leg.attempt,
            timeout_s=max(0.001, plan.deadline - now),
            traceparent=plan.traceparent,
            span_id=leg.span_id,
            tenant=plan.tenant,
            priority=plan.priority,
            request=plan.request if body is None else None,
            chat_json=body.json if body is not None and body.is_chat else None,
            completion_json=body.json if body is not None and not body.is_chat else None,
            phase=leg.phase,
            changes=changes,
        )
        self._ports.submit(leg.worker_id, message, leg)

    def _report_prefill_done(self, attempt: int) -> None:
        if not self._prefill_reported:
            self._prefill_reported = True
            if self._worker_wait is not None:
                self._worker_wait.prefill_done()
            self._ports.prefill_done(attempt)

    def _abort_attempt(self, reason: str) -> None:
        for leg in self._live_legs():
            leg.is_live = False
            self._ports.abort_leg(leg, reason)
        self._main_leg = self._prefill_leg = None
        self._submitted_at = None
        self._free_booking()

    def _free_booking(self) -> None:
        if self._booked:
            self._booked = False
            self._ports.free(self.attempt)

    def _finish(self, finish_reason: FinishReason | None, error: MeshError | None) -> None:
        assert not self.is_finished, "a request ends once"
        # A prefill leg that outlives its decode ends by itself.
        for leg in self._live_legs():
            leg.is_live = False
        self._free_booking()
        is_retried = self._suspect_attempt != self.attempt
        if self._suspect is not None and (error is None or not is_retried):
            self._count_engine_failure(self._suspect)
        self.is_finished = True
        self._ports.finish(
            RequestOutcome(
                finish_reason=finish_reason,
                error=error,
                usage=self.usage(),
                attempts=self.attempt + 1,
                worker_ids=tuple(self._worker_ids),
                placed=self._placed,
                migrations=self._migrations,
            )
        )
        # Without cycles of references, an ended request is freed at once.
        self._main_leg = self._prefill_leg = None
        del self._ports

    def usage(self) -> CompletionUsage:
        """Tokens of the client's prompt and of the delivered completion. For a pass-through body:
        the engine's counts, if it sent any."""
        if self._engine_usage is not None:
            return self._engine_usage
        counts = usage(len(self.plan.request.token_ids), len(self.generated))
        details = self._prompt_details or self._decode_prompt_details
        # After a migration the worker's prompt included generated tokens.
        prompt = None if details is None else details.at_most(counts.prompt_tokens)
        return replace(
            counts,
            prompt_tokens_details=prompt,
            completion_tokens_details=self._completion_details,
        )


def _prefill_only(placed: Decision) -> Decision:
    """Returns the placement of a pooled prompt: of a pair, the prefill worker, which computes the
    prompt."""
    prefill = placed.prefill
    if prefill is None:
        return placed
    return replace(
        placed,
        worker=prefill,
        worker_address=placed.prefill_address,
        prefill=None,
        prefill_address="",
        bootstrap=None,
    )


def _prompt_details(terminal: Terminal) -> PromptTokensDetails | None:
    """Returns the details of the prompt if they have its cached tokens."""
    details = terminal.usage.prompt_tokens_details if terminal.usage is not None else None
    return None if details is None or details.cached_tokens is None else details
