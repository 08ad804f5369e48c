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
MISSED_HEARTBEATS = 3
CREDIT_BYTES = 1 << 20
FRAME_BYTES = 256 << 10
PART_BYTES = 64 << 10
# What a worker gathers for one prompt at most; far above any context length.
PROMPT_BYTES_MAX = 64 << 20
# Acknowledge at the latest when a quarter of the credit was consumed without a word.
_ACK_BYTES = CREDIT_BYTES // 4
# What one entry costs against FRAME_BYTES and credit: close to, never far below, its wire size.
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 20
_BATCH_BYTES = 12
_TERMINAL_BYTES = 96
_SUBMIT_BYTES = 1024
# One slot's turn in a frame; keeps turns short without making many of them.
_TURN_BYTES = 16 << 10


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
class Order:
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
    order: Order
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
class Chunk:
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
class ToWorker:
    """One frame frontend → worker."""

    hello: Hello | None = None
    submits: list[Submit] = field(default_factory=list)
    prompt_parts: list[PromptPart] = field(default_factory=list)
    aborts: list[AbortSlot] = field(default_factory=list)
    acked_bytes: int = 0
    heartbeat: bool = False


@dataclass(slots=True)
class ToFrontend:
    """One frame worker → frontend; tokens are a struct of arrays (h)."""

    hello_ack: HelloAck | None = None
    accepted: list[int] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    count: list[int] = field(default_factory=list)
    token_id: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, Sequence[TokenLogprob]]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
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


def breach(rule: str, message: str) -> InvalidRequest:
    """The peer broke the rule of that letter: the stream ends with this."""
    return InvalidRequest(
        f"Attach rule ({rule}): {message}", reason="ATTACH_BREACH", metadata={"rule": rule}
    )


def _wrong_worker(found: int, expected: int) -> Conflict:
    return Conflict(
        f"Attach rule (a): this is worker {found}, not {expected}",
        reason="WRONG_WORKER",
        metadata={"rule": "a"},
    )


class _Nobody:
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


_NOBODY = _Nobody()


@dataclass(slots=True)
class _Leg:
    sink: LegSink
    state: str = "submitted"  # → accepted
    received: int = 0
    chunks: int = 0
    aborting: bool = False


