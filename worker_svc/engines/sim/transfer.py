"""State machines for the handoff of one prompt's KV from a prefill to a decode worker. Pure.

    decode                                        prefill
      has blocks for the whole prompt
      Pull{room, incarnation, pages} ───────────▶   (its leg may come before or after)
                    ◀────────── Joined, Ping*       the leg is present and alive
                    ◀────────── Write*              the prompt is computed; pages are written
                    ◀────────── Done{first token}
      Received ─────────────────────────────────▶   its blocks are free, its leg ends well
      decodes

Either end may leave at any time. Decode sends Abort, and prefill responds with Aborted after its
last Write; prefill sends Fail after its last Write. A decode leg that leaves before its Pull sends
Drop. Each room has its own connection; losing it ends the room at both ends.

A machine receives events and returns actions, which the caller executes in order and at once.
Invariants, for any order of events:
- `ReleaseBlocks` is returned exactly once if the room had blocks: at decode only after the last
  write has arrived or the connection is closed; at prefill only after the last page was read. Until
  then an aborted room is ABORTING, at decode for at most `abort_s`.
- The leg gets exactly one end (`KvArrived`, `EndLeg`), or none if it left by itself (`abort`). The
  end does not wait for ABORTING.
- Every room ends: no state lasts longer than its timeout.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from common.errors import MeshError
from worker_svc.engines.handoff import (
    NO_PARTNER,
    PEER_ABORTED,
    PEER_LOST,
    HandoffTimeouts,
    handoff_error,
    no_blocks_error,
)
from worker_svc.engines.sim.messages import Done, Fail, Message, Pull, Signal, Write


@dataclass(frozen=True, slots=True)
class Action:
    """What the caller of a machine does."""


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Send a message to the peer."""

    message: Message


class Dial(Action):
    """Connect to the prefill worker, then call `on_connected` or `on_connection_lost`."""


class SendDrop(Action):
    """Send Drop to the prefill worker over a separate connection, best effort."""


class StartWriting(Action):
    """Write the pages with `extend_deadline` for each part, send Done, call `on_done_sent`."""


class StopWriting(Action):
    """Stop writing; call `on_writing_stopped` when no page is read any more."""


class ReleaseBlocks(Action):
    """Release the room's blocks."""


@dataclass(frozen=True, slots=True)
class KvArrived(Action):
    """The KV has arrived: the decode leg can continue."""

    done: Done


@dataclass(frozen=True, slots=True)
class EndLeg(Action):
    """End the leg; error None is the success of a prefill leg."""

    error: MeshError | None


class CloseConnection(Action):
    """Close the connection after sending what is queued; ignore what it still delivers."""


class HandoffOutcome(Enum):
    """How a room ended. The value names the counter of such rooms."""

    HANDED_OVER = "rooms_handed_over"
    ABORTED = "rooms_aborted"
    """Its own leg left."""
    FAILED = "rooms_failed"
    """The peer failed."""
    TIMED_OUT = "rooms_timed_out"
    EXPIRED = "leases_expired"
    FORCED = "aborts_forced"
    """Aborted, and the peer did not confirm in time."""


class _State(Enum):
    # At prefill: leg, peer or KV are missing. At decode: no blocks yet.
    WAITING = auto()
    DIALING = auto()
    PULLING = auto()
    WRITING = auto()
    SENT = auto()
    ABORTING = auto()
    ENDED = auto()


class _Machine:
    def __init__(self, timeouts: HandoffTimeouts, deadline: float) -> None:
        self.outcome: HandoffOutcome | None = None
        self._timeouts = timeouts
        self._state = _State.WAITING
        self._deadline = deadline

    @property
    def is_over(self) -> bool:
        return self._state is _State.ENDED

    @property
    def is_aborting(self) -> bool:
        """Whether the room only waits for the end of a transfer."""
        return self._state is _State.ABORTING


