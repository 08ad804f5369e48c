"""The slot machine of the token plane, both ends (pure).

The rules (a)-(i) stand in `kvmesh/engine/v1/engine.proto`; letters in comments refer to them.
`FrontendLink` and `WorkerLink` are the two ends of one Attach stream. Frames go in through
`receive` and come out of `next_frame`; time is an argument. They hold no socket, task or clock, so
production and the virtual-time simulation run the same objects.

Invariants, both ends: a slot's token offsets have no gap and no duplicate; a slot ends exactly
once; whatever is queued belongs to an open slot or is its end; nothing follows a lost stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    PromptTooLong,
    WorkerLost,
)
from common.kv.load import Load
from common.request.preprocessed import (
    CompletionUsage,
    FinishReason,
    PrefillResult,
    PreprocessedRequest,
    TokenLogprob,
    TraceLink,
)

HEARTBEAT_S = 1.0
MISSED_HEARTBEATS_MAX = 3
CREDIT_BYTES = 1 << 20
FRAME_BYTES = 256 << 10
PROMPT_PART_BYTES = 64 << 10
# What a worker gathers for one prompt at most; far above any context length.
PROMPT_BYTES_MAX = 64 << 20
# Acknowledge at the latest when a quarter of the credit was consumed without a word.
_ACK_THRESHOLD_BYTES = CREDIT_BYTES // 4
# What one entry costs against FRAME_BYTES and credit: close to, never far below, its wire size.
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 20
_BATCH_BYTES = 12
_TERMINAL_BYTES = 96
_SUBMIT_BYTES = 1024
# One slot's turn in a frame; keeps turns short without making many of them.
_QUANTUM_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a stream; see the proto."""

    frontend_id: int
    expected_worker_id: int
    stream_seq: int


@dataclass(frozen=True, slots=True)
class HelloAck:
    """Answers Hello."""

    worker_id: int
    heartbeat_s: float = HEARTBEAT_S
    credit_bytes: int = CREDIT_BYTES


@dataclass(frozen=True, slots=True)
class LegRequest:
    """One leg's work, as the frontend hands it over.

    Exactly one of `request`, `chat_json`, `completion_json` is set. `request.token_ids` may be of
    any length: the link cuts it into parts. timeout_s: what the leg may still take.
    """

    request_id: str
    attempt: int = 0
    timeout_s: float | None = None
    traceparent: str = ""
    span_id: str = ""
    tenant: str = ""
    priority: int | None = None
    request: PreprocessedRequest | None = None
    chat_json: bytes | None = None
    completion_json: bytes | None = None
    phase: str = ""


@dataclass(slots=True)
class Submit:
    """An Order on the wire: `prompt` is its first part (u32 LE), `prompt_bytes` the whole.

    error: why the order could not be read; the slot is refused with it, the stream goes on.
    """

    slot: int
    leg_request: LegRequest
    prompt: bytes = b""
    prompt_bytes: int = 0
    error: InvalidRequest | None = None


@dataclass(frozen=True, slots=True)
class PromptPart:
    slot: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class AbortSlot:
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    slot: int
    error: MeshError


@dataclass(frozen=True, slots=True)
class JsonChunk:
    slot: int
    index: int
    json: bytes


@dataclass(frozen=True, slots=True)
class Terminal:
    """The end of a slot. `error` set means it failed; `total_tokens` is the whole output's size."""

    slot: int
    finish_reason: FinishReason | None
    error: MeshError | None = None
    usage: CompletionUsage | None = None
    prefill_result: PrefillResult | None = None
    worker_trace_link: TraceLink | None = None
    stop_reason_json: str = ""
    total_tokens: int = 0


@dataclass(slots=True)
class RequestFrame:
    """One frame frontend → worker."""

    hello: Hello | None = None
    submits: list[Submit] = field(default_factory=list)
    prompt_parts: list[PromptPart] = field(default_factory=list)
    aborts: list[AbortSlot] = field(default_factory=list)
    acked_bytes: int = 0
    heartbeat: bool = False


@dataclass(slots=True)
class ResponseFrame:
    """One frame worker → frontend; tokens are a struct of arrays (h)."""

    hello_ack: HelloAck | None = None
    accepted: list[int] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    token_id: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Sequence[TokenLogprob]]] = field(default_factory=list)
    chunks: list[JsonChunk] = field(default_factory=list)
    terminals: list[Terminal] = field(default_factory=list)
    sent_bytes: int = 0
    heartbeat: Sequence[Load] = ()