class FrontendLink:
    """The frontend's end of one Attach stream."""

    def __init__(self, hello: Hello, now: float) -> None:
        self.hello = hello
        self.worker_id = hello.expected_worker_id
        self.loads: Sequence[Load] = ()
        self.loads_at = now
        self.is_open = False
        self._heartbeat_s = HEARTBEAT_S
        self._last_slot = 0
        self._legs: dict[int, _Leg] = {}
        self._hello_pending = True
        self._framed_slot = 0
        self._submits: deque[Submit] = deque()
        self._parts: deque[tuple[int, memoryview, int]] = deque()
        self._aborts: list[AbortSlot] = []
        self._consumed = self._acked = 0
        self._heard_at = now
        self._beat_at = now
        self._lost: MeshError | None = None

    @property
    def open_slots(self) -> int:
        """Slots submitted and not ended."""
        return len(self._legs)

    def submit(self, order: Order, sink: LegSink) -> int:
        """Queues an order and returns its slot. Raises what ended the stream, if it ended."""
        if self._lost is not None:
            raise self._lost
        self._last_slot += 1
        slot = self._last_slot
        self._legs[slot] = _Leg(sink)
        prompt = b"" if order.request is None else order.request.token_ids.le
        whole = len(prompt)
        self._submits.append(
            Submit(slot, order, prompt[:PART_BYTES], whole if whole > PART_BYTES else 0)
        )
        return slot

    def abort(self, slot: int, reason: str) -> None:
        """Asks for a slot's end; its Terminal still comes. Ended or unknown: a no-op."""
        leg = self._legs.get(slot)
        if leg is None or leg.aborting:
            return
        leg.aborting = True
        self._aborts.append(AbortSlot(slot, reason))

    def abandon(self, error: MeshError) -> None:
        """Ends all slots for their sinks with `error` and asks the worker to end them too.

        For an engine that hangs while its process lives: the stream goes on, what the worker still
        says of these slots is taken in and told to nobody.
        """
        for slot, leg in list(self._legs.items()):
            self.abort(slot, "hung")
            sink, leg.sink = leg.sink, _NOBODY
            sink.lost(error)

    def receive(self, frame: ToFrontend, now: float) -> None:
        """Takes a frame in and tells the sinks. Raises on a breach; then call `lose`."""
        if self._lost is not None:
            return
        self._heard_at = now
        if frame.hello_ack is not None:
            self._open(frame.hello_ack)
        elif not self.is_open:
            raise breach("a", "the first frame of a worker must carry hello_ack")
        if frame.heartbeat:
            self.loads, self.loads_at = frame.heartbeat, now
        legs = self._legs
        for slot in frame.accepted:
            leg = self._submitted_leg(slot, "accepted")
            leg.state = "accepted"
            leg.sink.accepted()
        for rejected in frame.rejected:
            leg = self._submitted_leg(rejected.slot, "rejected")
            del legs[rejected.slot]
            leg.sink.rejected(rejected.error)
        if frame.slot or frame.token_id or frame.logprobs:
            self._receive_tokens(frame)
        for chunk in frame.chunks:
            leg = self._accepted_leg(chunk.slot, "sent a chunk")
            if chunk.index != leg.chunks:
                raise breach(
                    "c", f"slot {chunk.slot}: chunk {chunk.index} came, {leg.chunks} is next"
                )
            leg.chunks += 1
            leg.sink.chunk(chunk.json)
        for terminal in frame.terminals:
            leg = self._accepted_leg(terminal.slot, "ended")
            if terminal.total_tokens != leg.received:
                raise breach(
                    "c",
                    f"slot {terminal.slot} ended after {terminal.total_tokens} tokens, "
                    f"{leg.received} arrived",
                )
            del legs[terminal.slot]
            leg.sink.terminal(terminal)
        if frame.sent_bytes < self._consumed:
            raise breach("i", f"sent_bytes fell from {self._consumed} to {frame.sent_bytes}")
        self._consumed = frame.sent_bytes

    def _receive_tokens(self, frame: ToFrontend) -> None:
        if not len(frame.slot) == len(frame.start) == len(frame.count):
            raise breach("h", "slot, start and count differ in length")
        token_id = frame.token_id
        # Before anybody is told: with one wrong count all tokens behind it are somebody else's.
        if sum(frame.count) != len(token_id) or min(frame.count, default=1) < 1:
            raise breach("h", "the counts do not add up to the tokens of the frame")
        logprobs = dict(frame.logprobs) if frame.logprobs else {}
        at = 0
        for slot, start, count in zip(frame.slot, frame.start, frame.count, strict=True):
            leg = self._accepted_leg(slot, "sent tokens")
            if start != leg.received:
                raise breach("c", f"slot {slot}: tokens from {start} came, {leg.received} is next")
            end = at + count
            leg.received += count
            beside = logprobs.pop(slot, ()) if logprobs else ()
            if beside and len(beside) != count:
                raise breach("h", f"slot {slot}: {len(beside)} logprobs for {count} tokens")
            leg.sink.tokens(token_id[at:end], beside)
            at = end
        if logprobs:
            raise breach("h", f"logprobs without tokens for the slots {sorted(logprobs)}")

    def _leg(self, slot: int, did: str) -> _Leg:
        leg = self._legs.get(slot)
        if leg is None:
            raise breach("c", f"slot {slot} {did}, but it is not open")
        return leg

    def _submitted_leg(self, slot: int, did: str) -> _Leg:
        leg = self._leg(slot, did)
        if leg.state != "submitted":
            raise breach("c", f"slot {slot} {did} after it was accepted")
        return leg

    def _accepted_leg(self, slot: int, did: str) -> _Leg:
        leg = self._legs.get(slot)
        if leg is None or leg.state != "accepted":
            self._leg(slot, did)
            raise breach("c", f"slot {slot} {did} before it was accepted")
        return leg

    def _open(self, ack: HelloAck) -> None:
        if self.is_open:
            raise breach("a", "hello_ack came twice")
        if ack.worker_id != self.worker_id:
            raise _wrong_worker(ack.worker_id, self.worker_id)
        if ack.heartbeat_s <= 0:
            raise breach("e", "hello_ack asks for heartbeats without a pause between them")
        self.is_open = True
        self._heartbeat_s = ack.heartbeat_s

    def next_frame(self, now: float) -> ToWorker | None:
        """The next frame to write, or None when there is nothing to say."""
        if self._lost is not None:
            return None
        frame = ToWorker()
        said = False
        if self._hello_pending:
            frame.hello, self._hello_pending, said = self.hello, False, True
            self._heard_at = now  # a dial may take its time; silence counts from here
        budget = FRAME_BYTES - self._next_submits(frame)
        if self._aborts:  # an abort never overtakes its Submit
            frame.aborts = [a for a in self._aborts if a.slot <= self._framed_slot]
            self._aborts = [a for a in self._aborts if a.slot > self._framed_slot]
        while self._parts and budget >= PART_BYTES:
            budget -= self._next_part(frame)
        said = said or bool(frame.submits or frame.aborts or frame.prompt_parts)
        if self._consumed - self._acked >= _ACK_BYTES:
            said = True
        if now - self._beat_at >= self._heartbeat_s:
            self._beat_at, frame.heartbeat, said = now, True, True
        if not said:
            return None
        self._acked = frame.acked_bytes = self._consumed
        return frame

    def _next_submits(self, frame: ToWorker) -> int:
        """Frames the submits that fit, at least one; their bytes."""
        used = 0
        while self._submits:
            submit = self._submits[0]
            size = _submit_bytes(submit)
            if used and used + size > FRAME_BYTES:
                break
            used += size
            self._framed_slot = submit.slot
            frame.submits.append(self._submits.popleft())
            if submit.prompt_bytes:
                assert submit.order.request is not None, "only token ids come in parts"
                prompt = memoryview(submit.order.request.token_ids.le)
                self._parts.append((submit.slot, prompt, len(submit.prompt)))
        return used

    def _next_part(self, frame: ToWorker) -> int:
        slot, prompt, offset = self._parts.popleft()
        leg = self._legs.get(slot)
        if leg is None or leg.aborting:  # over, or about to be: the worker drops the rest too
            return 0
        end = min(offset + PART_BYTES, len(prompt))
        frame.prompt_parts.append(PromptPart(slot, offset, bytes(prompt[offset:end])))
        if end < len(prompt):
            self._parts.append((slot, prompt, end))
        return end - offset

    def tick(self, now: float) -> MeshError | None:
        """The error to `lose` the stream with, once three heartbeats were missed (e)."""
        limit = MISSED_HEARTBEATS * self._heartbeat_s
        if self._lost is None and now - self._heard_at > limit:
            return WorkerLost(
                f"worker {self.worker_id} said nothing for {limit:g} s", retryable=True
            )
        return None

    def lose(self, error: MeshError) -> None:
        """Ends all slots with `error` (f). The stream is of no use afterwards."""
        if self._lost is not None:
            return
        self._lost, self.is_open = error, False
        legs, self._legs = self._legs, {}
        self._submits.clear()
        self._parts.clear()
        self._aborts.clear()
        for leg in legs.values():
            leg.sink.lost(error)


