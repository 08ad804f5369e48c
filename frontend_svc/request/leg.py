"""One leg of a request, and the actions of the request machine (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.errors import MeshError
from common.request.preprocessed import TokenLogprob
from common.request.token_stream import LegRequest, Terminal
from frontend_svc.request.types import RequestOutcome


class LegEvents(Protocol):
    """Events of a live leg."""

    def leg_tokens(
        self, leg: Leg, token_ids: list[int], logprobs: Sequence[TokenLogprob]
    ) -> None: ...
    def leg_chunk(self, leg: Leg, json: bytes) -> None: ...
    def leg_ended(self, leg: Leg, terminal: Terminal) -> None: ...
    def leg_failed(self, leg: Leg, error: MeshError) -> None: ...


class Leg:
    """One submission of an attempt, and the sink of its slot. phase: of its LegRequest. events: the
    request machine, which receives them while the leg is live.
    """

    def __init__(
        self, events: LegEvents, attempt: int, worker_id: int, phase: str, span_id: str
    ) -> None:
        self._events = events
        self.attempt = attempt
        self.worker_id = worker_id
        self.phase = phase
        self.span_id = span_id
        self.is_live = True
        self.is_accepted = False
        self.delivered = 0

    def accepted(self) -> None:
        self.is_accepted = True

    def rejected(self, error: MeshError) -> None:
        if self.is_live:
            self._events.leg_failed(self, error)

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        if self.is_live:
            self._events.leg_tokens(self, token_ids, logprobs)

    def chunk(self, json: bytes) -> None:
        if self.is_live:
            self._events.leg_chunk(self, json)

    def terminal(self, terminal: Terminal) -> None:
        if self.is_live:
            self._events.leg_ended(self, terminal)

    def lost(self, error: MeshError) -> None:
        self.rejected(error)


class RequestPorts(Protocol):
    """Actions of the machine. No call blocks; results arrive as events."""

    def members(self) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the workers that serve the request's model and adapter, and those of them with
        an open circuit."""

    def take_permit(self) -> bool:
        """Takes a permit of the migration limiter, for a retried attempt; if it returns False,
        `place_again` follows."""

    def wait_for_worker(self, until: float) -> None:
        """Gives the permit back; `place_again` follows when a worker appears or recovers, at the
        latest at `until`."""

    def place(self, attempt: int, excluded: frozenset[int]) -> None:
        """Requests a placement: `placed` or `placement_failed` of this attempt follows."""

    def submit(self, worker_id: int, leg_request: LegRequest, leg: Leg) -> None:
        """Sends the leg to its worker. `leg` is the sink, never called from within `submit`."""

    def abort_leg(self, leg: Leg, reason: str) -> None:
        """Ends a leg whose result is not needed."""

    def prefill_done(self, attempt: int) -> None:
        """Reports to the router that the first token is there."""

    def free(self, attempt: int) -> None:
        """Frees the attempt's booking."""

    def emit(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Passes tokens on to the client."""

    def emit_chunk(self, json: bytes) -> None:
        """Passes on a chunk of the response to a pass-through body, or log probabilities of the
        prompt."""

    def finish(self, outcome: RequestOutcome) -> None:
        """Ends the request for its client, once."""

    def wake_at(self, at: float) -> None:
        """Schedules `on_timer`, in place of the time set before."""

    def now(self) -> float:
        """Returns seconds on the deadline's clock."""

    def take_retry(self, error: MeshError) -> bool:
        """Returns whether the retry budget allows a retry after this error; if so, counts it."""

    def has_left(self, worker_id: int) -> bool:
        """Returns whether the worker has left the mesh."""

    def worker_failed(self, worker_id: int) -> None:
        """Counts a failure of the request against a worker."""

    def stalled_s(self) -> float:
        """Returns the seconds for which this process has stalled; see
        `common/streams/stall_clock.py`."""

    def silent_s(self, worker_id: int) -> float:
        """Returns the seconds since the last frame of the worker; infinite without an open
        stream."""
