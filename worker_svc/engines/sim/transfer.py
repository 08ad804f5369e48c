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

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, TypeAlias

import numpy as np

from common.errors import InvalidRequest, MeshError
from worker_svc.engines.handoff import (
    NO_PARTNER,
    PEER_ABORTED,
    PEER_LOST,
    HandoffTimeouts,
    handoff_error,
    no_blocks_error,
)


@dataclass(frozen=True, slots=True)
class Pull:
    """Decode's pages for a room, in the order of the prompt. tokens: of the prompt.

    incarnation: id of the decode worker.
    """

    room: int
    incarnation: int
    tokens: int
    block_size: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Drop:
    """No decode leg will pull this room."""

    room: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The prefill leg is present."""


@dataclass(frozen=True, slots=True)
class Ping:
    """The prefill leg is still alive."""


@dataclass(frozen=True, slots=True)
class Write:
    """Pages and the stamps written to them (`page_stamps`)."""

    pages: Sequence[int]
    stamps: Sequence[int]


@dataclass(frozen=True, slots=True)
class Done:
    """All pages are written. token: the first of the output, even if it ends the output.

    cached_tokens: prompt tokens found in prefill's cache.
    """

    token: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Prefill failed and writes nothing more. reason: as above."""

    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Decode requests the end of all writes."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """Prefill writes nothing more."""


@dataclass(frozen=True, slots=True)
class Received:
    """Decode has received all pages."""


Message: TypeAlias = Pull | Drop | Joined | Ping | Write | Done | Fail | Abort | Aborted | Received

_PULL: Final = struct.Struct("<QQII")
_ROOM: Final = struct.Struct("<Q")
_DONE: Final = struct.Struct("<II")
_MESSAGE_TYPES: Final = (Pull, Drop, Joined, Ping, Write, Done, Fail, Abort, Aborted, Received)
_EMPTY_MESSAGES: Final = (Joined, Ping, Abort, Aborted, Received)
_WRITE_BYTES: Final = 12
_PAGE_BYTES: Final = 4


def to_bytes(message: Message) -> bytes:
    """Encodes a message: a byte for the kind, then the fields, little endian; arrays last."""
    kind = bytes([_MESSAGE_TYPES.index(type(message))])
    match message:
        case Pull():
            header = _PULL.pack(
                message.room, message.incarnation, message.tokens, message.block_size
            )
            return kind + header + np.asarray(message.pages, dtype="<u4").tobytes()
        case Drop():
            return kind + _ROOM.pack(message.room)
        case Write():
            pages = np.asarray(message.pages, dtype="<u4").tobytes()
            return kind + pages + np.asarray(message.stamps, dtype="<i8").tobytes()
        case Done():
            return kind + _DONE.pack(message.token, message.cached_tokens)
        case Fail():
            return kind + message.reason.encode()
        case _:
            return kind


def from_bytes(frame: bytes) -> Message:
    """Decodes a frame. Raises InvalidRequest if it is malformed."""
    if not frame or frame[0] >= len(_MESSAGE_TYPES):
        raise InvalidRequest(f"unknown message kind {frame[:1].hex() or 'none'}", "kind")
    kind, body = _MESSAGE_TYPES[frame[0]], frame[1:]
    try:
        return _parse_message(kind, body)
    except (struct.error, ValueError) as error:
        raise InvalidRequest(f"{kind.__name__}: {error}", "body") from None


def _parse_message(kind: type[Message], body: bytes) -> Message:
    if kind is Pull:
        pages = np.frombuffer(body, dtype="<u4", offset=_PULL.size)
        room, incarnation, tokens, block_size = _PULL.unpack_from(body)
        return Pull(room, incarnation, tokens, block_size, pages.tolist())
    if kind is Drop:
        return Drop(*_ROOM.unpack(body))
    if kind is Write:
        count, remainder = divmod(len(body), _WRITE_BYTES)
        if remainder:
            raise ValueError(f"{len(body)} bytes are not a whole number of pages and stamps")
        stamps = np.frombuffer(body, dtype="<i8", offset=_PAGE_BYTES * count)
        return Write(np.frombuffer(body, dtype="<u4", count=count).tolist(), stamps.tolist())
    if kind is Done:
        return Done(*_DONE.unpack(body))
    if kind is Fail:
        return Fail(body.decode())
    for message_type in _EMPTY_MESSAGES:
        if kind is message_type:
            if body:
                raise ValueError(f"{len(body)} bytes too many")
            return message_type()
    raise AssertionError(f"{kind.__name__} has no reader")


def page_stamps(prompt: bytes, block_size: int, lora_name: str = "") -> list[int]:
    """Returns the stamp of each page of a prompt: a CRC of all tokens up to the page's end.

    prompt: token ids, 4 bytes little endian each. Stamps are equal on all workers and not negative.
    """
    size = 4 * block_size
    stamp = zlib.crc32(lora_name.encode())
    stamps = []
    for start in range(0, len(prompt), size):
        stamp = zlib.crc32(prompt[start : start + size], stamp)
        stamps.append(stamp)
    return stamps


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the peer."""

    message: Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to the prefill worker, then call `on_connected` or `on_connection_lost`."""


@dataclass(frozen=True, slots=True)
class SendDrop:
    """Send Drop to the prefill worker over a separate connection, best effort."""


@dataclass(frozen=True, slots=True)
class StartWriting:
    """Write the pages, call `extend_deadline` for each part, then send Done and call
    `on_done_sent`.
    """


@dataclass(frozen=True, slots=True)
class StopWriting:
    """Stop writing; call `on_writing_stopped` when no page is read any more."""


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """Release the room's blocks."""