class PrefillMachine(_Machine):
    """Prefill's end of a room. It starts with the leg (`attach_leg`), a Pull (`attach_peer`), or a
    computed prompt.

    A room that has KV but no leg is a lease: it waits `lease_s` for its Pull.

    has_leg: whether a leg was ever attached. pull: of decode; None before it is attached.
    """

    def __init__(self, timeouts: HandoffTimeouts, now: float) -> None:
        super().__init__(timeouts, now + timeouts.partner_timeout_s)
        self.has_leg = False
        self.pull: Pull | None = None
        # Whether the leg is present and has not been ended.
        self._is_leg_waiting = False
        self._has_kv = False
        self._is_connected = False
        self._next_ping = now + timeouts.ping_interval_s

    @property
    def can_attach_leg(self) -> bool:
        return self._state is _State.WAITING and not self.has_leg and not self._has_kv

    def attach_leg(self, now: float) -> list[Action]:
        assert self.can_attach_leg, "a room has one prefill leg"
        self.has_leg = self._is_leg_waiting = True
        self._deadline = now + self._timeouts.partner_timeout_s
        return self._advance(now, should_send_joined=True)

    def attach_peer(self, now: float, pull: Pull) -> list[Action]:
        assert self.pull is None, "a room has one decode leg"
        if self._state is not _State.WAITING:
            return []
        self.pull, self._is_connected = pull, True
        return self._advance(now, should_send_joined=self.has_leg or self._has_kv)

    def on_prompt_computed(self, now: float) -> list[Action]:
        """Adds the KV: the prompt is computed; the room owns its blocks until `ReleaseBlocks`."""
        assert not self._has_kv, "a prompt is computed once"
        assert self._state is _State.WAITING, "the room has not ended"
        self._has_kv = True
        if not self.has_leg:
            self._deadline = now + self._timeouts.lease_s
        return self._advance(now, should_send_joined=False)

    def extend_deadline(self, now: float, wait_s: float) -> None:
        """Extends the deadline: the next part is written in `wait_s`."""
        self._deadline = now + wait_s + self._timeouts.partner_timeout_s

    def on_done_sent(self, now: float) -> None:
        if self._state is _State.WRITING:
            self._state = _State.SENT
            self._deadline = now + self._timeouts.partner_timeout_s

    def on_writing_stopped(self) -> list[Action]:
        """Handles the end of writing, regular or after `StopWriting`."""
        if self._state is _State.WRITING:  # Unrequested: only a defect in the writer can cause it.
            return [
                *self._end_or_abort(HandoffOutcome.FAILED, PEER_LOST, None),
                *self.on_writing_stopped(),
            ]
        if self._state is not _State.ABORTING:
            return []
        self._state = _State.ENDED
        replies: list[Action] = (
            [Send(Signal.ABORTED), CloseConnection()] if self._is_connected else []
        )
        return [ReleaseBlocks(), *replies]

    def receive(self, now: float, message: Message) -> list[Action]:
        """Handles a message after the Pull; an unexpected one counts as a lost connection."""
        match message:
            case Signal.RECEIVED if self._state is _State.SENT:
                self.outcome, self._state = HandoffOutcome.HANDED_OVER, _State.ENDED
                return [ReleaseBlocks(), *self._end_leg(None), CloseConnection()]
            case Signal.ABORT:
                return self._end_or_abort(HandoffOutcome.FAILED, PEER_ABORTED, Signal.ABORTED)
            case _:
                return self.on_connection_lost()

    def on_connection_lost(self) -> list[Action]:
        self._is_connected = False
        return [*self._end_or_abort(HandoffOutcome.FAILED, PEER_LOST, None), CloseConnection()]

    def reject(self, reason: str) -> list[Action]:
        """Ends the room because the two legs do not match."""
        return self._end_or_abort(HandoffOutcome.FAILED, reason, Fail(reason))

    def on_peer_dropped(self) -> list[Action]:
        """Handles a Drop: decode will not come."""
        return [] if self.pull else self._end_or_abort(HandoffOutcome.FAILED, PEER_ABORTED, None)

    def abort(self) -> list[Action]:
        """Ends the room because the leg left or the worker shuts down; the leg gets no end."""
        self._is_leg_waiting = False
        return self._end_or_abort(HandoffOutcome.ABORTED, PEER_ABORTED, Fail(PEER_ABORTED))

    def tick(self, now: float) -> list[Action]:
        """Sends pings and ends what has timed out."""
        if self._state in (_State.ENDED, _State.ABORTING):
            return []
        is_late = now >= self._deadline
        has_partner = self.has_leg or self._has_kv
        if self.pull is None or not has_partner:
            is_lease = self.pull is None and not self.has_leg
            outcome = HandoffOutcome.EXPIRED if is_lease else HandoffOutcome.TIMED_OUT
            return self._end_or_abort(outcome, NO_PARTNER, Fail(NO_PARTNER)) if is_late else []
        if self._state is not _State.WAITING and is_late:
            self._is_connected = False
            return [
                *self._end_or_abort(HandoffOutcome.TIMED_OUT, PEER_LOST, None),
                CloseConnection(),
            ]
        if now < self._next_ping or self._state is _State.SENT:
            return []
        self._next_ping = now + self._timeouts.ping_interval_s
        return [Send(Signal.PING)]

    def _advance(self, now: float, *, should_send_joined: bool) -> list[Action]:
        if self.pull is None:
            return []
        actions: list[Action] = []
        if should_send_joined:
            self._next_ping = now + self._timeouts.ping_interval_s
            actions.append(Send(Signal.JOINED))
        if self._has_kv:
            self._state = _State.WRITING
            self._deadline = now + self._timeouts.partner_timeout_s
            actions.append(StartWriting())
        return actions

    def _end_or_abort(
        self, outcome: HandoffOutcome, reason: str, final_message: Message | None
    ) -> list[Action]:
        """Ends the room, or waits for the end of its writing first."""
        if self._state in (_State.ENDED, _State.ABORTING):
            return []
        self.outcome = outcome
        actions = self._end_leg(reason)
        if self._state is _State.WRITING:
            self._state = _State.ABORTING
            return [*actions, StopWriting()]
        self._state = _State.ENDED
        if self._has_kv:
            actions.insert(0, ReleaseBlocks())
        if final_message and self._is_connected:
            actions += [Send(final_message), CloseConnection()]
        return actions

    def _end_leg(self, reason: str | None) -> list[Action]:
        if not self._is_leg_waiting:
            return []
        self._is_leg_waiting = False
        return [EndLeg(None if reason is None else handoff_error(reason))]


