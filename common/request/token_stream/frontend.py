"""The frontend's end of an Attach stream. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import MeshError
from common.kv.load import Load
from common.request.token_stream.frames import (
    CREDIT_BYTES,
    FRAME_BYTES,
    HEARTBEAT_S,
    PROMPT_PART_BYTES,
    AbortSlot,
    Hello,
    HelloAck,
    LegRequest,
    LegSink,
    PromptPart,
    RequestFrame,
    ResponseFrame,
    protocol_violation,
    wrong_worker_error,
)

# Without other content, a frame acknowledges after a quarter of the credit is consumed.
_ACK_THRESHOLD_BYTES = CREDIT_BYTES // 4
# Estimated wire size of a Submit without its prompt.
_SUBMIT_BYTES = 1024


class _NullSink:
    """The sink of an abandoned slot: ignores every event."""

    def accepted(self, *_: object) -> None:
        pass

    def rejected(self, *_: object) -> None:
        pass

    def tokens(self, *_: object) -> None:
        pass

    def chunk(self, *_: object) -> None:
        pass

    def terminal(self, *_: object) -> None:
        pass

    def lost(self, *_: object) -> None:
        pass


_NULL_SINK = _NullSink()


@dataclass(slots=True)
class _OpenLeg:
    sink: LegSink
    is_accepted: bool = False
    received: int = 0
    chunks: int = 0
    is_aborting: bool = False


class FrontendLink:
    """The frontend's end of one Attach stream. Holds no socket, task or clock."""

    def __init__(self, hello: Hello, now: float) -> None:
        self.hello = hello
        self.worker_id = hello.expected_worker_id
        self.loads: Sequence[Load] = ()
        self.is_open = False
        self.heartbeat_s = HEARTBEAT_S
        self._last_slot = 0
        self._open_legs: dict[int, _OpenLeg] = {}
        self._hello_pending = True
        self._last_framed_slot = 0
        self._submits: deque[tuple[int, LegRequest]] = deque()
        self._prompt_parts: deque[tuple[int, memoryview, int]] = deque()
        self._aborts: list[AbortSlot] = []
        self._consumed_bytes = self._acked_bytes = 0
        self._last_heartbeat_at = now
        self._lost: MeshError | None = None

    @property
    def open_slots(self) -> int:
        """Number of slots submitted and not ended."""
        return len(self._open_legs)

    def is_heartbeat_due(self, now: float) -> bool:
        """Returns whether `next_frame` returns a heartbeat."""
        return now - self._last_heartbeat_at >= self.heartbeat_s

    def submit(self, leg_request: LegRequest, sink: LegSink) -> int:
        """Queues a request and returns its slot. Raises the error that ended the stream, if any."""
        if self._lost is not None:
            raise self._lost
        self._last_slot += 1
        slot = self._last_slot
        self._open_legs[slot] = _OpenLeg(sink)
        self._submits.append((slot, leg_request))
        return slot

    def abort(self, slot: int, reason: str) -> None:
        """Requests the end of a slot; its Terminal still arrives. Ended or unknown: a no-op."""
        leg = self._open_legs.get(slot)
        if leg is None or leg.is_aborting:
            return
        leg.is_aborting = True
        self._aborts.append(AbortSlot(slot, reason))

    def abort_all(self, error: MeshError) -> None:
        """Ends all slots for their sinks with `error` and requests their end from the worker.

        For an engine that hangs while its process lives: the stream stays open and later output of
        these slots is ignored.
        """
        for slot, leg in list(self._open_legs.items()):
            self.abort(slot, "hung")
            sink, leg.sink = leg.sink, _NULL_SINK
            sink.lost(error)

    def receive(self, frame: ResponseFrame) -> bool:
        """Processes a frame and calls the sinks. Returns whether it must be acknowledged at once.

        Raises on a protocol violation; then call `close`.
        """
        if self._lost is not None:
            return False
        if frame.hello_ack is not None:
            self._complete_handshake(frame.hello_ack)
        elif not self.is_open:
            raise protocol_violation("a", "the first frame of a worker must carry hello_ack")
        if frame.heartbeat:
            self.loads = frame.heartbeat
        legs = self._open_legs
        for slot in frame.accepted:
            leg = self._require_leg(slot, "accepted", is_accepted=False)
            leg.is_accepted = True
            leg.sink.accepted()
        for rejected in frame.rejected:
            leg = self._require_leg(rejected.slot, "rejected", is_accepted=False)
            del legs[rejected.slot]
            leg.sink.rejected(rejected.error)
        if frame.slot or frame.token_id or frame.logprobs:
            self._receive_tokens(frame)
        for chunk in frame.chunks:
            leg = self._require_leg(chunk.slot, "sent a chunk")
            if chunk.index != leg.chunks:
                raise protocol_violation(
                    "c", f"slot {chunk.slot}: chunk {chunk.index} came, {leg.chunks} is next"
                )
            leg.chunks += 1
            leg.sink.chunk(chunk.json)
        for terminal in frame.terminals:
            leg = self._require_leg(terminal.slot, "ended")
            if terminal.total_tokens != leg.received:
                raise protocol_violation(
                    "c",
                    f"slot {terminal.slot} ended after {terminal.total_tokens} tokens, "
                    f"{leg.received} arrived",
                )
            del legs[terminal.slot]
            leg.sink.terminal(terminal)
        if frame.sent_bytes < self._consumed_bytes:
            raise protocol_violation(
                "i", f"sent_bytes fell from {self._consumed_bytes} to {frame.sent_bytes}"
            )
        self._consumed_bytes = frame.sent_bytes
        return self._consumed_bytes - self._acked_bytes >= _ACK_THRESHOLD_BYTES

    def _receive_tokens(self, frame: ResponseFrame) -> None:
        if not len(frame.slot) == len(frame.start) == len(frame.count):
            raise protocol_violation("h", "slot, start and count differ in length")
        token_id = frame.token_id
        # Checked before any sink is called: one wrong count shifts all later tokens to other slots.
        if sum(frame.count) != len(token_id) or min(frame.count, default=1) < 1:
            raise protocol_violation("h", "the counts do not add up to the tokens of the frame")
        logprobs = dict(frame.logprobs) if frame.logprobs else {}
        position = 0
        for slot, start, count in zip(frame.slot, frame.start, frame.count, strict=True):
            leg = self._require_leg(slot, "sent tokens")
            if start != leg.received:
                raise protocol_violation(
                    "c", f"slot {slot}: tokens from {start} came, {leg.received} is next"
                )
            end = position + count
            leg.received += count
            slot_logprobs = logprobs.pop(slot, ()) if logprobs else ()
            if slot_logprobs and len(slot_logprobs) != count:
                raise protocol_violation(
                    "h", f"slot {slot}: {len(slot_logprobs)} logprobs for {count} tokens"
                )
            leg.sink.tokens(token_id[position:end], slot_logprobs)
            position = end
        if logprobs:
            raise protocol_violation("h", f"logprobs without tokens: slots {sorted(logprobs)}")

    def _require_leg(self, slot: int, action: str, *, is_accepted: bool = True) -> _OpenLeg:
        leg = self._open_legs.get(slot)
        if leg is None:
            raise protocol_violation("c", f"slot {slot} {action}, but it is not open")
        if leg.is_accepted is not is_accepted:
            when = "before" if is_accepted else "after"
            raise protocol_violation("c", f"slot {slot} {action} {when} it was accepted")
        return leg

    def _complete_handshake(self, ack: HelloAck) -> None:
        if self.is_open:
            raise protocol_violation("a", "hello_ack came twice")
        if ack.worker_id != self.worker_id:
            raise wrong_worker_error(ack.worker_id, self.worker_id)
        if ack.heartbeat_s <= 0:
            raise protocol_violation("e", "heartbeat_ms of hello_ack must be above 0")
        self.is_open = True
        self.heartbeat_s = ack.heartbeat_s

    def next_frame(self, now: float) -> RequestFrame | None:
        """Returns the next frame to write, or None if there is nothing to send."""
        if self._lost is not None:
            return None
        frame = RequestFrame()
        has_content = False
        if self._hello_pending:
            frame.hello, self._hello_pending, has_content = self.hello, False, True
        budget = FRAME_BYTES - self._frame_submits(frame)
        if self._aborts:  # an abort never overtakes its Submit
            frame.aborts = [a for a in self._aborts if a.slot <= self._last_framed_slot]
            self._aborts = [a for a in self._aborts if a.slot > self._last_framed_slot]
        while self._prompt_parts and budget >= PROMPT_PART_BYTES:
            budget -= self._frame_prompt_part(frame)
        has_content = has_content or bool(frame.submits or frame.aborts or frame.prompt_parts)
        unacked_bytes = self._consumed_bytes - self._acked_bytes
        has_content = has_content or unacked_bytes >= _ACK_THRESHOLD_BYTES
        if self.is_heartbeat_due(now):
            self._last_heartbeat_at, frame.heartbeat, has_content = now, True, True
        if not has_content:
            return None
        self._acked_bytes = frame.acked_bytes = self._consumed_bytes
        return frame

    def _frame_submits(self, frame: RequestFrame) -> int:
        """Moves the submits that fit, at least one, to the frame; returns their bytes."""
        used = 0
        while self._submits:
            slot, leg_request = self._submits[0]
            prompt = leg_request.prompt
            size = _submit_size(leg_request, min(len(prompt), PROMPT_PART_BYTES))
            if used and used + size > FRAME_BYTES:
                break
            used += size
            self._submits.popleft()
            self._last_framed_slot = slot
            if len(prompt) > PROMPT_PART_BYTES:
                leg_request = leg_request.with_first_part(PROMPT_PART_BYTES)
                self._prompt_parts.append((slot, memoryview(prompt), PROMPT_PART_BYTES))
            frame.submits.append((slot, leg_request))
        return used

    def _frame_prompt_part(self, frame: RequestFrame) -> int:
        slot, prompt, offset = self._prompt_parts.popleft()
        leg = self._open_legs.get(slot)
        if leg is None or leg.is_aborting:  # the worker drops the rest too
            return 0
        end = min(offset + PROMPT_PART_BYTES, len(prompt))
        frame.prompt_parts.append(PromptPart(slot, offset, bytes(prompt[offset:end])))
        if end < len(prompt):
            self._prompt_parts.append((slot, prompt, end))
        return end - offset

    def close(self, error: MeshError) -> None:
        """Ends all slots with `error` (f). The link cannot be used afterwards."""
        if self._lost is not None:
            return
        self._lost, self.is_open = error, False
        legs, self._open_legs = self._open_legs, {}
        self._submits.clear()
        self._prompt_parts.clear()
        self._aborts.clear()
        for leg in legs.values():
            leg.sink.lost(error)


def _submit_size(leg_request: LegRequest, prompt_bytes: int) -> int:
    passed_through = leg_request.chat_json or leg_request.completion_json or b""
    return _SUBMIT_BYTES + prompt_bytes + len(passed_through)