@dataclass(frozen=True, slots=True)
class KvArrived:
    """The KV has arrived: the decode leg can continue."""

    done: Done


@dataclass(frozen=True, slots=True)
class EndLeg:
    """End the leg; error None is the success of a prefill leg."""

    error: MeshError | None


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close the connection after sending what is queued; ignore what it still delivers."""


Action: TypeAlias = (
    Send
    | Dial
    | SendDrop
    | StartWriting
    | StopWriting
    | ReleaseBlocks
    | KvArrived
    | EndLeg
    | CloseConnection
)


class HandoffOutcome(Enum):
    """How a room ended. FORCED: aborted, and the peer did not confirm in time."""

    HANDED_OVER = auto()
    ABORTED = auto()
    FAILED = auto()
    TIMED_OUT = auto()
    EXPIRED = auto()
    FORCED = auto()


class _State(Enum):
    # At prefill: leg, peer or KV are missing. At decode: no blocks yet.
    WAITING = auto()
    DIALING = auto()
    PULLING = auto()
    WRITING = auto()
    SENT = auto()
    ABORTING = auto()
    ENDED = auto()


class PrefillMachine:
    """Prefill's end of a room. It starts with the leg (`attach_leg`), a Pull (`attach_peer`), or a
    computed prompt.

    A room that has KV but no leg is a lease: it waits `lease_s` for its Pull.
    """

    def __init__(self, timeouts: HandoffTimeouts, now: float) -> None:
        self.outcome: HandoffOutcome | None = None
        self._timeouts = timeouts
        self._state = _State.WAITING
        self._has_leg = False
        # Whether the leg is present and has not been ended.
        self._is_leg_waiting = False
        self._has_kv = False
        self._pull: Pull | None = None
        self._has_peer = False
        self._deadline = now + timeouts.partner_timeout_s
        self._next_ping = now + timeouts.ping_interval_s

    @property
    def is_over(self) -> bool:
        """Whether the room has ended."""
        return self._state is _State.ENDED

    @property
    def is_aborting(self) -> bool:
        """Whether the room only waits for the end of a transfer."""
        return self._state is _State.ABORTING

    @property
    def has_leg(self) -> bool:
        """Whether a leg was ever attached."""
        return self._has_leg

    @property
    def can_attach_leg(self) -> bool:
        """Whether a leg may attach."""
        return self._state is _State.WAITING and not self._has_leg and not self._has_kv

    @property
    def has_peer(self) -> bool:
        """Whether decode was ever attached."""
        return self._pull is not None

    @property
    def pull(self) -> Pull:
        """Returns decode's Pull. Requires `has_peer`."""
        assert self._pull is not None, "decode is attached"
        return self._pull

    def attach_leg(self, now: float) -> list[Action]:
        """Attaches the prefill leg."""
        assert self.can_attach_leg, "a room has one prefill leg"
        self._has_leg = self._is_leg_waiting = True
        self._deadline = now + self._timeouts.partner_timeout_s
        return self._advance(now, should_send_joined=True)

    def attach_peer(self, now: float, pull: Pull) -> list[Action]:
        """Attaches decode. Requires that `has_peer` is false."""
        assert self._pull is None, "a room has one decode leg"
        if self._state is not _State.WAITING:
            return []
        self._pull, self._has_peer = pull, True
        return self._advance(now, should_send_joined=self._has_leg or self._has_kv)

    def on_prompt_computed(self, now: float) -> list[Action]:
        """Adds the KV: the prompt is computed; the room owns its blocks until `ReleaseBlocks`."""
        assert not self._has_kv, "a prompt is computed once"
        assert self._state is _State.WAITING, "the room has not ended"
        self._has_kv = True
        if not self._has_leg:
            self._deadline = now + self._timeouts.lease_s
        return self._advance(now, should_send_joined=False)

    def extend_deadline(self, now: float, wait_s: float) -> None:
        """Extends the deadline: the next part is written in `wait_s`."""
        self._deadline = now + wait_s + self._timeouts.partner_timeout_s

    def on_done_sent(self, now: float) -> list[Action]:
        """Records that Done was sent."""
        if self._state is _State.WRITING:
            self._state = _State.SENT
            self._deadline = now + self._timeouts.partner_timeout_s
        return []

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
        replies: list[Action] = [Send(Aborted()), CloseConnection()] if self._has_peer else []
        return [ReleaseBlocks(), *replies]

    def receive(self, now: float, message: Message) -> list[Action]:
        """Handles a message after the Pull; an unexpected one counts as a lost connection."""
        match message:
            case Received() if self._state is _State.SENT:
                self.outcome, self._state = HandoffOutcome.HANDED_OVER, _State.ENDED
                return [ReleaseBlocks(), *self._end_leg(None), CloseConnection()]
            case Abort():
                return self._end_or_abort(HandoffOutcome.FAILED, PEER_ABORTED, Aborted())
            case _:
                return self.on_connection_lost()

    def on_connection_lost(self) -> list[Action]:
        """Handles the loss of the connection to decode."""
        self._has_peer = False
        return [*self._end_or_abort(HandoffOutcome.FAILED, PEER_LOST, None), CloseConnection()]

    def reject(self, reason: str) -> list[Action]:
        """Ends the room because the two legs do not match."""
        return self._end_or_abort(HandoffOutcome.FAILED, reason, Fail(reason))

    def on_peer_dropped(self) -> list[Action]:
        """Handles a Drop: decode will not come."""
        return [] if self._pull else self._end_or_abort(HandoffOutcome.FAILED, PEER_ABORTED, None)

    def abort(self) -> list[Action]:
        """Ends the room because the leg left or the worker shuts down; the leg gets no end."""
        self._is_leg_waiting = False
        return self._end_or_abort(HandoffOutcome.ABORTED, PEER_ABORTED, Fail(PEER_ABORTED))

    def tick(self, now: float) -> list[Action]:
        """Sends pings and ends what has timed out."""
        if self._state in (_State.ENDED, _State.ABORTING):
            return []
        if self._pull is None:
            return self._tick_without_peer(now)
        if not self._has_leg and not self._has_kv:
            is_late = now >= self._deadline
            return (
                self._end_or_abort(HandoffOutcome.TIMED_OUT, NO_PARTNER, Fail(NO_PARTNER))
                if is_late
                else []
            )
        if self._state is not _State.WAITING and now >= self._deadline:
            self._has_peer = False
            return [
                *self._end_or_abort(HandoffOutcome.TIMED_OUT, PEER_LOST, None),
                CloseConnection(),
            ]
        if now < self._next_ping or self._state is _State.SENT:
            return []
        self._next_ping = now + self._timeouts.ping_interval_s
        return [Send(Ping())]

    def _tick_without_peer(self, now: float) -> list[Action]:
        if now < self._deadline:
            return []
        outcome = HandoffOutcome.TIMED_OUT if self._has_leg else HandoffOutcome.EXPIRED
        return self._end_or_abort(outcome, NO_PARTNER, None)

    def _advance(self, now: float, *, should_send_joined: bool) -> list[Action]:
        if self._pull is None:
            return []
        actions: list[Action] = []
        if should_send_joined:
            self._next_ping = now + self._timeouts.ping_interval_s
            actions.append(Send(Joined()))
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
        end_actions = self._end_leg(reason)
        if self._state is _State.WRITING:
            self._state = _State.ABORTING
            return [*end_actions, StopWriting()]
        self._state = _State.ENDED
        replies: list[Action] = (
            [Send(final_message), CloseConnection()] if final_message and self._has_peer else []
        )
        return [*([ReleaseBlocks()] if self._has_kv else []), *end_actions, *replies]

    def _end_leg(self, reason: str | None) -> list[Action]:
        if not self._is_leg_waiting:
            return []
        self._is_leg_waiting = False
        return [EndLeg(None if reason is None else handoff_error(reason))]