class LegSink(Protocol):
    """Who hears of a slot at the frontend. Calls come in the order of rule (c), then end."""

    def accepted(self) -> None:
        """The worker took it."""

    def rejected(self, error: MeshError) -> None:
        """The worker refused it; nothing ran. The end."""

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """The next tokens."""

    def chunk(self, json: bytes) -> None:
        """The next chunk of a pass-through request."""

    def terminal(self, terminal: Terminal) -> None:
        """The end."""

    def lost(self, error: MeshError) -> None:
        """The stream is gone; how far the worker came is unknown. The end."""


def protocol_violation(rule: str, message: str) -> InvalidRequest:
    """The peer broke the rule of that letter: the stream ends with this."""
    return InvalidRequest(
        f"Attach rule ({rule}): {message}", reason="ATTACH_BREACH", metadata={"rule": rule}
    )


def _wrong_worker_error(actual: int, expected: int) -> Conflict:
    return Conflict(
        f"Attach rule (a): this is worker {actual}, not {expected}",
        reason="WRONG_WORKER",
        metadata={"rule": "a"},
    )


class _NullSink:
    """The sink of an abandoned slot."""

    def accepted(self) -> None:
        """Nobody hears it."""

    def rejected(self, error: MeshError) -> None:
        """Nobody hears it."""

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Nobody hears it."""

    def chunk(self, json: bytes) -> None:
        """Nobody hears it."""

    def terminal(self, terminal: Terminal) -> None:
        """Nobody hears it."""

    def lost(self, error: MeshError) -> None:
        """Nobody hears it."""


_NULL_SINK = _NullSink()


@dataclass(slots=True)
class _OpenLeg:
    sink: LegSink
    state: str = "submitted"  # → accepted
    received: int = 0
    chunks: int = 0
    is_aborting: bool = False


class FrontendLink:
    """The frontend's end of one Attach stream."""

    def __init__(self, hello: Hello, now: float) -> None:
        self.hello = hello
        self.worker_id = hello.expected_worker_id
        self.loads: Sequence[Load] = ()
        self.loads_received_at = now
        self.is_open = False
        self._heartbeat_s = HEARTBEAT_S
        self._last_slot = 0
        self._open_legs: dict[int, _OpenLeg] = {}
        self._hello_pending = True
        self._last_framed_slot = 0
        self._submits: deque[Submit] = deque()
        self._prompt_parts: deque[tuple[int, memoryview, int]] = deque()
        self._aborts: list[AbortSlot] = []
        self._consumed_bytes = self._acked_bytes = 0
        self._last_received_at = now
        self._last_heartbeat_at = now
        self._lost: MeshError | None = None

    @property
    def open_slots(self) -> int:
        """Slots submitted and not ended."""
        return len(self._open_legs)

    def submit(self, leg_request: LegRequest, sink: LegSink) -> int:
        """Queues an order and returns its slot. Raises what ended the stream, if it ended."""
        if self._lost is not None:
            raise self._lost
        self._last_slot += 1
        slot = self._last_slot
        self._open_legs[slot] = _OpenLeg(sink)
        prompt = b"" if leg_request.request is None else leg_request.request.token_ids.little_endian
        prompt_size = len(prompt)
        self._submits.append(
            Submit(
                slot,
                leg_request,
                prompt[:PROMPT_PART_BYTES],
                prompt_size if prompt_size > PROMPT_PART_BYTES else 0,
            )
        )
        return slot

    def abort(self, slot: int, reason: str) -> None:
        """Asks for a slot's end; its Terminal still comes. Ended or unknown: a no-op."""
        leg = self._open_legs.get(slot)
        if leg is None or leg.is_aborting:
            return
        leg.is_aborting = True
        self._aborts.append(AbortSlot(slot, reason))

    def abort_all(self, error: MeshError) -> None:
        """Ends all slots for their sinks with `error` and asks the worker to end them too.

        For an engine that hangs while its process lives: the stream goes on, what the worker still
        says of these slots is taken in and told to nobody.
        """
        for slot, leg in list(self._open_legs.items()):
            self.abort(slot, "hung")
            sink, leg.sink = leg.sink, _NULL_SINK
            sink.lost(error)

    def receive(self, frame: ResponseFrame, now: float) -> None:
        """Takes a frame in and tells the sinks. Raises on a breach; then call `close`."""
        if self._lost is not None:
            return
        self._last_received_at = now
        if frame.hello_ack is not None:
            self._complete_handshake(frame.hello_ack)
        elif not self.is_open:
            raise protocol_violation("a", "the first frame of a worker must carry hello_ack")
        if frame.heartbeat:
            self.loads, self.loads_received_at = frame.heartbeat, now
        legs = self._open_legs
        for slot in frame.accepted:
            leg = self._require_submitted_leg(slot, "accepted")
            leg.state = "accepted"
            leg.sink.accepted()
        for rejected in frame.rejected:
            leg = self._require_submitted_leg(rejected.slot, "rejected")
            del legs[rejected.slot]
            leg.sink.rejected(rejected.error)
        if frame.slot or frame.token_id or frame.logprobs:
            self._receive_tokens(frame)
        for chunk in frame.chunks:
            leg = self._require_accepted_leg(chunk.slot, "sent a chunk")
            if chunk.index != leg.chunks:
                raise protocol_violation(
                    "c", f"slot {chunk.slot}: chunk {chunk.index} came, {leg.chunks} is next"
                )
            leg.chunks += 1
            leg.sink.chunk(chunk.json)
        for terminal in frame.terminals:
            leg = self._require_accepted_leg(terminal.slot, "ended")
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

    def _receive_tokens(self, frame: ResponseFrame) -> None:
        if not len(frame.slot) == len(frame.start) == len(frame.count):
            raise protocol_violation("h", "slot, start and count differ in length")
        token_id = frame.token_id
        # Before anybody is told: with one wrong count all tokens behind it are somebody else's.
        if sum(frame.count) != len(token_id) or min(frame.count, default=1) < 1:
            raise protocol_violation("h", "the counts do not add up to the tokens of the frame")
        logprobs = dict(frame.logprobs) if frame.logprobs else {}
        position = 0
        for slot, start, count in zip(frame.slot, frame.start, frame.count, strict=True):
            leg = self._require_accepted_leg(slot, "sent tokens")
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
            raise protocol_violation(
                "h", f"logprobs without tokens for the slots {sorted(logprobs)}"
            )

    def _require_leg(self, slot: int, action: str) -> _OpenLeg:
        leg = self._open_legs.get(slot)
        if leg is None:
            raise protocol_violation("c", f"slot {slot} {action}, but it is not open")
        return leg

    def _require_submitted_leg(self, slot: int, action: str) -> _OpenLeg:
        leg = self._require_leg(slot, action)
        if leg.state != "submitted":
            raise protocol_violation("c", f"slot {slot} {action} after it was accepted")
        return leg

    def _require_accepted_leg(self, slot: int, action: str) -> _OpenLeg:
        leg = self._open_legs.get(slot)
        if leg is None or leg.state != "accepted":
            self._require_leg(slot, action)
            raise protocol_violation("c", f"slot {slot} {action} before it was accepted")
        return leg

    def _complete_handshake(self, ack: HelloAck) -> None:
        if self.is_open:
            raise protocol_violation("a", "hello_ack came twice")
        if ack.worker_id != self.worker_id:
            raise _wrong_worker_error(ack.worker_id, self.worker_id)
        if ack.heartbeat_s <= 0:
            raise protocol_violation(
                "e", "hello_ack asks for heartbeats without a pause between them"
            )
        self.is_open = True
        self._heartbeat_s = ack.heartbeat_s

    def next_frame(self, now: float) -> RequestFrame | None:
        """The next frame to write, or None when there is nothing to say."""
        if self._lost is not None:
            return None
        frame = RequestFrame()
        has_content = False
        if self._hello_pending:
            frame.hello, self._hello_pending, has_content = self.hello, False, True
            self._last_received_at = now  # a dial may take its time; silence counts from here
        budget = FRAME_BYTES - self._frame_submits(frame)
        if self._aborts:  # an abort never overtakes its Submit
            frame.aborts = [a for a in self._aborts if a.slot <= self._last_framed_slot]
            self._aborts = [a for a in self._aborts if a.slot > self._last_framed_slot]
        while self._prompt_parts and budget >= PROMPT_PART_BYTES:
            budget -= self._frame_prompt_part(frame)
        has_content = has_content or bool(frame.submits or frame.aborts or frame.prompt_parts)
        if self._consumed_bytes - self._acked_bytes >= _ACK_THRESHOLD_BYTES:
            has_content = True
        if now - self._last_heartbeat_at >= self._heartbeat_s:
            self._last_heartbeat_at, frame.heartbeat, has_content = now, True, True
        if not has_content:
            return None
        self._acked_bytes = frame.acked_bytes = self._consumed_bytes
        return frame

    def _frame_submits(self, frame: RequestFrame) -> int:
        """Frames the submits that fit, at least one; their bytes."""
        used = 0
        while self._submits:
            submit = self._submits[0]
            size = _submit_size(submit)
            if used and used + size > FRAME_BYTES:
                break
            used += size
            self._last_framed_slot = submit.slot
            frame.submits.append(self._submits.popleft())
            if submit.prompt_bytes:
                assert submit.leg_request.request is not None, "only token ids come in parts"
                prompt = memoryview(submit.leg_request.request.token_ids.little_endian)
                self._prompt_parts.append((submit.slot, prompt, len(submit.prompt)))
        return used

    def _frame_prompt_part(self, frame: RequestFrame) -> int:
        slot, prompt, offset = self._prompt_parts.popleft()
        leg = self._open_legs.get(slot)
        if leg is None or leg.is_aborting:  # over, or about to be: the worker drops the rest too
            return 0
        end = min(offset + PROMPT_PART_BYTES, len(prompt))
        frame.prompt_parts.append(PromptPart(slot, offset, bytes(prompt[offset:end])))
        if end < len(prompt):
            self._prompt_parts.append((slot, prompt, end))
        return end - offset

    def tick(self, now: float) -> MeshError | None:
        """The error to `close` the stream with, once three heartbeats were missed (e)."""
        limit = MISSED_HEARTBEATS_MAX * self._heartbeat_s
        if self._lost is None and now - self._last_received_at > limit:
            return WorkerLost(
                f"worker {self.worker_id} said nothing for {limit:g} s", retryable=True
            )
        return None

    def close(self, error: MeshError) -> None:
        """Ends all slots with `error` (f). The stream is of no use afterwards."""
        if self._lost is not None:
            return
        self._lost, self.is_open = error, False
        legs, self._open_legs = self._open_legs, {}
        self._submits.clear()
        self._prompt_parts.clear()
        self._aborts.clear()
        for leg in legs.values():
            leg.sink.lost(error)