class DecodeMachine(_Machine):
    """Decode's end of a room. It starts with the leg, which waits for blocks."""

    def __init__(self, timeouts: HandoffTimeouts, now: float) -> None:
        super().__init__(timeouts, now + timeouts.blocks_timeout_s)
        self._started_at = now

    def start_pull(self) -> list[Action]:
        """Starts the pull. The room owns the leg's blocks until `ReleaseBlocks`."""
        assert self._state is _State.WAITING, "only a waiting leg gets blocks"
        self._state = _State.DIALING
        self._deadline = self._started_at + self._timeouts.partner_timeout_s
        return [Dial()]

    def on_connected(self, pull: Pull) -> list[Action]:
        """Sends the Pull over the new connection."""
        if self._state is not _State.DIALING:
            return [CloseConnection()]
        self._state = _State.PULLING
        return [Send(pull)]

    def receive(self, now: float, message: Message) -> list[Action]:
        """Handles a message of prefill. The caller has applied a Write before."""
        if self._state not in (_State.PULLING, _State.ABORTING):
            return []
        match message:
            case Signal.JOINED | Signal.PING | Write():
                if self._state is _State.PULLING:
                    self._deadline = now + self._timeouts.partner_timeout_s
                return []
            case Done():
                return self._on_done(message)
            case Fail():
                return self._on_lost(message.reason)
            case Signal.ABORTED:
                return self._on_lost(PEER_ABORTED)
            case _:
                return self._on_lost(PEER_LOST)

    def on_connection_lost(self) -> list[Action]:
        """Handles a lost or failed connection to prefill."""
        return self._on_lost(PEER_LOST)

    def abort(self, now: float) -> list[Action]:
        """Ends the room because the leg left or the worker shuts down."""
        return self._end_or_abort(now, HandoffOutcome.ABORTED)

    def tick(self, now: float) -> list[Action]:
        if now < self._deadline or self._state is _State.ENDED:
            return []
        if self._state is _State.ABORTING:
            self.outcome, self._state = HandoffOutcome.FORCED, _State.ENDED
            return [CloseConnection(), ReleaseBlocks()]
        is_waiting = self._state is _State.WAITING
        error = no_blocks_error(self._timeouts) if is_waiting else handoff_error(NO_PARTNER)
        return [EndLeg(error), *self._end_or_abort(now, HandoffOutcome.TIMED_OUT)]

    def _on_done(self, done: Done) -> list[Action]:
        is_aborting, self._state = self.is_aborting, _State.ENDED
        if is_aborting:
            return [ReleaseBlocks(), CloseConnection()]
        self.outcome = HandoffOutcome.HANDED_OVER
        return [Send(Signal.RECEIVED), ReleaseBlocks(), KvArrived(done), CloseConnection()]

    def _on_lost(self, reason: str) -> list[Action]:
        previous_state, self._state = self._state, _State.ENDED
        if previous_state is _State.ENDED:
            return []
        if previous_state is _State.ABORTING:
            return [CloseConnection(), ReleaseBlocks()]
        self.outcome = HandoffOutcome.FAILED
        return [CloseConnection(), ReleaseBlocks(), EndLeg(handoff_error(reason))]

    def _end_or_abort(self, now: float, outcome: HandoffOutcome) -> list[Action]:
        """Ends the room; after the Pull, prefill must confirm that writing has ended."""
        if self._state in (_State.ENDED, _State.ABORTING):
            return []
        self.outcome = outcome
        previous_state, self._state = self._state, _State.ENDED
        match previous_state:
            case _State.WAITING:
                return [SendDrop()]
            case _State.DIALING:
                return [CloseConnection(), ReleaseBlocks(), SendDrop()]
        self._state = _State.ABORTING
        self._deadline = now + self._timeouts.abort_s
        return [Send(Signal.ABORT)]