class DecodeMachine:
    """Decode's end of a room. It starts with the leg, which waits for blocks."""

    def __init__(self, timeouts: HandoffTimeouts, now: float) -> None:
        self.outcome: HandoffOutcome | None = None
        self._timeouts = timeouts
        self._state = _State.WAITING
        self._started_at = now
        self._deadline = now + timeouts.blocks_timeout_s
        self._has_joined = False

    @property
    def is_over(self) -> bool:
        """Whether the room has ended."""
        return self._state is _State.ENDED

    @property
    def is_aborting(self) -> bool:
        """Whether the room only waits until no transfer writes to its pages."""
        return self._state is _State.ABORTING

    def start_pull(self) -> list[Action]:
        """Starts the pull: the leg has blocks for the whole prompt, which the room owns until
        `ReleaseBlocks`.
        """
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
            case Joined() | Ping() | Write():
                if self._state is _State.PULLING:
                    self._deadline = now + self._timeouts.partner_timeout_s
                return []
            case Done():
                return self._on_done(message)
            case Fail():
                return self._on_lost(message.reason)
            case Aborted():
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
        """Ends what has timed out."""
        if now < self._deadline or self._state is _State.ENDED:
            return []
        if self._state is _State.ABORTING:
            self.outcome, self._state = HandoffOutcome.FORCED, _State.ENDED
            return [CloseConnection(), ReleaseBlocks()]
        return [EndLeg(self._timeout_error()), *self._end_or_abort(now, HandoffOutcome.TIMED_OUT)]

    def _timeout_error(self) -> MeshError:
        if self._state is not _State.WAITING:
            return handoff_error(NO_PARTNER)
        return no_blocks_error(self._timeouts)

    def _on_done(self, done: Done) -> list[Action]:
        previous_state, self._state = self._state, _State.ENDED
        if previous_state is _State.ABORTING:
            return [ReleaseBlocks(), CloseConnection()]
        self.outcome = HandoffOutcome.HANDED_OVER
        return [Send(Received()), ReleaseBlocks(), KvArrived(done), CloseConnection()]

    def _on_lost(self, reason: str) -> list[Action]:
        previous_state, self._state = self._state, _State.ENDED
        match previous_state:
            case _State.ENDED:
                return []
            case _State.WAITING:
                raise AssertionError("no connection exists before the pull")
            case _State.ABORTING:
                return [CloseConnection(), ReleaseBlocks()]
        self.outcome = HandoffOutcome.FAILED
        return [CloseConnection(), ReleaseBlocks(), EndLeg(handoff_error(reason))]

    def _end_or_abort(self, now: float, outcome: HandoffOutcome) -> list[Action]:
        """Before the Pull no write can occur; after it, prefill has to confirm that writing has
        ended.
        """
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
        return [Send(Abort())]
