"""Both ends of an Attach stream: rules (a) to (i), one by one and in random runs."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from common.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    Overloaded,
    PromptTooLong,
    WorkerLost,
)
from common.kv.load import Load
from common.request.preprocessed import (
    FinishReason,
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
    TokenIds,
    TokenLogprob,
    TopLogprob,
)
from common.request.token_stream import (
    CREDIT_BYTES,
    FRAME_BYTES,
    PROMPT_BYTES_MAX,
    PROMPT_PART_BYTES,
    AbortSlot,
    FrontendLink,
    Hello,
    HelloAck,
    JsonChunk,
    LegRequest,
    PromptPart,
    Rejected,
    RequestFrame,
    ResponseFrame,
    StartSlot,
    Terminal,
    WorkerLink,
)
from common.streams.peer import SilenceWatch
from common.streams.silence import ATTACH
from common.wire.token_stream import (
    request_frame_from_proto,
    request_frame_to_proto,
    response_frame_from_proto,
    response_frame_to_proto,
)
from kvmesh.engine.v1 import engine_pb2

WORKER = 7
# Limit of a frame above FRAME_BYTES: control entries, and size estimates that are slightly low.
SLACK_BYTES = 16 << 10


def leg_request(
    tokens: int = 3, request_id: str = "r", timeout_s: float | None = None
) -> LegRequest:
    request = PreprocessedRequest(
        model="m",
        token_ids=TokenIds.of(range(tokens)),
        stop_conditions=StopConditions(),
        sampling_options=SamplingOptions(),
        output_options=OutputOptions(),
    )
    return LegRequest(request_id, timeout_s=timeout_s, request=request)


def prompt_of(one: LegRequest) -> bytes:
    assert one.request is not None
    return one.request.token_ids.little_endian


def logprob(token: int, top: int = 0) -> TokenLogprob:
    return TokenLogprob(token, -0.5, tuple(TopLogprob(token, -0.5) for _ in range(top)))


@dataclass(slots=True)
class RecordingSink:
    """A sink that records its events and asserts their order."""

    is_accepted: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    end: Terminal | MeshError | None = None
    how: str = ""

    def accepted(self) -> None:
        assert not self.is_accepted
        assert not self.how
        self.is_accepted = True

    def rejected(self, error: MeshError) -> None:
        assert not self.is_accepted
        self._ended("rejected", error)

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        assert self.is_accepted
        assert not self.how
        assert token_ids
        assert len(logprobs) in (0, len(token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs

    def chunk(self, json: bytes) -> None:
        assert self.is_accepted
        assert not self.how
        self.chunks.append(json)

    def terminal(self, terminal: Terminal) -> None:
        assert self.is_accepted
        self._ended("terminal", terminal)

    def lost(self, error: MeshError) -> None:
        self._ended("lost", error)

    def _ended(self, how: str, end: Terminal | MeshError) -> None:
        assert not self.how, f"{self.how}, then {how}"
        self.how, self.end = how, end


@dataclass(slots=True)
class Pair:
    """Both ends, connected directly."""

    frontend: FrontendLink
    worker: WorkerLink
    now: float = 0.0

    def to_worker(self) -> list[StartSlot | AbortSlot]:
        commands: list[StartSlot | AbortSlot] = []
        while (frame := self.frontend.next_frame(self.now)) is not None:
            commands += self.worker.receive(frame, self.now)
        return commands

    def to_frontend(self) -> list[ResponseFrame]:
        frames = []
        while (frame := self.worker.next_frame(self.now)) is not None:
            frames.append(frame)
            self.frontend.receive(frame)
        return frames

    def start(self, one: LegRequest | None = None) -> tuple[int, RecordingSink]:
        """Submit a request, accept it and deliver the acceptance."""
        sink = RecordingSink()
        slot = self.frontend.submit(one or leg_request(), sink)
        self.to_worker()
        self.worker.accept(slot)
        self.to_frontend()
        return slot, sink


def new_pair(now: float = 0.0) -> Pair:
    return Pair(FrontendLink(Hello(1, WORKER, 1), now), WorkerLink(WORKER, now), now)


def open_pair(now: float = 0.0) -> Pair:
    pair = new_pair(now)
    pair.to_worker()
    pair.to_frontend()
    assert pair.frontend.is_open
    return pair


def retained(pair: Pair) -> dict[str, object]:
    """State that both ends keep per slot."""
    ends = {"frontend": pair.frontend, "worker": pair.worker}
    names = {
        "frontend": ("_open_legs", "_submits", "_prompt_parts", "_aborts"),
        "worker": ("_slots", "_send_queue", "_accepted", "_rejected"),
    }
    kept = {f"{end}{name}": getattr(ends[end], name) for end in ends for name in names[end]}
    return {name: value for name, value in kept.items() if value}


def violation_of(rule: str, action: Callable[[], object]) -> str:
    """Return the message of the violation of `rule` that `action` raises."""
    with pytest.raises(InvalidRequest) as raised:
        action()
    assert raised.value.reason == "ATTACH_BREACH"
    assert raised.value.metadata == {"rule": rule}
    assert f"rule ({rule})" in raised.value.message
    return raised.value.message


# Rule (a)


def test_rule_a_the_first_frames_are_hello_and_hello_ack() -> None:
    pair = new_pair()
    assert pair.worker.next_frame(0.0) is None, "the worker sent first"
    sink = RecordingSink()
    pair.frontend.submit(leg_request(), sink)
    first = pair.frontend.next_frame(0.0)
    assert first is not None
    assert first.hello == Hello(1, WORKER, 1)
    commands = pair.worker.receive(first, 0.0)
    assert [type(command) for command in commands] == [StartSlot]
    answer = pair.worker.next_frame(0.0)
    assert answer is not None
    assert answer.hello_ack == HelloAck(WORKER)
    pair.frontend.receive(answer)
    assert pair.frontend.is_open
    assert pair.worker.hello == first.hello


def test_rule_a_hello_is_sent_once() -> None:
    pair = open_pair()
    pair.now = 1.0
    pair.frontend.submit(leg_request(), RecordingSink())
    frame = pair.frontend.next_frame(pair.now)
    assert frame is not None
    assert frame.hello is None
    assert all(frame.hello_ack is None for frame in pair.to_frontend())


def test_rule_a_an_unexpected_worker_rejects_hello() -> None:
    worker = WorkerLink(8, 0.0)
    with pytest.raises(Conflict, match="this is worker 8, not 7") as raised:
        worker.receive(RequestFrame(hello=Hello(1, WORKER, 1)), 0.0)
    assert raised.value.reason == "WRONG_WORKER"
    assert raised.value.metadata == {"rule": "a"}


def test_rule_a_a_frontend_detects_another_worker_by_its_hello_ack() -> None:
    frontend = new_pair().frontend
    with pytest.raises(Conflict, match="this is worker 8, not 7") as raised:
        frontend.receive(ResponseFrame(hello_ack=HelloAck(8)))
    assert raised.value.reason == "WRONG_WORKER"
    assert not frontend.is_open


def test_rule_a_a_missing_or_second_hello_is_a_violation() -> None:
    pair = new_pair()
    assert "hello" in violation_of(
        "a", lambda: pair.worker.receive(RequestFrame(heartbeat=True), 0.0)
    )
    assert "hello_ack" in violation_of(
        "a", lambda: pair.frontend.receive(ResponseFrame(accepted=[1]))
    )
    pair = open_pair()
    hello, ack = Hello(1, WORKER, 1), HelloAck(WORKER)
    assert "twice" in violation_of("a", lambda: pair.worker.receive(RequestFrame(hello=hello), 0.0))
    assert "twice" in violation_of("a", lambda: pair.frontend.receive(ResponseFrame(hello_ack=ack)))


# Rule (b)


def test_rule_b_slots_count_from_one_and_are_never_reused() -> None:
    pair = open_pair()
    assert [pair.start()[0] for _ in range(2)] == [1, 2]
    for slot in (1, 2):
        pair.worker.end(slot, FinishReason.EOS)
    pair.to_frontend()
    assert pair.frontend.open_slots == 0
    assert pair.start()[0] == 3
    for reused in (0, 1, 3):
        again = RequestFrame(submits=[(reused, leg_request())])
        violation_of("b", functools.partial(pair.worker.receive, again, 0.0))


# Rule (c)


def test_rule_c_a_slot_is_accepted_then_has_tokens_then_one_end() -> None:
    pair = open_pair()
    sink = RecordingSink()
    slot = pair.frontend.submit(leg_request(5), sink)
    commands = pair.to_worker()
    assert commands == [StartSlot(slot, leg_request(5), prompt_of(leg_request(5)))]
    pair.worker.accept(slot)
    pair.worker.tokens(slot, [10, 11])
    pair.to_frontend()
    pair.worker.tokens(slot, [12])
    pair.worker.end(slot, FinishReason.EOS, stop_reason_json='"x"')
    pair.to_frontend()
    assert sink.token_ids == [10, 11, 12]
    assert sink.end == Terminal(slot, FinishReason.EOS, stop_reason_json='"x"', total_tokens=3)
    assert pair.worker.open_slots == pair.frontend.open_slots == 0
    assert not retained(pair)


def test_rule_c_all_events_of_a_slot_may_arrive_in_one_frame() -> None:
    pair = open_pair()
    sink = RecordingSink()
    slot = pair.frontend.submit(leg_request(), sink)
    pair.to_worker()
    pair.worker.accept(slot)
    pair.worker.tokens(slot, [1, 2])
    pair.worker.end(slot, FinishReason.LENGTH)
    assert len(pair.to_frontend()) == 1
    assert (sink.token_ids, sink.how) == ([1, 2], "terminal")


def test_rule_c_a_rejected_slot_gets_the_error_and_nothing_else() -> None:
    pair = open_pair()
    sink = RecordingSink()
    slot = pair.frontend.submit(leg_request(), sink)
    pair.to_worker()
    pair.worker.reject(slot, Overloaded(1.0))
    pair.to_frontend()
    assert sink.how == "rejected"
    assert isinstance(sink.end, Overloaded)
    assert not retained(pair)


def test_rule_c_a_slot_ended_before_it_was_accepted_is_accepted_on_the_wire() -> None:
    pair = open_pair()
    sink = RecordingSink()
    slot = pair.frontend.submit(leg_request(), sink)
    pair.to_worker()
    pair.worker.end(slot, None, error=DeadlineExceeded())
    pair.to_frontend()
    assert sink.is_accepted
    assert isinstance(sink.end, Terminal)
    assert isinstance(sink.end.error, DeadlineExceeded)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (ResponseFrame(accepted=[1]), "slot 1 accepted after it was accepted"),
        (ResponseFrame(accepted=[9]), "slot 9 accepted, but it is not open"),
        (ResponseFrame(rejected=[Rejected(1, Overloaded())]), "slot 1 rejected after"),
        (ResponseFrame(rejected=[Rejected(9, Overloaded())]), "slot 9 rejected, but"),
        (ResponseFrame(slot=[9], start=[0], count=[1], token_id=[5]), "slot 9 sent tokens, but"),
        (ResponseFrame(slot=[1], start=[3], count=[1], token_id=[5]), "from 3 came, 2 is next"),
        (ResponseFrame(slot=[1], start=[1], count=[1], token_id=[5]), "from 1 came, 2 is next"),
        (ResponseFrame(slot=[2], start=[0], count=[1], token_id=[5]), "slot 2 sent tokens before"),
        (ResponseFrame(chunks=[JsonChunk(1, 1, b"{}")]), "chunk 1 came, 0 is next"),
        (
            ResponseFrame(chunks=[JsonChunk(1, 0, b""), JsonChunk(1, 0, b"")]),
            "chunk 0 came, 1 is next",
        ),
        (ResponseFrame(chunks=[JsonChunk(9, 0, b"{}")]), "slot 9 sent a chunk, but"),
        (ResponseFrame(chunks=[JsonChunk(2, 0, b"{}")]), "slot 2 sent a chunk before"),
        (ResponseFrame(terminals=[Terminal(9, FinishReason.EOS)]), "slot 9 ended, but"),
        (ResponseFrame(terminals=[Terminal(2, FinishReason.EOS)]), "slot 2 ended before"),
        (ResponseFrame(terminals=[Terminal(1, FinishReason.EOS, total_tokens=3)]), "3 tokens, 2"),
        (ResponseFrame(terminals=[Terminal(1, FinishReason.EOS, total_tokens=1)]), "1 tokens, 2"),
    ],
)
def test_rule_c_a_frontend_detects_gaps_duplicates_and_wrong_slots(
    frame: ResponseFrame, expected: str
) -> None:
    pair = open_pair()
    slot, sink = pair.start()
    pair.worker.tokens(slot, [1, 2])
    sent_bytes = pair.to_frontend()[-1].sent_bytes
    other = pair.frontend.submit(leg_request(), RecordingSink())
    assert (slot, other) == (1, 2)
    frame.sent_bytes = sent_bytes
    assert expected in violation_of("c", lambda: pair.frontend.receive(frame))
    assert sink.token_ids == [1, 2]
    assert not sink.how


def test_rule_c_a_second_terminal_is_a_violation() -> None:
    pair = open_pair()
    slot, _ = pair.start()
    end = Terminal(slot, FinishReason.EOS)
    frame = ResponseFrame(terminals=[end, end])
    assert "not open" in violation_of("c", lambda: pair.frontend.receive(frame))


def test_rule_c_a_worker_cannot_end_a_slot_twice_or_send_before_it_is_accepted() -> None:
    pair = open_pair()
    slot = pair.frontend.submit(leg_request(), RecordingSink())
    pair.to_worker()
    with pytest.raises(AssertionError):
        pair.worker.tokens(slot, [1])
    with pytest.raises(AssertionError):
        pair.worker.chunk(slot, b"{}")
    pair.worker.end(slot, FinishReason.EOS)
    with pytest.raises(AssertionError):
        pair.worker.end(slot, FinishReason.EOS)
    with pytest.raises(AssertionError):
        pair.worker.accept(slot)
    with pytest.raises(AssertionError):
        pair.worker.reject(slot, Overloaded())


def test_rule_c_abort_of_a_finished_or_unknown_slot_is_a_no_op() -> None:
    pair = open_pair()
    slot, _ = pair.start()
    pair.worker.end(slot, FinishReason.EOS)
    crossing = RequestFrame(aborts=[AbortSlot(slot, "client_gone"), AbortSlot(99, "client_gone")])
    assert pair.worker.receive(crossing, 0.0) == []
    pair.to_frontend()
    assert pair.worker.receive(crossing, 0.0) == []
    pair.frontend.abort(slot, "late")
    pair.frontend.abort(99, "unknown")
    assert pair.frontend.next_frame(0.0) is None
    assert not retained(pair)


def test_rule_c_a_slot_aborted_twice_is_stopped_once_and_still_ends() -> None:
    pair = open_pair()
    slot, sink = pair.start()
    pair.frontend.abort(slot, "client_gone")
    pair.frontend.abort(slot, "deadline")
    assert pair.to_worker() == [AbortSlot(slot, "client_gone")]
    assert pair.worker.receive(RequestFrame(aborts=[AbortSlot(slot, "again")]), 0.0) == []
    pair.worker.tokens(slot, [1])
    pair.worker.end(slot, FinishReason.CANCELLED)
    pair.to_frontend()
    assert sink.token_ids == [1]
    assert sink.end == Terminal(slot, FinishReason.CANCELLED, total_tokens=1)
    assert not retained(pair)


def test_rule_c_an_abort_never_overtakes_its_submit() -> None:
    pair = open_pair()
    slots = [
        pair.frontend.submit(leg_request(PROMPT_PART_BYTES // 4), RecordingSink())
        for _ in range(10)
    ]
    for slot in slots:
        pair.frontend.abort(slot, "client_gone")
    seen: set[int] = set()
    while (frame := pair.frontend.next_frame(0.0)) is not None:
        seen |= {slot for slot, _ in frame.submits}
        assert {abort.slot for abort in frame.aborts} <= seen
        commands = pair.worker.receive(frame, 0.0)
        for slot in [command.slot for command in commands if isinstance(command, AbortSlot)]:
            pair.worker.end(slot, FinishReason.CANCELLED)
    assert seen == set(slots)
    pair.to_frontend()
    assert not retained(pair)


def test_rule_c_an_abort_while_the_prompt_arrives_ends_the_slot_and_its_parts() -> None:
    pair = open_pair()
    sink = RecordingSink()
    slot = pair.frontend.submit(leg_request(10 * PROMPT_PART_BYTES // 4), sink)
    first = pair.frontend.next_frame(0.0)
    assert first is not None
    assert first.prompt_parts
    pair.worker.receive(first, 0.0)
    late = pair.frontend.next_frame(0.0)  # parts in transit at the abort
    pair.frontend.abort(slot, "client_gone")
    last = pair.frontend.next_frame(0.0)
    assert late is not None
    assert last is not None
    assert last.aborts
    assert not last.prompt_parts, "no parts of an aborted prompt are sent"
    assert pair.worker.receive(last, 0.0) == []
    assert pair.worker.receive(late, 0.0) == [], "a part after the end is ignored"
    pair.to_frontend()
    assert pair.worker.receive(late, 0.0) == [], "a part after the Terminal is ignored"
    assert sink.end == Terminal(slot, FinishReason.CANCELLED)
    assert not retained(pair)


def test_rule_c_only_the_unreadable_submit_is_rejected() -> None:
    pair = open_pair()
    running, sink = pair.start()
    error = InvalidRequest("no", "payload")
    submit = 2, replace(leg_request(), prompt_bytes=400_000, error=error)
    part = PromptPart(2, PROMPT_PART_BYTES, b"abcd")
    assert pair.worker.receive(RequestFrame(submits=[submit], prompt_parts=[part]), 0.0) == []
    frame = pair.worker.next_frame(0.0)
    assert frame is not None
    assert [(r.slot, r.error.field) for r in frame.rejected] == [(2, "payload")]
    pair.worker.end(running, FinishReason.EOS)
    pair.to_frontend()
    assert sink.how == "terminal"


# Rule (d)


def test_rule_d_the_worker_stops_a_slot_at_its_deadline_once() -> None:
    pair = open_pair()
    slot, sink = pair.start(leg_request(timeout_s=0.5))
    endless, _ = pair.start(leg_request())
    assert pair.worker.expire(0.49) == []
    assert pair.worker.expire(0.5) == [AbortSlot(slot, "deadline")]
    assert pair.worker.expire(0.6) == []
    assert pair.worker.receive(RequestFrame(aborts=[AbortSlot(slot, "deadline")]), 0.6) == []
    pair.worker.end(slot, None, error=DeadlineExceeded())
    pair.to_frontend()
    assert sink.how == "terminal"
    assert pair.worker.open_slots == 1
    pair.worker.end(endless, FinishReason.EOS)


def test_rule_d_a_started_slot_without_acceptance_has_a_deadline() -> None:
    pair = open_pair()
    slot = pair.frontend.submit(leg_request(timeout_s=0.5), RecordingSink())
    pair.to_worker()
    assert pair.worker.expire(0.5) == [AbortSlot(slot, "deadline")]


def test_rule_d_a_prompt_that_does_not_arrive_in_time_ends_its_slot() -> None:
    pair = open_pair()
    sink = RecordingSink()
    pair.frontend.submit(leg_request(PROMPT_PART_BYTES, timeout_s=0.5), sink)
    frame = pair.frontend.next_frame(0.0)
    assert frame is not None
    frame.prompt_parts.clear()
    pair.worker.receive(frame, 0.0)
    assert pair.worker.expire(0.5) == []
    pair.to_frontend()
    assert isinstance(sink.end, Terminal)
    assert isinstance(sink.end.error, DeadlineExceeded)
    assert pair.worker.open_slots == 0


def test_rule_d_a_slot_that_ended_has_no_deadline() -> None:
    pair = open_pair()
    slot, _ = pair.start(leg_request(timeout_s=0.5))
    pair.worker.end(slot, FinishReason.EOS)
    assert pair.worker.expire(0.6) == []


# Rule (e)


def test_rule_e_both_sides_send_a_heartbeat_each_second() -> None:
    pair = open_pair()
    load = Load(engine_step=5, running=2)
    beats: dict[str, list[float]] = {"frontend": [], "worker": []}
    for step in range(1, 501):
        now = step / 100
        to_worker = pair.frontend.next_frame(now)
        if to_worker is not None:
            assert to_worker.heartbeat
            beats["frontend"].append(now)
            pair.worker.receive(to_worker, now)
        to_frontend = pair.worker.next_frame(now, lambda: [load])
        if to_frontend is not None:
            assert to_frontend.heartbeat == [load]
            beats["worker"].append(now)
            pair.frontend.receive(to_frontend)
    assert beats == {"frontend": [1, 2, 3, 4, 5], "worker": [1, 2, 3, 4, 5]}
    assert pair.frontend.loads == [load]


def test_the_failure_of_an_engine_is_sent_with_heartbeats_only() -> None:
    worker = WorkerLink(WORKER, 0.0)
    worker.receive(RequestFrame(hello=Hello(1, WORKER, 1)), 0.0)
    frames = [worker.next_frame(step / 2, engine_failure="CUDA error") for step in range(5)]
    sent = [frame.engine_failure for frame in frames if frame is not None and frame.heartbeat]
    assert sent == ["CUDA error"] * 3


def test_rule_e_both_sides_use_the_heartbeat_interval_of_the_worker() -> None:
    worker = WorkerLink(WORKER, 0.0, heartbeat_s=0.2)
    pair = Pair(FrontendLink(Hello(1, WORKER, 1), 0.0), worker)
    pair.to_worker()
    ack = pair.to_frontend()[0].hello_ack
    assert ack is not None
    assert ack.heartbeat_s == 0.2
    beat = pair.frontend.next_frame(0.2)
    assert beat is not None
    assert beat.heartbeat
    assert pair.frontend.heartbeat_s == 0.2


def test_rule_e_a_heartbeat_interval_of_zero_is_a_violation() -> None:
    frontend = new_pair().frontend
    ack = HelloAck(WORKER, heartbeat_s=0.0)
    violation_of("e", lambda: frontend.receive(ResponseFrame(hello_ack=ack)))


# Rule (f)


def test_rule_f_a_lost_stream_ends_every_slot_and_is_silent_afterwards() -> None:
    pair = open_pair()
    accepted, accepted_sink = pair.start()
    arriving, started = RecordingSink(), RecordingSink()
    started_slot = pair.frontend.submit(leg_request(), started)
    pair.frontend.submit(leg_request(PROMPT_PART_BYTES), arriving)
    frame = pair.frontend.next_frame(0.0)
    assert frame is not None
    frame.prompt_parts.clear()
    pair.worker.receive(frame, 0.0)
    unframed = RecordingSink()
    pair.frontend.abort(pair.frontend.submit(leg_request(), unframed), "client_gone")
    pair.worker.tokens(accepted, [1])
    error = WorkerLost(retryable=True)
    pair.frontend.close(error)
    pair.frontend.close(Conflict("another"))
    for sink in (accepted_sink, arriving, started, unframed):
        assert (sink.how, sink.end) == ("lost", error)
    assert pair.worker.close() == [accepted, started_slot], "only running slots are closed"
    assert pair.worker.close() == []
    assert not retained(pair)
    assert not pair.frontend.is_open
    assert pair.frontend.next_frame(9.0) is None
    assert pair.worker.next_frame(9.0) is None
    with pytest.raises(WorkerLost):
        pair.frontend.submit(leg_request(), RecordingSink())


def test_rule_f_output_after_the_loss_of_the_stream_is_ignored() -> None:
    pair = open_pair()
    slot, sink = pair.start()
    pair.frontend.submit(leg_request(), RecordingSink())
    pair.to_worker()
    pair.worker.close()
    pair.worker.tokens(slot, [1])
    pair.worker.chunk(slot, b"{}")
    pair.worker.end(slot, FinishReason.CANCELLED)
    pair.worker.accept(2)
    pair.worker.reject(2, Overloaded())
    assert pair.worker.receive(RequestFrame(submits=[(3, leg_request())]), 0.0) == []
    assert pair.worker.next_frame(5.0) is None
    assert pair.worker.open_slots == 0
    pair.frontend.close(WorkerLost(retryable=True))
    pair.frontend.receive(ResponseFrame(slot=[slot], start=[0], count=[1], token_id=[1]))
    pair.frontend.abort(slot, "client_gone")
    assert sink.token_ids == []
    assert not retained(pair)


def test_rule_f_a_sink_may_submit_to_another_link_during_the_loss() -> None:
    first, second = open_pair(), open_pair()

    class Moves(RecordingSink):
        def lost(self, error: MeshError) -> None:
            second.frontend.submit(leg_request(), RecordingSink())

    for _ in range(3):
        first.frontend.submit(leg_request(), Moves())
    first.frontend.close(WorkerLost(retryable=True))
    assert second.frontend.open_slots == 3


# Rule (g)


def test_rule_g_prompts_are_sent_in_parts_between_other_submits() -> None:
    pair = open_pair()
    long = leg_request(75 * 1024, "long")  # 300 KiB
    pair.frontend.submit(long, RecordingSink())
    pair.frontend.submit(leg_request(2, "short"), RecordingSink())
    first = pair.frontend.next_frame(0.0)
    assert first is not None
    assert [slot for slot, _ in first.submits] == [1, 2]
    assert len(first.submits[0][1].prompt) == PROMPT_PART_BYTES
    commands = pair.worker.receive(first, 0.0)
    assert [command.slot for command in commands] == [2], "the short prompt does not wait"
    starts = pair.to_worker()
    assert starts == [StartSlot(1, long.with_first_part(PROMPT_PART_BYTES), prompt_of(long))]
    assert all(len(part.data) <= PROMPT_PART_BYTES for part in first.prompt_parts)
    assert not pair.frontend._prompt_parts


def test_rule_g_long_prompts_take_turns() -> None:
    pair = open_pair()
    for _ in range(3):
        pair.frontend.submit(leg_request(75 * 1024), RecordingSink())
    order_of_parts: list[int] = []
    while (frame := pair.frontend.next_frame(0.0)) is not None:
        order_of_parts += [part.slot for part in frame.prompt_parts]
    assert order_of_parts == [1, 2, 3] * 4


@pytest.mark.parametrize(
    "tokens", [0, 1, PROMPT_PART_BYTES // 4, PROMPT_PART_BYTES // 4 + 1, 75 * 1024]
)
def test_rule_g_a_prompt_of_any_length_arrives_whole(tokens: int) -> None:
    pair = open_pair()
    whole = leg_request(tokens)
    pair.frontend.submit(whole, RecordingSink())
    is_in_parts = len(prompt_of(whole)) > PROMPT_PART_BYTES
    framed = whole.with_first_part(PROMPT_PART_BYTES) if is_in_parts else whole
    assert pair.to_worker() == [StartSlot(1, framed, prompt_of(whole))]


def test_rule_g_frames_to_the_worker_respect_the_size_limit() -> None:
    pair = open_pair()
    rng = Random(1)
    for _ in range(60):
        pair.frontend.submit(
            leg_request(rng.choice([1, 1, 15_000, 16_384, 20_000, 75_000])), RecordingSink()
        )
    sizes = []
    while (frame := pair.frontend.next_frame(0.0)) is not None:
        sizes.append(request_frame_to_proto(frame).ByteSize())
        pair.worker.receive(frame, 0.0)
    assert max(sizes) <= FRAME_BYTES + SLACK_BYTES
    assert pair.worker.open_slots == 60


def test_rule_g_a_submit_larger_than_a_frame_is_sent_alone() -> None:
    pair = open_pair()
    body = b"x" * (FRAME_BYTES + 1)
    for chat_json in (b"{}", body, b"{}"):
        pair.frontend.submit(LegRequest("r", chat_json=chat_json), RecordingSink())
    frames = []
    while (frame := pair.frontend.next_frame(0.0)) is not None:
        frames.append([slot for slot, _ in frame.submits])
    assert frames == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("parts", "rule", "expected"),
    [
        ([PromptPart(1, PROMPT_PART_BYTES + 4, b"abcd")], "g", "out of order"),
        (
            [PromptPart(1, PROMPT_PART_BYTES, b"abcd"), PromptPart(1, PROMPT_PART_BYTES, b"abcd")],
            "g",
            "order",
        ),
        ([PromptPart(1, PROMPT_PART_BYTES, b"")], "g", "out of order"),
        (
            [PromptPart(1, PROMPT_PART_BYTES, b"a" * (PROMPT_PART_BYTES + 4))],
            "g",
            "longer than prompt_bytes",
        ),
        (
            [PromptPart(1, PROMPT_PART_BYTES, b"a" * PROMPT_PART_BYTES), PromptPart(1, 0, b"a")],
            "g",
            "order",
        ),
        ([PromptPart(2, 0, b"abcd")], "c", "slot 2 continues a prompt, but was never submitted"),
    ],
)
def test_rule_g_a_worker_detects_invalid_prompt_parts(
    parts: list[PromptPart], rule: str, expected: str
) -> None:
    pair = open_pair()
    pair.frontend.submit(leg_request(PROMPT_PART_BYTES // 2), RecordingSink())
    frame = pair.frontend.next_frame(0.0)
    assert frame is not None
    frame.prompt_parts[:] = parts
    assert expected in violation_of(rule, lambda: pair.worker.receive(frame, 0.0))


@pytest.mark.parametrize("prompt_bytes", [4, 8, 13])
def test_rule_g_a_submit_with_contradicting_sizes_is_a_violation(prompt_bytes: int) -> None:
    submit = 1, replace(leg_request(2), prompt_bytes=prompt_bytes)
    worker = open_pair().worker
    violation_of("g", lambda: worker.receive(RequestFrame(submits=[submit]), 0.0))


def test_rule_g_a_prompt_above_the_size_limit_is_rejected_before_it_is_read() -> None:
    pair = open_pair()
    pair.frontend.submit(leg_request(), RecordingSink())
    submit = 1, replace(leg_request(2), prompt_bytes=PROMPT_BYTES_MAX + 4)
    more = PromptPart(1, 8, b"a" * 8)
    assert pair.worker.receive(RequestFrame(submits=[submit], prompt_parts=[more]), 0.0) == []
    frame = pair.worker.next_frame(0.0)
    assert frame is not None
    assert isinstance(frame.rejected[0].error, PromptTooLong)
    assert pair.worker.open_slots == 0


def test_rule_g_slots_take_turns_so_that_a_small_one_is_in_the_next_frame() -> None:
    pair = open_pair()
    large, large_sink = pair.start()
    small, small_sink = pair.start()
    truth = list(range(100_000))
    pair.worker.tokens(large, truth)
    pair.worker.tokens(small, [42])
    frame = pair.worker.next_frame(0.0)
    assert frame is not None
    assert small in frame.slot
    pair.frontend.receive(frame)
    assert small_sink.token_ids == [42]
    pair.to_frontend()
    assert large_sink.token_ids == truth


def test_rule_g_a_slot_with_many_chunks_leaves_space_for_other_slots() -> None:
    pair = open_pair()
    large, _ = pair.start(LegRequest("large", chat_json=b"{}"))
    small, small_sink = pair.start(LegRequest("small", chat_json=b"{}"))
    for _ in range(2000):
        pair.worker.chunk(large, b"x" * 1000)
    pair.worker.chunk(small, b"{}")
    frame = pair.worker.next_frame(0.0)
    assert frame is not None
    pair.frontend.receive(frame)
    assert small_sink.chunks == [b"{}"]


def test_rule_g_frames_to_the_frontend_respect_the_size_limit() -> None:
    pair = open_pair()
    plain, plain_sink = pair.start()
    probable, probable_sink = pair.start()
    through, through_sink = pair.start(LegRequest("r", chat_json=b"{}"))
    tokens = [100_000 + i for i in range(30_000)]
    some_logprobs = [logprob(token, top=20) for token in tokens[:3000]]
    chunks = [b"y" * size for size in (10, 100_000, 3, 200_000, 100_000, 20)]
    pair.worker.tokens(plain, tokens)
    pair.worker.tokens(probable, tokens[:3000], some_logprobs)
    for one in chunks:
        pair.worker.chunk(through, one)
    for slot in (plain, probable, through):
        pair.worker.end(slot, FinishReason.LENGTH)
    sizes = []
    while (frame := pair.worker.next_frame(0.0)) is not None:
        sizes.append(response_frame_to_proto(frame).ByteSize())
        pair.frontend.receive(frame)
        pair.to_worker()
    assert max(sizes) <= FRAME_BYTES + SLACK_BYTES
    assert plain_sink.token_ids == tokens
    assert (probable_sink.token_ids, probable_sink.logprobs) == (tokens[:3000], some_logprobs)
    assert through_sink.chunks == chunks
    assert not retained(pair)


def test_rule_g_a_chunk_larger_than_a_frame_is_sent_alone_and_never_starved() -> None:
    pair = open_pair()
    slots = [pair.start(LegRequest("r", chat_json=b"{}")) for _ in range(30)]
    giant, large = b"g" * (FRAME_BYTES + 1), b"l" * 200_000
    for slot, _ in slots[:28]:
        for _ in range(40):
            pair.worker.chunk(slot, b"s" * 5000)
    pair.worker.chunk(slots[28][0], giant)
    pair.worker.chunk(slots[29][0], large)
    frames = 0
    while not (slots[28][1].chunks and slots[29][1].chunks):
        frame = pair.worker.next_frame(0.0)
        assert frame is not None
        if any(chunk.json == giant for chunk in frame.chunks):
            assert len(frame.chunks) == 1
        pair.frontend.receive(frame)
        pair.to_worker()
        frames += 1
    assert frames <= 6, "a round of all slots is three frames, the large ones have one each"


# Rule (h)


@pytest.mark.parametrize(
    "frame",
    [
        ResponseFrame(slot=[1], start=[0], count=[1, 1], token_id=[1, 2]),
        ResponseFrame(slot=[1], start=[0], count=[2], token_id=[1]),
        ResponseFrame(slot=[1], start=[0], count=[1], token_id=[1, 2]),
        ResponseFrame(slot=[1, 1], start=[0, 3], count=[3, 0], token_id=[1, 2, 3]),
        ResponseFrame(token_id=[1]),
        ResponseFrame(
            slot=[1], start=[0], count=[2], token_id=[1, 2], logprobs=[(1, [logprob(1)])]
        ),
        ResponseFrame(slot=[1], start=[0], count=[1], token_id=[1], logprobs=[(2, [logprob(1)])]),
        ResponseFrame(logprobs=[(1, [logprob(1)])]),
    ],
)
def test_rule_h_arrays_of_different_lengths_are_a_violation(frame: ResponseFrame) -> None:
    pair = open_pair()
    _, sink = pair.start()
    violation_of("h", lambda: pair.frontend.receive(frame))
    assert sink.token_ids in ([], [1]), "ambiguous tokens are not delivered"


def test_rule_h_a_step_of_many_slots_is_one_frame() -> None:
    pair = open_pair()
    slots = [pair.start()[0] for _ in range(256)]
    for slot in slots:
        pair.worker.tokens(slot, [slot])
    assert len(pair.to_frontend()) == 1


def test_rule_h_logprobs_stay_with_their_tokens_even_where_only_some_have_them() -> None:
    pair = open_pair()
    slot, sink = pair.start()
    pair.worker.tokens(slot, [1, 2])
    pair.worker.tokens(slot, [3], [logprob(3)])
    pair.worker.tokens(slot, [])
    pair.worker.tokens(slot, [4, 5])
    frames = []
    while (frame := pair.worker.next_frame(0.0)) is not None:
        pair.frontend.receive(frame)
        frames.append((frame.token_id, frame.logprobs))
    assert frames == [([1, 2], []), ([3], [(slot, [logprob(3)])]), ([4, 5], [])]
    assert sink.token_ids == [1, 2, 3, 4, 5]
    with pytest.raises(AssertionError):
        pair.worker.tokens(slot, [6, 7], [logprob(6)])


# Rule (i)


def test_rule_i_a_stalled_frontend_stops_tokens_but_not_control() -> None:
    pair = open_pair()
    slots = [pair.start() for _ in range(5)]
    truth = list(range(200_000))
    for slot, _ in slots:
        pair.worker.tokens(slot, truth)  # 4 MB in all
    held: list[ResponseFrame] = []
    while (frame := pair.worker.next_frame(pair.now)) is not None:
        held.append(frame)
    assert CREDIT_BYTES - 64 <= pair.worker.unacked_bytes <= CREDIT_BYTES + 64
    assert sum(response_frame_to_proto(frame).ByteSize() for frame in held) <= CREDIT_BYTES + 4096

    pair.frontend.submit(leg_request(), RecordingSink())
    pair.frontend.submit(leg_request(), RecordingSink())
    pair.now = 1.0
    pair.to_worker()
    pair.worker.accept(6)
    pair.worker.reject(7, Overloaded())
    pair.worker.tokens(6, [1])
    control = pair.worker.next_frame(pair.now)
    assert control is not None
    assert control.accepted == [6]
    assert [rejected.slot for rejected in control.rejected] == [7]
    assert control.heartbeat
    assert not control.slot
    assert pair.worker.next_frame(pair.now) is None

    for frame in [*held, control]:
        pair.frontend.receive(frame)
    for _ in range(20):  # it reads again and acknowledges unprompted
        pair.to_worker()
        pair.to_frontend()
    for _, sink in slots:
        assert sink.token_ids == truth


def test_rule_i_a_frontend_acknowledges_each_quarter_of_the_credit() -> None:
    pair = open_pair()
    slot, _ = pair.start()
    quarter = CREDIT_BYTES // 4
    pair.worker.tokens(slot, range(quarter // 4 - 100))
    pair.to_frontend()
    assert pair.frontend.next_frame(0.0) is None
    pair.worker.tokens(slot, range(200))
    sent_bytes = pair.to_frontend()[-1].sent_bytes
    ack = pair.frontend.next_frame(0.0)
    assert ack == RequestFrame(acked_bytes=sent_bytes)
    pair.worker.receive(ack, 0.0)
    assert pair.worker.unacked_bytes == 0
    pair.worker.receive(RequestFrame(acked_bytes=1), 0.0)
    assert pair.worker.unacked_bytes == 0, "an older acknowledgement has no effect"


def test_rule_i_impossible_counts_are_a_violation() -> None:
    pair = open_pair()
    slot, _ = pair.start()
    pair.worker.tokens(slot, [1, 2, 3])
    pair.to_frontend()
    sent_bytes = pair.worker.unacked_bytes
    ack = RequestFrame(acked_bytes=sent_bytes + 1)
    assert "acknowledged" in violation_of("i", lambda: pair.worker.receive(ack, 0.0))
    frame = ResponseFrame(sent_bytes=sent_bytes - 1)
    assert "fell" in violation_of("i", lambda: pair.frontend.receive(frame))


# All rules together


@dataclass(slots=True)
class Job:
    """One request of a random run with its expected output."""

    leg_request: LegRequest
    sink: RecordingSink
    plan: str
    truth: list[int]
    chunks: list[bytes]
    has_logprobs: bool
    produced: int = 0
    stop: str = ""
    is_aborted: bool = False
    is_refused: bool = False


class Run:
    """Both ends, connected by links that delay and combine frames, driven by one seed."""

    def __init__(self, seed: int, jobs: int, *, wire: bool) -> None:
        self.rng = Random(seed)
        self.pair = new_pair(100.0)
        self.wire = wire
        self.left = jobs
        self.jobs: dict[int, Job] = {}
        self.active: list[int] = []
        self.down: deque[tuple[float, RequestFrame]] = deque()
        self.up: deque[tuple[float, ResponseFrame]] = deque()
        self.stalled_until = 0.0
        self.frontend_silence = self.silence_watch()
        self.worker_silence = self.silence_watch()

    def silence_watch(self) -> SilenceWatch:
        return SilenceWatch(ATTACH.limit_s, "frame", clock=lambda: self.pair.now)

    def step(self) -> None:
        rng, pair = self.rng, self.pair
        pair.now += rng.choice([0.001, 0.01, 0.05])
        if self.left and rng.random() < 0.4:
            self.submit()
        self.abort()
        if rng.random() < 0.02 and pair.now > self.stalled_until + 0.5:
            self.stalled_until = pair.now + rng.uniform(0.1, 1.5)
        self.work()
        self.send()
        self.deliver()
        self.frontend_silence.check()
        self.worker_silence.check()
        for stop in pair.worker.expire(pair.now):
            assert self.jobs[stop.slot].leg_request.timeout_s is not None
            self.obey(stop)
        assert pair.worker.unacked_bytes <= CREDIT_BYTES + 256

    def submit(self) -> None:
        rng = self.rng
        self.left -= 1
        plan = rng.choice(["finish", "finish", "finish", "fail", "hang", "reject", "chunks"])
        size = rng.choice([0, 1, 50, 16_384, 16_385, rng.randrange(76_801)])
        # Requests that hang end only by a deadline or an abort.
        timeout_s = rng.uniform(0.05, 3.0) if plan == "hang" or rng.random() < 0.2 else None
        one = leg_request(size, f"r{self.left}", timeout_s)
        if plan == "chunks":
            one = LegRequest(one.request_id, timeout_s=timeout_s, chat_json=b"{}")
        length = rng.choice([1, 5, 100, 3000, 40_000])
        first = rng.randrange(150_000)
        truth = [] if plan == "chunks" else list(range(first, first + length))
        chunks = [b"c" * rng.choice([10, 300, 70_000]) for _ in range(min(length, 20))]
        sink = RecordingSink()
        some_logprobs = rng.random() < 0.1 and length <= 3000
        job = Job(one, sink, plan, truth, chunks if plan == "chunks" else [], some_logprobs)
        slot = self.pair.frontend.submit(one, sink)
        assert slot not in self.jobs
        self.jobs[slot] = job
        if rng.random() < 0.1:
            self.pair.frontend.abort(slot, "client_gone")
            job.is_aborted = True

    def abort(self) -> None:
        rng = self.rng
        if self.jobs and rng.random() < 0.1:  # any of them: open, ended, already aborted
            slot = rng.choice(list(self.jobs))
            self.pair.frontend.abort(slot, "client_gone")
            job = self.jobs[slot]
            job.is_aborted = job.is_aborted or not job.sink.how

    def work(self) -> None:
        for slot in list(self.active):
            job = self.jobs[slot]
            if job.stop and self.rng.random() < 0.5:
                late = DeadlineExceeded() if job.stop == "deadline" else None
                self.end(slot, None if late else FinishReason.CANCELLED, late)
            elif self.rng.random() < 0.7:
                self.produce(slot, job)

    def produce(self, slot: int, job: Job) -> None:
        worker, rng = self.pair.worker, self.rng
        if job.plan == "hang":
            return
        output: Sequence[object] = job.chunks or job.truth
        at = job.produced
        job.produced = min(len(output), at + rng.choice([1, 1, 7, 500, 20_000]))
        if job.chunks:
            for one in job.chunks[at : job.produced]:
                worker.chunk(slot, one)
        else:
            tokens = job.truth[at : job.produced]
            worker.tokens(slot, tokens, [logprob(t, 2) for t in tokens] if job.has_logprobs else ())
        if job.produced == len(output):
            failed = WorkerLost("engine", retryable=True) if job.plan == "fail" else None
            self.end(slot, None if failed else FinishReason.LENGTH, failed)

    def end(self, slot: int, finish_reason: FinishReason | None, error: MeshError | None) -> None:
        self.active.remove(slot)
        self.pair.worker.end(slot, finish_reason, error=error)

    def send(self) -> None:
        """Send frames both ways, unless the last write of that side is pending."""
        rng, pair = self.rng, self.pair
        while len(self.down) < 3 and rng.random() < 0.8:
            frame = pair.frontend.next_frame(pair.now)
            if frame is None:
                break
            message = request_frame_to_proto(frame)
            assert message.ByteSize() <= FRAME_BYTES + SLACK_BYTES
            if self.wire:
                data = message.SerializeToString()
                frame = request_frame_from_proto(engine_pb2.AttachRequest.FromString(data))
            self.down.append((pair.now + rng.uniform(0, 0.1), frame))
        while len(self.up) < 3 and rng.random() < 0.8:
            back = pair.worker.next_frame(pair.now)
            if back is None:
                break
            answer = response_frame_to_proto(back)
            assert answer.ByteSize() <= FRAME_BYTES + SLACK_BYTES
            if self.wire:
                data = answer.SerializeToString()
                back = response_frame_from_proto(engine_pb2.AttachResponse.FromString(data))
            self.up.append((pair.now + rng.uniform(0, 0.1), back))

    def deliver(self) -> None:
        pair = self.pair
        while self.down and self.down[0][0] <= pair.now:
            self.worker_silence.restart()
            for command in pair.worker.receive(self.down.popleft()[1], pair.now):
                self.obey(command)
        while pair.now >= self.stalled_until and self.up and self.up[0][0] <= pair.now:
            self.frontend_silence.restart()
            pair.frontend.receive(self.up.popleft()[1])

    def obey(self, command: StartSlot | AbortSlot) -> None:
        job = self.jobs[command.slot]
        if isinstance(command, AbortSlot):
            if job.is_refused:
                return
            assert command.slot in self.active
            job.stop = command.reason
            return
        assert command.leg_request.request_id == job.leg_request.request_id
        if job.leg_request.request is not None:
            assert command.prompt == job.leg_request.request.token_ids.little_endian
        if job.plan == "reject":
            self.pair.worker.reject(command.slot, Overloaded(1.0))
            job.is_refused = True
            return
        self.pair.worker.accept(command.slot)
        self.active.append(command.slot)

    def check_ended(self, slot: int, job: Job) -> None:
        sink = job.sink
        assert sink.token_ids == job.truth[: len(sink.token_ids)], f"slot {slot}"
        assert sink.chunks == job.chunks[: len(sink.chunks)], f"slot {slot}"
        if job.has_logprobs:
            assert [one.token_id for one in sink.logprobs] == sink.token_ids
        if sink.how == "rejected":
            assert job.plan == "reject"
            assert sink.end is not None
        elif sink.how == "terminal":
            assert isinstance(sink.end, Terminal)
            assert sink.end.total_tokens == len(sink.token_ids)
            if sink.end.finish_reason is FinishReason.LENGTH:
                assert (sink.token_ids, sink.chunks) == (job.truth, job.chunks)
            if sink.end.finish_reason is FinishReason.CANCELLED:
                assert job.is_aborted

    @property
    def is_quiet(self) -> bool:
        pair = self.pair
        return not (self.left or pair.frontend.open_slots or pair.worker.open_slots)


@pytest.mark.parametrize("seed", range(12))
def test_random_runs_deliver_everything_once_and_leave_nothing_behind(seed: int) -> None:
    run = Run(seed, jobs=40, wire=seed % 2 == 0)
    started_at = run.pair.now
    while not run.is_quiet:
        run.step()
        assert run.pair.now - started_at < 60, f"seed {seed} has not become idle"
    assert len(run.jobs) == 40
    for slot, job in run.jobs.items():
        assert job.sink.how in ("rejected", "terminal"), f"seed {seed}, slot {slot}"
        run.check_ended(slot, job)
    assert {job.sink.how for job in run.jobs.values()} == {"rejected", "terminal"}
    while run.down or run.up or run.pair.frontend._aborts:
        run.step()
    assert not retained(run.pair), f"seed {seed}"
    run.pair.now += 1.0
    run.pair.to_worker()
    assert run.pair.worker.unacked_bytes == 0


@pytest.mark.parametrize("seed", range(12))
def test_random_runs_that_lose_the_stream_end_every_slot_once(seed: int) -> None:
    run = Run(1000 + seed, jobs=40, wire=False)
    for _ in range(run.rng.randrange(20, 200)):
        run.step()
    pair = run.pair
    was_open = [slot for slot, job in run.jobs.items() if not job.sink.how]
    error = WorkerLost(retryable=True)
    if seed % 2:  # one side detects the loss first; the other continues for a while
        pair.frontend.close(error)
        run.work()
        run.send()
        run.deliver()
    assert sorted(pair.worker.close()) == sorted(run.active)
    run.work()  # engines that are being closed
    pair.frontend.close(error)
    run.deliver()
    for slot, job in run.jobs.items():
        assert job.sink.how == "lost" if slot in was_open else job.sink.how != "lost"
        run.check_ended(slot, job)
    assert pair.frontend.open_slots == pair.worker.open_slots == 0
    assert not retained(pair)