def _submit_bytes(submit: Submit) -> int:
    order = submit.order
    return (
        _SUBMIT_BYTES
        + len(submit.prompt)
        + len(order.chat_json or b"")
        + len(order.completion_json or b"")
    )


@dataclass(frozen=True, slots=True)
class Start:
    """Command to the worker: run this. `prompt` is whole (u32 LE bytes)."""

    slot: int
    order: Order
    prompt: bytes


@dataclass(frozen=True, slots=True)
class Stop:
    """Command to the worker: end this slot; a Terminal is still due.

    A slot that was refused on the Start right before it needs nothing more.
    """

    slot: int
    reason: str


@dataclass(slots=True)
class _Slot:
    state: str = "arriving"  # → started → accepted → ended (kept until its last tokens are out)
    order: Order | None = None
    prompt: bytearray = field(default_factory=bytearray)
    prompt_bytes: int = 0
    deadline: float | None = None
    stopping: bool = False
    sent: int = 0
    pending: list[int] = field(default_factory=list)
    # Empty, or one entry a pending token; None where the engine gave none.
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    chunks: deque[bytes] = field(default_factory=deque)
    chunks_sent: int = 0
    terminal: Terminal | None = None
    queued: bool = False


def _one_idle_rank() -> Sequence[Load]:
    return (Load(),)