def _submit_size(submit: Submit) -> int:
    leg_request = submit.leg_request
    return (
        _SUBMIT_BYTES
        + len(submit.prompt)
        + len(leg_request.chat_json or b"")
        + len(leg_request.completion_json or b"")
    )


@dataclass(frozen=True, slots=True)
class StartSlot:
    """Command to the worker: run this. `prompt` is whole (u32 LE bytes)."""

    slot: int
    leg_request: LegRequest
    prompt: bytes


@dataclass(frozen=True, slots=True)
class StopSlot:
    """Command to the worker: end this slot; a Terminal is still due.

    A slot that was refused on the Start right before it needs nothing more.
    """

    slot: int
    reason: str


@dataclass(slots=True)
class _Slot:
    state: str = "arriving"  # → started → accepted → ended (kept until its last tokens are out)
    leg_request: LegRequest | None = None
    prompt: bytearray = field(default_factory=bytearray)
    prompt_bytes: int = 0
    deadline: float | None = None
    is_stopping: bool = False
    sent: int = 0
    pending: list[int] = field(default_factory=list)
    # Empty, or one entry a pending token; None where the engine gave none.
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    chunks: deque[bytes] = field(default_factory=deque)
    sent_chunks: int = 0
    terminal: Terminal | None = None
    is_queued: bool = False


