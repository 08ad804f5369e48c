"""The worker's end of an Attach stream. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from common.errors import DeadlineExceeded, MeshError, Overloaded, PromptTooLong
from common.kv.load import Load
from common.request.preprocessed import (
    CompletionUsage,
    FinishReason,
    PrefillResult,
    TokenLogprob,
    TraceLink,
)
from common.request.token_stream.frames import (
    ARRIVING_BYTES_MAX,
    ARRIVING_BYTES_MAX_PER_STREAM,
    CREDIT_BYTES,
    FRAME_BYTES,
    HEARTBEAT_S,
    PROMPT_BYTES_MAX,
    SUBMITS_PER_FRAME_MAX,
    AbortSlot,
    Hello,
    HelloAck,
    JsonChunk,
    LegRequest,
    PromptPart,
    Rejected,
    RequestFrame,
    ResponseFrame,
    Terminal,
    protocol_violation,
    wrong_worker_error,
)

# Cost of one entry against FRAME_BYTES and credit: close to its wire size, never far below.
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 20
_BATCH_BYTES = 12
_TERMINAL_BYTES = 96
# Share of one slot per turn: small enough for short turns, large enough for few of them.
_QUANTUM_BYTES = 16 << 10


class _SlotState(Enum):
    ARRIVING = auto()  # parts of the prompt are missing
    STARTED = auto()
    ACCEPTED = auto()
    ENDED = auto()  # kept until its last tokens are framed


_RUNNING = (_SlotState.STARTED, _SlotState.ACCEPTED)


@dataclass(frozen=True, slots=True)
class StartSlot:
    """Command to run a request. prompt: the whole prompt as u32 LE bytes."""

    slot: int
    leg_request: LegRequest
    prompt: bytes


@dataclass(slots=True)
class _Slot:
    state: _SlotState = _SlotState.ARRIVING
    leg_request: LegRequest | None = None
    prompt: bytearray = field(default_factory=bytearray)
    prompt_bytes: int = 0
    deadline: float | None = None
    is_aborting: bool = False
    sent: int = 0
    pending: list[int] = field(default_factory=list)
    # Empty, or one entry per pending token; None where the engine returned none.
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    chunks: deque[bytes] = field(default_factory=deque)
    sent_chunks: int = 0
    terminal: Terminal | None = None
    is_queued: bool = False


@dataclass(slots=True)
class ArrivingPrompts:
    """Bytes of prompts that have begun to arrive on all streams of a worker."""

    size: int = 0


class WorkerLink:
    """The worker's end of one Attach stream. Holds no socket, task or clock.

    arriving: shared by the streams of a worker.
    """

    def __init__(
        self,
        worker_id: int,
        now: float,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        arriving: ArrivingPrompts | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._arriving = ArrivingPrompts() if arriving is None else arriving
        self._arriving_bytes = 0
        self.hello: Hello | None = None
        self._heartbeat_s = heartbeat_s
        self._slots: dict[int, _Slot] = {}
        self._last_slot = 0
        self._hello_ack_pending = False
        self._accepted: list[int] = []
        self._rejected: list[Rejected] = []
        self._send_queue: deque[int] = deque()
        self._sent_bytes = self._acked_bytes = 0
        self._last_heartbeat_at = now - heartbeat_s
        self._lost = False

    @property
    def open_slots(self) -> int:
        """Number of slots submitted without a framed end."""
        return len(self._slots)

    @property
    def unacked_bytes(self) -> int:
        """Bytes of token payload sent and not acknowledged (i)."""
        return self._sent_bytes - self._acked_bytes

    def receive(self, frame: RequestFrame, now: float) -> list[StartSlot | AbortSlot]:
        """Processes a frame; returns commands in order. Raises on a protocol violation.

        An AbortSlot names a running slot, of which a Terminal is due unless it was just rejected.
        """
        if self._lost:
            return []
        if frame.hello is not None:
            self._complete_handshake(frame.hello)
        elif self.hello is None:
            raise protocol_violation("a", "the first frame of a frontend must carry hello")
        if frame.acked_bytes > self._sent_bytes:
            raise protocol_violation(
                "i", f"{frame.acked_bytes} bytes acknowledged, {self._sent_bytes} were sent"
            )
        self._acked_bytes = max(self._acked_bytes, frame.acked_bytes)
        if len(frame.submits) > SUBMITS_PER_FRAME_MAX:
            raise protocol_violation(
                "b", f"{len(frame.submits)}/{SUBMITS_PER_FRAME_MAX} submits in one frame"
            )
        commands: list[StartSlot | AbortSlot] = []
        for number, leg_request in frame.submits:
            self._handle_submit(number, leg_request, now, commands)
        for part in frame.prompt_parts:
            self._handle_prompt_part(part, commands)
        for abort in frame.aborts:
            self._handle_abort(abort, commands)
        return commands

    def _complete_handshake(self, hello: Hello) -> None:
        if self.hello is not None:
            raise protocol_violation("a", "hello came twice")
        if hello.expected_worker_id != self.worker_id:
            raise wrong_worker_error(self.worker_id, hello.expected_worker_id)
        self.hello, self._hello_ack_pending = hello, True

    def _handle_submit(
        self,
        number: int,
        leg_request: LegRequest,
        now: float,
        commands: list[StartSlot | AbortSlot],
    ) -> None:
        if number <= self._last_slot:
            raise protocol_violation(
                "b", f"slot {number} is not above {self._last_slot}: never reuse one"
            )
        self._last_slot = number
        prompt, prompt_bytes = leg_request.prompt, leg_request.prompt_bytes
        error: MeshError | None = leg_request.error
        if prompt_bytes > PROMPT_BYTES_MAX:
            error = PromptTooLong(
                f"prompt too long: {prompt_bytes // 4}/{PROMPT_BYTES_MAX // 4} tokens"
            )
        if error is not None:
            self._rejected.append(Rejected(number, error))
            return
        is_in_parts = prompt_bytes > len(prompt) and prompt_bytes % 4 == 0
        if prompt_bytes and not is_in_parts:
            raise protocol_violation(
                "g", f"slot {number}: prompt_bytes does not fit its first part"
            )
        timeout_s = leg_request.timeout_s
        slot = _Slot(
            leg_request=leg_request,
            prompt_bytes=prompt_bytes or len(prompt),
            deadline=None if timeout_s is None else now + timeout_s,
        )
        self._slots[number] = slot
        if not prompt_bytes:
            slot.state = _SlotState.STARTED
            commands.append(StartSlot(number, leg_request, prompt))
            return
        self._keep_part(number, slot, prompt)

    def _handle_prompt_part(self, part: PromptPart, commands: list[StartSlot | AbortSlot]) -> None:
        if part.slot > self._last_slot:
            raise protocol_violation(
                "c", f"slot {part.slot} continues a prompt, but was never submitted"
            )
        slot = self._slots.get(part.slot)
        if slot is None or slot.state is _SlotState.ENDED:
            return  # aborted or rejected while its prompt arrived
        is_next = slot.state is _SlotState.ARRIVING and part.offset == len(slot.prompt)
        if not is_next or not part.data:
            raise protocol_violation(
                "g", f"slot {part.slot}: prompt part at {part.offset} is out of order"
            )
        if not self._keep_part(part.slot, slot, part.data):
            return
        if len(slot.prompt) > slot.prompt_bytes:
            raise protocol_violation(
                "g", f"slot {part.slot}: the prompt is longer than prompt_bytes of its Submit"
            )
        if len(slot.prompt) == slot.prompt_bytes:
            assert slot.leg_request is not None
            slot.state = _SlotState.STARTED
            commands.append(StartSlot(part.slot, slot.leg_request, bytes(slot.prompt)))
            self._drop_parts(slot)

    def _keep_part(self, number: int, slot: _Slot, data: bytes) -> bool:
        """Appends to a begun prompt; if that exceeds a limit, rejects the slot and returns
        False."""
        of_stream, of_worker = self._arriving_bytes + len(data), self._arriving.size + len(data)
        if of_stream > ARRIVING_BYTES_MAX_PER_STREAM or of_worker > ARRIVING_BYTES_MAX:
            self._drop_parts(slot)
            message = (
                f"too many prompts are arriving: {of_stream}/{ARRIVING_BYTES_MAX_PER_STREAM} bytes"
                f" on this stream, {of_worker}/{ARRIVING_BYTES_MAX} at this worker"
            )
            self.reject(number, Overloaded(1.0, message))
            return False
        slot.prompt += data
        self._arriving_bytes, self._arriving.size = of_stream, of_worker
        return True

    def _drop_parts(self, slot: _Slot) -> None:
        self._arriving_bytes -= len(slot.prompt)
        self._arriving.size -= len(slot.prompt)
        slot.prompt = bytearray()

    def _handle_abort(self, abort: AbortSlot, commands: list[StartSlot | AbortSlot]) -> None:
        slot = self._slots.get(abort.slot)
        if slot is None or slot.state is _SlotState.ENDED or slot.is_aborting:
            return
        slot.is_aborting = True
        if slot.state is _SlotState.ARRIVING:  # the engine has no request to end
            self.end(abort.slot, FinishReason.CANCELLED)
            return
        commands.append(abort)

    def accept(self, slot: int) -> None:
        """Records that the engine accepted the slot's request.

        This method and those below require an open slot; on a lost stream they are no-ops.
        """
        if self._lost:
            return
        state = self._slots[slot]
        assert state.state is _SlotState.STARTED, state.state
        state.state = _SlotState.ACCEPTED
        self._accepted.append(slot)

    def reject(self, slot: int, error: MeshError) -> None:
        """Rejects the slot's request; nothing ran."""
        if self._lost:
            return
        state = self._slots.pop(slot)
        assert state.state in (_SlotState.ARRIVING, _SlotState.STARTED), state.state
        self._rejected.append(Rejected(slot, error))

    def tokens(
        self, slot: int, token_ids: Iterable[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        """Queues output of a slot. logprobs: one per token, or empty."""
        if self._lost:
            return
        state = self._slots[slot]
        assert state.state is _SlotState.ACCEPTED, state.state
        older_count = len(state.pending)
        state.pending.extend(token_ids)
        if logprobs or state.logprobs:
            _append_logprobs(state, older_count, logprobs)
        if state.pending and not state.is_queued:
            self._enqueue(slot, state)

    def chunk(self, slot: int, json: bytes) -> None:
        """Queues output of a pass-through slot."""
        if self._lost:
            return
        state = self._slots[slot]
        assert state.state is _SlotState.ACCEPTED, state.state
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
        """Ends the slot, after its last token. Call once per slot."""
        if self._lost:
            return
        state = self._slots[slot]
        assert state.state is not _SlotState.ENDED, f"slot {slot} ended twice"
        if state.state is not _SlotState.ACCEPTED:  # rule (c): Accepted precedes Terminal
            self._accepted.append(slot)
        state.state = _SlotState.ENDED
        self._drop_parts(state)
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
        self,
        now: float,
        loads: Callable[[], Sequence[Load]] = lambda: (Load(),),
        engine_failure: str = "",
    ) -> ResponseFrame | None:
        """Returns the next frame, None without content or credit.

        loads: returns one load per rank.
        engine_failure: sent with the next heartbeat.
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
            frame.engine_failure = engine_failure
        if self._send_queue:
            budget = min(FRAME_BYTES, CREDIT_BYTES - self.unacked_bytes)
            has_content = self._fill_frame(frame, budget) or has_content
        if not has_content:
            return None
        frame.sent_bytes = self._sent_bytes
        return frame

    def _fill_frame(self, frame: ResponseFrame, budget: int) -> bool:
        """Fills the frame slot by slot within the budget; returns whether anything was framed."""
        remaining_bytes = budget
        for _ in range(len(self._send_queue)):
            if remaining_bytes <= 0:
                break
            slot = self._send_queue.popleft()
            state = self._slots[slot]
            used = self._frame_slot_output(frame, slot, state, remaining_bytes)
            if not used:  # its next chunk needs more space: first in the next frame
                self._send_queue.appendleft(slot)
                break
            remaining_bytes -= used
            if state.pending or state.chunks or state.terminal is not None:
                self._send_queue.append(slot)
            else:
                state.is_queued = False
                if state.state is _SlotState.ENDED:
                    del self._slots[slot]
        self._sent_bytes += budget - remaining_bytes
        return remaining_bytes < budget

    def _frame_slot_output(
        self, frame: ResponseFrame, slot: int, state: _Slot, available_bytes: int
    ) -> int:
        """Frames one turn of a slot's output; returns the payload bytes used."""
        used = self._frame_tokens(frame, slot, state, available_bytes) if state.pending else 0
        while state.chunks and used < _QUANTUM_BYTES:
            size = _BATCH_BYTES + len(state.chunks[0])
            # A chunk larger than any frame travels alone.
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

    def expire(self, now: float) -> list[AbortSlot]:
        """Ends slots with a late prompt (d). Returns running ones past their deadline, once."""
        expired: list[AbortSlot] = []
        for slot, state in self._slots.items():
            if state.deadline is None or now < state.deadline or state.is_aborting:
                continue
            state.is_aborting = True
            if state.state in _RUNNING:
                expired.append(AbortSlot(slot, "deadline"))
            elif state.state is _SlotState.ARRIVING:
                error = DeadlineExceeded("the prompt did not arrive before the deadline")
                self.end(slot, None, error=error)
        return expired

    def close(self) -> list[int]:
        """Marks the stream as lost; returns the slots to stop now (f)."""
        if self._lost:
            return []
        self._lost = True
        slots, self._slots = self._slots, {}
        for state in slots.values():
            self._drop_parts(state)
        self._send_queue.clear()
        self._accepted.clear()
        self._rejected.clear()
        return [slot for slot, state in slots.items() if state.state in _RUNNING]


def _append_logprobs(state: _Slot, older_count: int, logprobs: Sequence[TokenLogprob]) -> None:
    """Appends the logprobs of the tokens after the first `older_count` pending ones."""
    new_count = len(state.pending) - older_count
    assert len(logprobs) in (0, new_count), f"{len(logprobs)} logprobs for {new_count} tokens"
    state.logprobs.extend([None] * (older_count - len(state.logprobs)))
    state.logprobs.extend(logprobs or [None] * new_count)


def _next_logprob_batch(state: _Slot, available_bytes: int) -> tuple[int, int]:
    """Returns count and bytes of the next tokens (at least 1) all with or all without logprobs."""
    first, used = state.logprobs[0], _BATCH_BYTES
    for count, logprob in enumerate(state.logprobs):
        size = _TOKEN_BYTES
        if logprob is not None:
            size += _LOGPROB_BYTES * (1 + len(logprob.top))
        if count and (used + size > available_bytes or (logprob is None) != (first is None)):
            return count, used
        used += size
    return len(state.logprobs), used