class WorkerLink:
    """The worker's end of one Attach stream."""

    def __init__(self, worker_id: int, now: float, *, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.worker_id = worker_id
        self.hello: Hello | None = None
        self._heartbeat_s = heartbeat_s
        self._slots: dict[int, _Slot] = {}
        self._last_slot = 0
        self._ack_pending = False
        self._accepted: list[int] = []
        self._rejected: list[Rejected] = []
        self._turns: deque[int] = deque()
        self._sent = self._acked = 0
        self._heard_at = now
        self._beat_at = now - heartbeat_s
        self._lost = False

    @property
    def open_slots(self) -> int:
        """Slots submitted whose end has not been framed."""
        return len(self._slots)

    @property
    def unacked_bytes(self) -> int:
        """Token payload sent and not acknowledged (i)."""
        return self._sent - self._acked

    def receive(self, frame: ToWorker, now: float) -> list[Start | Stop]:
        """Takes a frame in; what to start and stop, in order. Raises on a breach."""
        if self._lost:
            return []
        self._heard_at = now
        if frame.hello is not None:
            self._open(frame.hello)
        elif self.hello is None:
            raise breach("a", "the first frame of a frontend must carry hello")
        if frame.acked_bytes > self._sent:
            raise breach("i", f"{frame.acked_bytes} bytes acknowledged, {self._sent} were sent")
        self._acked = max(self._acked, frame.acked_bytes)
        commands: list[Start | Stop] = []
        for submit in frame.submits:
            self._submitted(submit, now, commands)
        for part in frame.prompt_parts:
            self._continued(part, commands)
        for abort in frame.aborts:
            self._aborted(abort, commands)
        return commands

    def _open(self, hello: Hello) -> None:
        if self.hello is not None:
            raise breach("a", "hello came twice")
        if hello.expected_worker_id != self.worker_id:
            raise _wrong_worker(self.worker_id, hello.expected_worker_id)
        self.hello, self._ack_pending = hello, True

    def _submitted(self, submit: Submit, now: float, commands: list[Start | Stop]) -> None:
        if submit.slot <= self._last_slot:
            raise breach("b", f"slot {submit.slot} is not above {self._last_slot}: never reuse one")
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
        if submit.prompt_bytes and not _has_more(submit):
            raise breach("g", f"slot {submit.slot}: prompt_bytes does not fit its first part")
        timeout_s = submit.order.timeout_s
        slot = _Slot(
            order=submit.order,
            prompt_bytes=submit.prompt_bytes or len(submit.prompt),
            deadline=None if timeout_s is None else now + timeout_s,
        )
        self._slots[submit.slot] = slot
        if not submit.prompt_bytes:
            slot.state = "started"
            commands.append(Start(submit.slot, submit.order, submit.prompt))
            return
        slot.prompt += submit.prompt

    def _continued(self, part: PromptPart, commands: list[Start | Stop]) -> None:
        if part.slot > self._last_slot:
            raise breach("c", f"slot {part.slot} continues a prompt, but was never submitted")
        slot = self._slots.get(part.slot)
        if slot is None or slot.state == "ended":
            return  # aborted or refused while its prompt was under way
        if slot.state != "arriving" or part.offset != len(slot.prompt) or not part.data:
            raise breach("g", f"slot {part.slot}: prompt part at {part.offset} is out of order")
        slot.prompt += part.data
        if len(slot.prompt) > slot.prompt_bytes:
            raise breach("g", f"slot {part.slot}: the prompt is longer than the Submit said")
        if len(slot.prompt) == slot.prompt_bytes:
            assert slot.order is not None
            slot.state = "started"
            commands.append(Start(part.slot, slot.order, bytes(slot.prompt)))
            slot.prompt = bytearray()

    def _aborted(self, abort: AbortSlot, commands: list[Start | Stop]) -> None:
        slot = self._slots.get(abort.slot)
        if slot is None or slot.state == "ended" or slot.stopping:
            return
        slot.stopping = True
        if slot.state == "arriving":  # nothing runs yet: the end comes from here
            self.end(abort.slot, FinishReason.CANCELLED)
            return
        commands.append(Stop(abort.slot, abort.reason))

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
        before = len(state.pending)
        state.pending.extend(token_ids)
        if logprobs or state.logprobs:
            _put_beside(state, before, logprobs)
        if state.pending and not state.queued:
            self._queue(slot, state)

    def chunk(self, slot: int, json: bytes) -> None:
        """New output of a pass-through slot."""
        if self._lost:
            return
        state = self._slots[slot]
        assert state.state == "accepted", state.state
        state.chunks.append(json)
        self._queue(slot, state)

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
        self._queue(slot, state)

    def _queue(self, slot: int, state: _Slot) -> None:
        if not state.queued:
            state.queued = True
            self._turns.append(slot)

    def next_frame(
        self, now: float, loads: Callable[[], Sequence[Load]] = _one_idle_rank
    ) -> ToFrontend | None:
        """The next frame to write, or None when there is nothing to say or no credit.

        loads: gives the load of all ranks, at least one; asked when a heartbeat is due.
        """
        if self.hello is None or self._lost:
            return None
        frame = ToFrontend()
        said = False
        if self._ack_pending:
            frame.hello_ack = HelloAck(self.worker_id, self._heartbeat_s)
            self._ack_pending, said = False, True
        if self._accepted:
            frame.accepted, self._accepted, said = self._accepted, [], True
        if self._rejected:
            frame.rejected, self._rejected, said = self._rejected, [], True
        if now - self._beat_at >= self._heartbeat_s:
            self._beat_at, frame.heartbeat, said = now, loads(), True
        if self._turns:
            budget = min(FRAME_BYTES, CREDIT_BYTES - self.unacked_bytes)
            said = self._take_turns(frame, budget) or said
        if not said:
            return None
        frame.sent_bytes = self._sent
        return frame

    def _take_turns(self, frame: ToFrontend, budget: int) -> bool:
        """Fills the frame slot by slot while the budget lasts; whether anything was framed."""
        left = budget
        for _ in range(len(self._turns)):
            if left <= 0:
                break
            slot = self._turns.popleft()
            state = self._slots[slot]
            used = self._take_turn(frame, slot, state, left)
            if not used:  # its next chunk needs a frame with more room: be first there
                self._turns.appendleft(slot)
                break
            left -= used
            if state.pending or state.chunks or state.terminal is not None:
                self._turns.append(slot)
            else:
                state.queued = False
                if state.state == "ended":
                    del self._slots[slot]
        self._sent += budget - left
        return left < budget

    def _take_turn(self, frame: ToFrontend, slot: int, state: _Slot, room: int) -> int:
        """One slot's turn in the room that the frame has left; payload bytes used."""
        used = self._take_tokens(frame, slot, state, room) if state.pending else 0
        while state.chunks and used < _TURN_BYTES:
            size = _BATCH_BYTES + len(state.chunks[0])
            # One that is larger than any room travels alone.
            if used + size > room and room - used < FRAME_BYTES:
                return used
            frame.chunks.append(Chunk(slot, state.chunks_sent, state.chunks.popleft()))
            state.chunks_sent += 1
            used += size
        if state.terminal is not None and not state.pending and not state.chunks:
            frame.terminals.append(state.terminal)
            state.terminal = None
            used += _TERMINAL_BYTES
        return used

    def _take_tokens(self, frame: ToFrontend, slot: int, state: _Slot, room: int) -> int:
        if state.logprobs:
            count, used = _batch(state, min(room, _TURN_BYTES))
        else:
            count = min(len(state.pending), max(1, min(room, _TURN_BYTES) // _TOKEN_BYTES))
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
            beside = [one for one in state.logprobs[:count] if one is not None]
            if beside:
                frame.logprobs.append((slot, beside))
            del state.logprobs[:count]
        state.sent += count
        return used

    def tick(self, now: float) -> tuple[MeshError | None, list[Stop]]:
        """What time demands: the error to lose the stream with, and slots past their deadline."""
        limit = MISSED_HEARTBEATS * self._heartbeat_s
        if not self._lost and now - self._heard_at > limit:
            return WorkerLost(f"the frontend said nothing for {limit:g} s", retryable=True), []
        late: list[Stop] = []
        unread: list[int] = []
        for slot, state in self._slots.items():
            if state.deadline is None or now < state.deadline or state.stopping:
                continue
            state.stopping = True
            if state.state in ("started", "accepted"):
                late.append(Stop(slot, "deadline"))
            elif state.state == "arriving":
                unread.append(slot)
        for slot in unread:
            self.end(slot, None, error=DeadlineExceeded("the prompt did not arrive in time"))
        return None, late

    def lose(self) -> list[int]:
        """The stream is gone: slots whose generators must be closed now (f)."""
        if self._lost:
            return []
        self._lost = True
        slots, self._slots = self._slots, {}
        self._turns.clear()
        self._accepted.clear()
        self._rejected.clear()
        return [slot for slot, state in slots.items() if state.state in ("started", "accepted")]


def _has_more(submit: Submit) -> bool:
    return submit.prompt_bytes > len(submit.prompt) and submit.prompt_bytes % 4 == 0


def _put_beside(state: _Slot, before: int, logprobs: Sequence[TokenLogprob]) -> None:
    """Keeps the logprobs in step with the pending tokens, of which `before` are older."""
    new = len(state.pending) - before
    assert len(logprobs) in (0, new), f"{len(logprobs)} logprobs for {new} tokens"
    state.logprobs.extend([None] * (before - len(state.logprobs)))
    state.logprobs.extend(logprobs or [None] * new)


def _batch(state: _Slot, room: int) -> tuple[int, int]:
    """How many pending tokens with logprobs the next batch has, at least one, and its bytes.

    It ends where tokens that have them meet tokens that have none.
    """
    first, used = state.logprobs[0], _BATCH_BYTES
    for count, logprob in enumerate(state.logprobs):
        size = _TOKEN_BYTES
        if logprob is not None:
            size += _LOGPROB_BYTES * (1 + len(logprob.top))
        if count and (used + size > room or (logprob is None) != (first is None)):
            return count, used
        used += size
    return len(state.logprobs), used