def _default_loads() -> Sequence[Load]:
    return (Load(),)


class WorkerLink:
    """The worker's end of one Attach stream."""

    def __init__(self, worker_id: int, now: float, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.worker_id = worker_id
        self.hello: Hello | None = None
        self._heartbeat_s = heartbeat_s
        self._slots: dict[int, _Slot] = {}
        self._last_slot = 0
        self._hello_ack_pending = False
        self._accepted: list[int] = []
        self._rejected: list[Rejected] = []
        self._send_queue: deque[int] = deque()
        self._sent_bytes = self._acked_bytes = 0
        self._last_received_at = now
        self._last_heartbeat_at = now - heartbeat_s
        self._lost = False

    @property
    def open_slots(self) -> int:
        """Slots submitted whose end has not been framed."""
        return len(self._slots)

    @property
    def unacked_bytes(self) -> int:
        """Token payload sent and not acknowledged (i)."""
        return self._sent_bytes - self._acked_bytes

    def receive(self, frame: RequestFrame, now: float) -> list[StartSlot | StopSlot]:
        """Takes a frame in; what to start and stop, in order. Raises on a breach."""
        if self._lost:
            return []
        self._last_received_at = now
        if frame.hello is not None:
            self._complete_handshake(frame.hello)
        elif self.hello is None:
            raise protocol_violation("a", "the first frame of a frontend must carry hello")
        if frame.acked_bytes > self._sent_bytes:
            raise protocol_violation(
                "i", f"{frame.acked_bytes} bytes acknowledged, {self._sent_bytes} were sent"
            )
        self._acked_bytes = max(self._acked_bytes, frame.acked_bytes)
        commands: list[StartSlot | StopSlot] = []
        for submit in frame.submits:
            self._handle_submit(submit, now, commands)
        for part in frame.prompt_parts:
            self._handle_prompt_part(part, commands)
        for abort in frame.aborts:
            self._handle_abort(abort, commands)
        return commands

    def _complete_handshake(self, hello: Hello) -> None:
        if self.hello is not None:
            raise protocol_violation("a", "hello came twice")
        if hello.expected_worker_id != self.worker_id:
            raise _wrong_worker_error(self.worker_id, hello.expected_worker_id)
        self.hello, self._hello_ack_pending = hello, True

    def _handle_submit(
        self, submit: Submit, now: float, commands: list[StartSlot | StopSlot]
    ) -> None:
        if submit.slot <= self._last_slot:
            raise protocol_violation(
                "b", f"slot {submit.slot} is not above {self._last_slot}: never reuse one"
            )
        self._last_slot = submit.slot
        error = submit.error
        if submit.prompt_bytes > PROMPT_BYTES_MAX:
            error = PromptTooLong(
                f"the prompt has {submit.prompt_bytes // 4} tokens, "
                f"a worker reads at most {PROMPT_BYTES_MAX // 4}"
            )
        if error is not None:
            self._rejected.append(Rejected(submit.slot, error))
            return
        if submit.prompt_bytes and not _is_partial_prompt(submit):
            raise protocol_violation(
                "g", f"slot {submit.slot}: prompt_bytes does not fit its first part"
            )
        timeout_s = submit.leg_request.timeout_s
        slot = _Slot(
            leg_request=submit.leg_request,
            prompt_bytes=submit.prompt_bytes or len(submit.prompt),
            deadline=None if timeout_s is None else now + timeout_s,
        )
        self._slots[submit.slot] = slot
        if not submit.prompt_bytes:
            slot.state = "started"
            commands.append(StartSlot(submit.slot, submit.leg_request, submit.prompt))
            return
        slot.prompt += submit.prompt

    def _handle_prompt_part(self, part: PromptPart, commands: list[StartSlot | StopSlot]) -> None:
        if part.slot > self._last_slot:
            raise protocol_violation(
                "c", f"slot {part.slot} continues a prompt, but was never submitted"
            )
        slot = self._slots.get(part.slot)
        if slot is None or slot.state == "ended":
            return  # aborted or refused while its prompt was under way
        if slot.state != "arriving" or part.offset != len(slot.prompt) or not part.data:
            raise protocol_violation(
                "g", f"slot {part.slot}: prompt part at {part.offset} is out of order"
            )
        slot.prompt += part.data
        if len(slot.prompt) > slot.prompt_bytes:
            raise protocol_violation(
                "g", f"slot {part.slot}: the prompt is longer than the Submit said"
            )
        if len(slot.prompt) == slot.prompt_bytes:
            assert slot.leg_request is not None
            slot.state = "started"
            commands.append(StartSlot(part.slot, slot.leg_request, bytes(slot.prompt)))
            slot.prompt = bytearray()

    def _handle_abort(self, abort: AbortSlot, commands: list[StartSlot | StopSlot]) -> None:
        slot = self._slots.get(abort.slot)
        if slot is None or slot.state == "ended" or slot.is_stopping:
            return
        slot.is_stopping = True
        if slot.state == "arriving":  # nothing runs yet: the end comes from here
            self.end(abort.slot, FinishReason.CANCELLED)
            return
        commands.append(StopSlot(abort.slot, abort.reason))

    def accept(self, slot: int) -> None:
        """The engine took the slot's request.

        This and what follows is for open slots; on a lost stream it says nothing to anybody.
        """
        if self._lost:
            return
        state = self._slots[slot]
        assert state.state == "started", state.state
        state.state = "accepted"
        self._accepted.append(slot)

    def reject(self, slot: int, error: MeshError) -> None:
        """The slot's request is refused; nothing ran."""
        if self._lost:
            return
        state = self._slots.pop(slot)
        assert state.state in ("arriving", "started"), state.state
        self._rejected.append(Rejected(slot, error))

    def tokens(
        self, slot: int, token_ids: Iterable[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """New output of a slot. logprobs: one a token, or none at all."""
        if self._lost:
            return
        state = self._slots[slot]
        assert state.state == "accepted", state.state
        older_count = len(state.pending)
        state.pending.extend(token_ids)
        if logprobs or state.logprobs:
            _append_logprobs(state, older_count, logprobs)
        if state.pending and not state.is_queued:
            self._enqueue(slot, state)

    def chunk(self, slot: int, json: bytes) -> None:
        """New output of a pass-through slot."""
        if self._lost:
            return
        state = self._slots[slot]
        assert state.state == "accepted", state.state
        state.chunks.append(json)
        self._enqueue(slot, state)

    def end(
        self,
        slot: int,
        finish_reason: FinishReason | None,
        *,
        error: MeshError | None = None,
        usage: CompletionUsage | None = None,
        prefill_result: PrefillResult | None = None,
        worker_trace_link: TraceLink | None = None,
        stop_reason_json: str = "",
    ) -> None:
        """The slot's end, framed after its last token. Once a slot."""
        if self._lost:
            return
        state = self._slots[slot]
        assert state.state != "ended", f"slot {slot} ended twice"
        if state.state != "accepted":  # rule (c): no end without a beginning
            self._accepted.append(slot)
        state.state = "ended"
        state.prompt = bytearray()
        state.terminal = Terminal(
            slot=slot,
            finish_reason=finish_reason,
            error=error,
            usage=usage,
            prefill_result=prefill_result,
            worker_trace_link=worker_trace_link,
            stop_reason_json=stop_reason_json,
            total_tokens=state.sent + len(state.pending),
        )
        self._enqueue(slot, state)

    def _enqueue(self, slot: int, state: _Slot) -> None:
        if not state.is_queued:
            state.is_queued = True
            self._send_queue.append(slot)

    def next_frame(
        self, now: float, loads: Callable[[], Sequence[Load]] = _default_loads
    ) -> ResponseFrame | None:
        """The next frame to write, or None when there is nothing to say or no credit.

        loads: gives the load of all ranks, at least one; asked when a heartbeat is due.
        """
        if self.hello is None or self._lost:
            return None
        frame = ResponseFrame()
        has_content = False
        if self._hello_ack_pending:
            frame.hello_ack = HelloAck(self.worker_id, self._heartbeat_s)
            self._hello_ack_pending, has_content = False, True
        if self._accepted:
            frame.accepted, self._accepted, has_content = self._accepted, [], True
        if self._rejected:
            frame.rejected, self._rejected, has_content = self._rejected, [], True
        if now - self._last_heartbeat_at >= self._heartbeat_s:
            self._last_heartbeat_at, frame.heartbeat, has_content = now, loads(), True
        if self._send_queue:
            budget = min(FRAME_BYTES, CREDIT_BYTES - self.unacked_bytes)
            has_content = self._fill_frame(frame, budget) or has_content
        if not has_content:
            return None
        frame.sent_bytes = self._sent_bytes
        return frame

    def _fill_frame(self, frame: ResponseFrame, budget: int) -> bool:
        """Fills the frame slot by slot while the budget lasts; whether anything was framed."""
        remaining_bytes = budget
        for _ in range(len(self._send_queue)):
            if remaining_bytes <= 0:
                break
            slot = self._send_queue.popleft()
            state = self._slots[slot]
            used = self._frame_slot_output(frame, slot, state, remaining_bytes)
            if not used:  # its next chunk needs a frame with more room: be first there
                self._send_queue.appendleft(slot)
                break
            remaining_bytes -= used
            if state.pending or state.chunks or state.terminal is not None:
                self._send_queue.append(slot)
            else:
                state.is_queued = False
                if state.state == "ended":
                    del self._slots[slot]
        self._sent_bytes += budget - remaining_bytes
        return remaining_bytes < budget

    def _frame_slot_output(
        self, frame: ResponseFrame, slot: int, state: _Slot, available_bytes: int
    ) -> int:
        """One slot's turn in the room that the frame has left; payload bytes used."""
        used = self._frame_tokens(frame, slot, state, available_bytes) if state.pending else 0
        while state.chunks and used < _QUANTUM_BYTES:
            size = _BATCH_BYTES + len(state.chunks[0])
            # One that is larger than any room travels alone.
            if used + size > available_bytes and available_bytes - used < FRAME_BYTES:
                return used
            frame.chunks.append(JsonChunk(slot, state.sent_chunks, state.chunks.popleft()))
            state.sent_chunks += 1
            used += size
        if state.terminal is not None and not state.pending and not state.chunks:
            frame.terminals.append(state.terminal)
            state.terminal = None
            used += _TERMINAL_BYTES
        return used

    def _frame_tokens(
        self, frame: ResponseFrame, slot: int, state: _Slot, available_bytes: int
    ) -> int:
        if state.logprobs:
            count, used = _next_logprob_batch(state, min(available_bytes, _QUANTUM_BYTES))
        else:
            count = min(
                len(state.pending), max(1, min(available_bytes, _QUANTUM_BYTES) // _TOKEN_BYTES)
            )
            used = _BATCH_BYTES + _TOKEN_BYTES * count
        frame.slot.append(slot)
        frame.start.append(state.sent)
        frame.count.append(count)
        if count == len(state.pending):
            frame.token_id += state.pending
            state.pending = []
        else:
            frame.token_id += state.pending[:count]
            del state.pending[:count]
        if state.logprobs:
            slot_logprobs = [entry for entry in state.logprobs[:count] if entry is not None]
            if slot_logprobs:
                frame.logprobs.append((slot, slot_logprobs))
            del state.logprobs[:count]
        state.sent += count
        return used

    def tick(self, now: float) -> tuple[MeshError | None, list[StopSlot]]:
        """What time demands: the error to lose the stream with, and slots past their deadline."""
        limit = MISSED_HEARTBEATS_MAX * self._heartbeat_s
        if not self._lost and now - self._last_received_at > limit:
            return WorkerLost(f"the frontend said nothing for {limit:g} s", retryable=True), []
        expired: list[StopSlot] = []
        incomplete: list[int] = []
        for slot, state in self._slots.items():
            if state.deadline is None or now < state.deadline or state.is_stopping:
                continue
            state.is_stopping = True
            if state.state in ("started", "accepted"):
                expired.append(StopSlot(slot, "deadline"))
            elif state.state == "arriving":
                incomplete.append(slot)
        for slot in incomplete:
            self.end(slot, None, error=DeadlineExceeded("the prompt did not arrive in time"))
        return None, expired

    def close(self) -> list[int]:
        """The stream is gone: slots whose generators must be closed now (f)."""
        if self._lost:
            return []
        self._lost = True
        slots, self._slots = self._slots, {}
        self._send_queue.clear()
        self._accepted.clear()
        self._rejected.clear()
        return [slot for slot, state in slots.items() if state.state in ("started", "accepted")]


def _is_partial_prompt(submit: Submit) -> bool:
    return submit.prompt_bytes > len(submit.prompt) and submit.prompt_bytes % 4 == 0


def _append_logprobs(state: _Slot, older_count: int, logprobs: Sequence[TokenLogprob]) -> None:
    """Keeps the logprobs in step with the pending tokens, of which `older_count` are older."""
    new_count = len(state.pending) - older_count
    assert len(logprobs) in (0, new_count), f"{len(logprobs)} logprobs for {new_count} tokens"
    state.logprobs.extend([None] * (older_count - len(state.logprobs)))
    state.logprobs.extend(logprobs or [None] * new_count)


def _next_logprob_batch(state: _Slot, available_bytes: int) -> tuple[int, int]:
    """How many pending tokens with logprobs the next batch has, at least one, and its bytes.

    It ends where tokens that have them meet tokens that have none.
    """
    first, used = state.logprobs[0], _BATCH_BYTES
    for count, logprob in enumerate(state.logprobs):
        size = _TOKEN_BYTES
        if logprob is not None:
            size += _LOGPROB_BYTES * (1 + len(logprob.top))
        if count and (used + size > available_bytes or (logprob is None) != (first is None)):
            return count, used
        used += size
    return len(state.logprobs), used
