"""One request's life: its legs, deadline, retries and migration (pure).

The machine hears of placements, of its legs (it gives `Leg` objects out as slot sinks) and of time,
and says what to do through `RequestPorts`. It holds no socket, task or clock.

Invariants: `finish` is called exactly once and nothing is emitted after it; the tokens emitted are
the concatenation of what legs delivered, nothing lost, repeated or reordered; at most one attempt
is live; every attempt that was placed is freed exactly once; a worker that failed the request is
not asked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from common.attach import Order, Terminal
from common.errors import DeadlineExceeded, MeshError, RequestCancelled, WorkerLost
from common.preprocessed import (
    CompletionUsage,
    FinishReason,
    PreprocessedRequest,
    PromptTokensDetails,
    TokenLogprob,
    usage,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is fixed for a request's whole life.

    deadline: on the clock that `now` arguments use, seconds. migratable: a started answer may go on
    elsewhere (prompt + generated tokens say all there is to know). attempts_max: tries, the first
    included. accept_s: how long a worker may take to accept before another one is asked.
    """

    request_id: str
    request: PreprocessedRequest
    deadline: float
    migratable: bool = True
    attempts_max: int = 4
    accept_s: float = 3.0
    traceparent: str = ""
    tenant: str = ""
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """The router's answer, as far as the machine needs it."""

    worker_id: int
    dp_rank: int = 0
    overlap_blocks: int = 0
    predicted_cached_tokens: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. error: why it failed, else None. usage: as the client is to see it."""

    finish_reason: FinishReason | None
    error: MeshError | None
    usage: CompletionUsage
    attempts: int
    worker_ids: tuple[int, ...]
    placed: Placed | None


def is_migratable(request: PreprocessedRequest) -> bool:
    """Whether prompt + generated tokens say all that an engine needs to go on (DESIGN §6).

    Not so with guided decoding (the grammar's state), several choices, penalties (they count the
    output apart from the prompt) and prompt_embeds.
    """
    sampling = request.sampling_options
    return (
        sampling.guided_decoding is None
        and sampling.n in (None, 1)
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
        and sampling.repetition_penalty in (None, 1.0)
        and request.prompt_embeds is None
    )


class RequestPorts(Protocol):
    """What the machine asks of its surroundings. No call blocks; answers come as events."""

    def place(self, attempt: int, excluded: frozenset[int]) -> None:
        """Ask the router; answer with `placed` or `place_failed` of the same attempt."""

    def submit(self, worker_id: int, order: Order, leg: Leg) -> None:
        """Submit an order; `leg` is its sink."""

    def abort(self, leg: Leg, reason: str) -> None:
        """End a leg that was submitted."""

    def prefill_done(self, attempt: int) -> None:
        """Tell the router that the first token is there."""

    def free(self, attempt: int) -> None:
        """Tell the router that the attempt holds nothing any more."""

    def emit(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Tokens for the client."""

    def finish(self, outcome: Outcome) -> None:
        """The end."""

    def wake_at(self, at: float) -> None:
        """Call `on_time` at that time; an earlier wish is replaced."""


class Leg:
    """One submission of one attempt: the sink of its slot."""

    def __init__(self, machine: RequestMachine, attempt: int, worker_id: int) -> None:
        self._machine = machine
        self.attempt = attempt
        self.worker_id = worker_id
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
        """Pass-through chunks belong to requests without a machine."""
        raise AssertionError("a preprocessed request got a pass-through chunk")

    def terminal(self, terminal: Terminal) -> None:
        """The end."""
        if self.is_live:
            self._machine.leg_ended(self, terminal)

    def lost(self, error: MeshError) -> None:
        """The stream is gone."""
        if self.is_live:
            self._machine.leg_failed(self, error)


class RequestMachine:
    """See the module. Events: start, placed, place_failed, client_gone, stop, on_time, and legs."""

    def __init__(self, plan: Plan, ports: RequestPorts) -> None:
        self.plan = plan
        self.generated: list[int] = []
        self.is_finished = False
        self._ports = ports
        self._attempt = -1
        self._leg: Leg | None = None
        self._placed: Placed | None = None
        self._booked = False
        self._accept_by: float | None = None
        self._excluded: frozenset[int] = frozenset()
        self._worker_ids: list[int] = []
        self._cached_tokens: int | None = None

    # -- events ---------------------------------------------------------------------------------

    def start(self) -> None:
        """The request is ready to be placed."""
        if not self.is_finished:
            self._place()

    def placed(self, attempt: int, placed: Placed, now: float) -> None:
        """The router chose, and booked it."""
        if not self._awaits(attempt):
            return  # freed when it was given up
        self._placed = placed
        self._worker_ids.append(placed.worker_id)
        leg = self._leg = Leg(self, attempt, placed.worker_id)
        self._accept_by = now + self.plan.accept_s
        self._ports.wake_at(min(self._accept_by, self.plan.deadline))
        self._ports.submit(placed.worker_id, self._order(now), leg)

    def place_failed(self, attempt: int, error: MeshError) -> None:
        """The router found no place. Nothing is booked."""
        if not self._awaits(attempt):
            return
        self._booked = False
        self._finish(FinishReason.ERROR, error)

    def client_gone(self, reason: str = "client_gone") -> None:
        """Nobody listens any more."""
        if self.is_finished:
            return
        self._give_up(reason)
        self._finish(FinishReason.CANCELLED, RequestCancelled("the client went away"))

    def stop(self) -> None:
        """The gateway saw the end of the answer (a stop string): end it well."""
        if self.is_finished:
            return
        self._give_up("stop_string")
        self._finish(FinishReason.STOP, None)

    def fail(self, error: MeshError, reason: str) -> None:
        """The gateway cannot go on with the request (say, a slow reader)."""
        if self.is_finished:
            return
        self._give_up(reason)
        self._finish(FinishReason.ERROR, error)

    def on_time(self, now: float) -> None:
        """A time that was asked for has come."""
        if self.is_finished:
            return
        if now >= self.plan.deadline:
            self._give_up("deadline")
            self._finish(FinishReason.ERROR, DeadlineExceeded("the request took too long"))
            return
        leg, accept_by = self._leg, self._accept_by
        if leg is None or leg.is_accepted or accept_by is None:
            self._ports.wake_at(self.plan.deadline)
        elif now < accept_by:  # a timer may be early by a tick of its clock
            self._ports.wake_at(min(accept_by, self.plan.deadline))
        else:
            self._ports.abort(leg, "not_accepted")
            why = f"worker {leg.worker_id} did not accept within {self.plan.accept_s:g} s"
            self.leg_failed(leg, WorkerLost(why, retryable=True))

    # -- legs -----------------------------------------------------------------------------------

    def leg_tokens(self, leg: Leg, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """A live leg delivered tokens."""
        if not leg.delivered:
            self._ports.prefill_done(leg.attempt)
        leg.delivered += len(token_ids)
        self.generated += token_ids
        self._ports.emit(token_ids, logprobs)

    def leg_ended(self, leg: Leg, terminal: Terminal) -> None:
        """A live leg came to its end."""
        error: MeshError | None = terminal.error
        if error is None and terminal.finish_reason in (None, FinishReason.ERROR):
            error = WorkerLost("the worker failed and did not say why", retryable=False)
        if error is not None:
            self.leg_failed(leg, error)
            return
        self._close_leg(leg)
        details = terminal.usage.prompt_tokens_details if terminal.usage is not None else None
        if details is not None and self._cached_tokens is None:
            self._cached_tokens = details.cached_tokens
        if terminal.finish_reason is FinishReason.CANCELLED:
            error = RequestCancelled("the worker was told to end the request")
        self._finish(terminal.finish_reason, error)

    def leg_failed(self, leg: Leg, error: MeshError) -> None:
        """A live leg failed: try elsewhere where that is right, else end."""
        self._close_leg(leg)
        self._excluded |= {leg.worker_id}
        if error.retryable and self.generated and self._remaining() == 0:
            self._finish(FinishReason.LENGTH, None)  # all was delivered, only the end got lost
        elif self._may_retry(error):
            self._place()
        else:
            self._finish(FinishReason.ERROR, error)

    def _may_retry(self, error: MeshError) -> bool:
        if not error.retryable or self._attempt + 1 >= self.plan.attempts_max:
            return False
        return not self.generated or self.plan.migratable

    # -- doing ----------------------------------------------------------------------------------

    def _awaits(self, attempt: int) -> bool:
        return not self.is_finished and attempt == self._attempt and self._leg is None

    def _place(self) -> None:
        self._attempt += 1
        self._booked = True
        self._ports.wake_at(self.plan.deadline)
        self._ports.place(self._attempt, self._excluded)

    def _order(self, now: float) -> Order:
        plan = self.plan
        return Order(
            request_id=plan.request_id,
            attempt=self._attempt,
            timeout_s=max(0.001, plan.deadline - now),
            traceparent=plan.traceparent,
            tenant=plan.tenant,
            priority=plan.priority,
            request=self._continued_request(),
        )

    def _continued_request(self) -> PreprocessedRequest:
        """The request, going on after what was generated: longer prompt, smaller limits."""
        request = self.plan.request
        if not self.generated:
            return request
        stop = request.stop_conditions
        done = len(self.generated)
        less = replace(
            stop,
            max_tokens=self._remaining(),
            min_tokens=None if stop.min_tokens is None else max(0, stop.min_tokens - done),
        )
        return replace(
            request,
            token_ids=request.token_ids.extended(self.generated),
            stop_conditions=less,
            prefill_result=None,
            bootstrap_info=None,
        )

    def _remaining(self) -> int | None:
        limit = self.plan.request.stop_conditions.max_tokens
        return None if limit is None else max(0, limit - len(self.generated))

    def _give_up(self, reason: str) -> None:
        leg = self._leg
        if leg is not None and leg.is_live:
            self._ports.abort(leg, reason)
            self._close_leg(leg)

    def _close_leg(self, leg: Leg) -> None:
        assert leg is self._leg, "only the current leg is live"
        leg.is_live = False
        self._leg, self._accept_by = None, None
        self._free()

    def _free(self) -> None:
        if self._booked:
            self._booked = False
            self._ports.free(self._attempt)

    def _finish(self, finish_reason: FinishReason | None, error: MeshError | None) -> None:
        assert not self.is_finished, "a request ends once"
        self._free()
        self.is_finished = True
        self._ports.finish(
            Outcome(
                finish_reason=finish_reason,
                error=error,
                usage=self.usage(),
                attempts=self._attempt + 1,
                worker_ids=tuple(self._worker_ids),
                placed=self._placed,
            )
        )

    def usage(self) -> CompletionUsage:
        """Prompt as the client sent it, completion as it was delivered."""
        counts = usage(len(self.plan.request.token_ids), len(self.generated))
        if self._cached_tokens is None:
            return counts
        details = PromptTokensDetails(cached_tokens=self._cached_tokens)
        return replace(counts, prompt_tokens_details=details)
