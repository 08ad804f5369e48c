"""The two ends of a handoff: each event in each state, and both ends in random orders of events."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest, Overloaded
from worker_svc.engines.handoff import (
    EXPIRED,
    MISMATCH,
    NO_BLOCKS,
    NO_PARTNER,
    PEER_ABORTED,
    PEER_LOST,
    HandoffTimeouts,
    handoff_error,
)
from worker_svc.engines.sim.block_manager import BlockManager
from worker_svc.engines.sim.messages import (
    FRAME_LENGTH_BYTES,
    Done,
    Drop,
    Fail,
    Message,
    Pull,
    Signal,
    Write,
    from_bytes,
    page_stamps,
    to_frame,
)
from worker_svc.engines.sim.transfer import (
    Action,
    CloseConnection,
    DecodeMachine,
    Dial,
    EndLeg,
    HandoffOutcome,
    KvArrived,
    PrefillMachine,
    ReleaseBlocks,
    Send,
    SendDrop,
    StartWriting,
    StopWriting,
)

LIMITS = HandoffTimeouts(partner_timeout_s=10.0, abort_s=2.0, lease_s=30.0)
PULL = Pull(room=2**64 - 1, incarnation=7, tokens=40, block_size=16, pages=[5, 0, 9])
DONE = Done(token=101, cached_tokens=16)
EVERY_MESSAGE: list[Message] = [
    *(PULL, Drop(3), Signal.JOINED, Signal.PING, Write([1, 2], [5, -1]), DONE),
    *(Fail(EXPIRED), Fail("two\nlines"), Signal.ABORT, Signal.ABORTED, Signal.RECEIVED),
]


def failing(reason: str) -> Callable[[Action], bool]:
    """Whether an action ends the leg with this reason."""
    return lambda action: (
        isinstance(action, EndLeg) and action.error is not None and action.error.reason == reason
    )


def kinds(actions: list[Action]) -> list[type[Action]]:
    return [type(action) for action in actions]


def prefill(*, leg: bool = True, pull: bool = False, kv: bool = False) -> PrefillMachine:
    room = PrefillMachine(LIMITS, 0.0)
    if leg:
        room.attach_leg(0.0)
    if pull:
        room.attach_peer(0.0, PULL)
    if kv:
        room.on_prompt_computed(0.0)
    return room


def decode(*, placed: bool = True, pulled: bool = True) -> DecodeMachine:
    room = DecodeMachine(LIMITS, 0.0)
    if placed:
        room.start_pull()
    if pulled:
        room.on_connected(PULL)
    return room


# The wire.


def to_data(message: Message) -> bytes:
    """Returns the frame of a message without its length."""
    return to_frame(message)[FRAME_LENGTH_BYTES:]


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=str)
def test_every_message_survives_the_wire_as_one_frame(message: Message) -> None:
    frame = to_frame(message)
    data = to_data(message)
    assert from_bytes(data) == message
    assert int.from_bytes(frame[:FRAME_LENGTH_BYTES], "little") == len(data)


def test_frames_are_those_of_earlier_versions() -> None:
    assert to_frame(Signal.JOINED) == b"\x09\0\0\0Joined {}"
    assert to_frame(Drop(3)) == b'\x0f\0\0\0Drop {"room":3}'
    assert to_data(Write([1, 2], [5, -1])) == b'Write {"pages":[1,2],"stamps":[5,-1]}'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        to_data(PULL)[:-2],
        to_data(PULL)[:9],
        to_data(Write([1], [2]))[:-2],
        to_data(Drop(3)) + b"\0",
        to_data(DONE)[:-2],
        to_data(Signal.ABORT) + b"\0",
        to_data(Fail("X")) + b"\xff",
        b"Drop",
        b"Drop {}",
        b'Drop {"room":-1}',
        b'Drop {"room":"3"}',
        b'Unknown {"room":3}',
        b'Ping {"room":3}',
    ],
)
def test_a_malformed_message_is_rejected(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        from_bytes(data)


@given(data=st.binary(max_size=60))
@settings(max_examples=200)
def test_every_frame_is_decoded_or_rejected(data: bytes) -> None:
    try:
        message = from_bytes(data)
    except InvalidRequest:
        return
    assert from_bytes(to_data(message)) == message


def test_page_stamps_depend_on_all_tokens_up_to_the_pages_end() -> None:
    one = np.arange(40, dtype="<u4").tobytes()
    other = np.array([*range(16), 99, *range(17, 40)], dtype="<u4").tobytes()

    stamps, others = page_stamps(one, 16), page_stamps(other, 16)

    assert len(stamps) == 3
    assert [a == b for a, b in zip(stamps, others, strict=True)] == [True, False, False]
    assert not set(stamps) & set(page_stamps(one, 16, "adapter"))
    assert page_stamps(one[: 4 * 32], 16) == stamps[:2]


def test_a_failed_handoff_is_retryable() -> None:
    error = handoff_error(PEER_LOST)
    assert (error.retryable, error.reason) == (True, PEER_LOST)


# Prefill.


@pytest.mark.parametrize("order", ["lpk", "plk", "lkp"])
def test_prefill_writes_when_leg_pull_and_kv_are_present_in_any_order(order: str) -> None:
    room = PrefillMachine(LIMITS, 0.0)
    events: dict[str, Callable[[], list[Action]]] = {
        "l": lambda: room.attach_leg(1.0),
        "p": lambda: room.attach_peer(2.0, PULL),
        "k": lambda: room.on_prompt_computed(3.0),
    }

    steps = [events[event]() for event in order]

    assert all(StartWriting not in kinds(step) for step in steps[:-1])
    assert kinds(steps[-1])[-1] is StartWriting
    counts = [action for step in steps for action in step if isinstance(action, Send)]
    assert counts == [Send(Signal.JOINED)]
    room.on_done_sent(4.0)
    assert room.receive(5.0, Signal.RECEIVED) == [ReleaseBlocks(), EndLeg(None), CloseConnection()]
    assert (room.is_over, room.outcome) == (True, HandoffOutcome.HANDED_OVER)


def test_a_lease_is_pulled_without_a_leg() -> None:
    room = PrefillMachine(LIMITS, 0.0)
    assert room.on_prompt_computed(0.0) == []
    assert room.attach_peer(29.9, PULL) == [Send(Signal.JOINED), StartWriting()]
    room.on_done_sent(30.5)
    assert room.receive(31.0, Signal.RECEIVED) == [ReleaseBlocks(), CloseConnection()]
    assert room.outcome is HandoffOutcome.HANDED_OVER


def test_a_lease_expires() -> None:
    room = PrefillMachine(LIMITS, 0.0)
    room.on_prompt_computed(0.0)
    assert room.tick(29.9) == []
    assert room.tick(30.0) == [ReleaseBlocks()]
    assert room.outcome is HandoffOutcome.EXPIRED


def test_a_dropped_lease_is_freed_at_once() -> None:
    room = prefill(leg=False, kv=True)
    assert room.on_peer_dropped() == [ReleaseBlocks()]
    assert room.is_over


def test_a_prefill_leg_without_a_partner_ends_in_time() -> None:
    room = prefill(kv=True)
    assert room.tick(9.9) == []
    release, end = room.tick(10.0)
    assert release == ReleaseBlocks()
    assert failing(NO_PARTNER)(end)
    assert room.outcome is HandoffOutcome.TIMED_OUT


def test_a_pull_without_a_prefill_leg_fails_in_time() -> None:
    room = prefill(leg=False, pull=True)
    assert room.tick(9.9) == []
    assert room.tick(10.0) == [Send(Fail(NO_PARTNER)), CloseConnection()]
    assert room.outcome is HandoffOutcome.TIMED_OUT


def test_prefill_sends_pings_while_the_prompt_waits() -> None:
    room = prefill(pull=True)
    counts = [action for tenth in range(600) for action in room.tick(tenth / 10)]
    assert counts == [Send(Signal.PING)] * 23
    assert not room.is_over


def test_a_transfer_does_not_time_out_while_it_progresses() -> None:
    room = prefill(pull=True, kv=True)
    for now in range(0, 100, 9):
        room.extend_deadline(float(now), 0.0)
        assert all(action == Send(Signal.PING) for action in room.tick(now + 8.0))
    end, stop, hangup = room.tick(110.0)
    assert failing(PEER_LOST)(end)
    assert (stop, hangup) == (StopWriting(), CloseConnection())
    assert room.on_writing_stopped() == [ReleaseBlocks()]


def test_a_decode_worker_that_does_not_acknowledge_times_out() -> None:
    room = prefill(pull=True, kv=True)
    room.on_done_sent(1.0)
    assert kinds(room.tick(11.0)) == [ReleaseBlocks, EndLeg, CloseConnection]
    assert room.outcome is HandoffOutcome.TIMED_OUT


def test_an_aborted_prefill_keeps_its_blocks_until_reading_has_stopped() -> None:
    room = prefill(pull=True, kv=True)
    assert room.abort() == [StopWriting()]
    assert room.is_aborting
    assert room.on_writing_stopped() == [ReleaseBlocks(), Send(Signal.ABORTED), CloseConnection()]
    assert (room.is_over, room.outcome) == (True, HandoffOutcome.ABORTED)


@pytest.mark.parametrize(
    ("pull", "kv", "expected"),
    [
        (False, False, []),
        (False, True, [ReleaseBlocks()]),
        (True, False, [Send(Fail(PEER_ABORTED)), CloseConnection()]),
    ],
)
def test_an_aborted_prefill_that_does_not_write_ends_at_once(
    pull: bool, kv: bool, expected: list[Action]
) -> None:
    room = prefill(pull=pull, kv=kv)
    assert room.abort() == expected
    assert room.is_over


def test_an_abort_by_decode_ends_the_prefill_leg_at_once_and_writing_before_the_reply() -> None:
    room = prefill(pull=True, kv=True)
    end, stop = room.receive(1.0, Signal.ABORT)
    assert failing(PEER_ABORTED)(end)
    assert stop == StopWriting()
    assert room.receive(1.0, Signal.ABORT) == []
    assert room.on_writing_stopped() == [ReleaseBlocks(), Send(Signal.ABORTED), CloseConnection()]


@pytest.mark.parametrize("kv", [False, True])
def test_a_prefill_leg_without_its_peer_keeps_no_blocks(kv: bool) -> None:
    room = prefill(pull=True, kv=kv)
    actions = [*room.on_connection_lost(), *room.on_writing_stopped()]
    assert sum(map(failing(PEER_LOST), actions)) == 1
    assert kinds(actions).count(ReleaseBlocks) == kv
    assert room.is_over


def test_mismatched_prompts_end_the_prefill_leg() -> None:
    room = prefill()
    assert failing(MISMATCH)(room.reject(MISMATCH)[0])
    assert room.is_over


def test_an_unexpected_message_of_decode_counts_as_a_lost_connection() -> None:
    room = prefill(pull=True)
    assert failing(PEER_LOST)(room.receive(0.0, Signal.RECEIVED)[0])
    assert room.is_over


def test_writing_that_stops_unrequested_ends_the_room() -> None:
    room = prefill(pull=True, kv=True)
    actions = room.on_writing_stopped()
    assert kinds(actions).count(ReleaseBlocks) == 1
    assert room.is_over


# Decode.


def test_decode_dials_pulls_and_continues_with_the_first_token() -> None:
    room = decode(placed=False, pulled=False)
    assert room.start_pull() == [Dial()]
    assert room.on_connected(PULL) == [Send(PULL)]
    for message in (Signal.JOINED, Write([5], [1]), Signal.PING):
        assert room.receive(1.0, message) == []
    assert room.receive(2.0, DONE) == [
        Send(Signal.RECEIVED),
        ReleaseBlocks(),
        KvArrived(DONE),
        CloseConnection(),
    ]
    assert (room.is_over, room.outcome) == (True, HandoffOutcome.HANDED_OVER)


def test_a_decode_leg_waits_while_its_partner_sends_pings() -> None:
    room = decode()
    for now in range(0, 100, 9):
        assert room.tick(float(now)) == []
        room.receive(float(now), Signal.PING)
    end, abort = room.tick(109.0)
    assert failing(NO_PARTNER)(end)
    assert abort == Send(Signal.ABORT)
    assert room.is_aborting


def test_a_decode_leg_that_never_pulls_ends_in_time() -> None:
    room = decode(placed=True, pulled=False)
    assert room.tick(9.9) == []
    end, *rest = room.tick(10.0)
    assert failing(NO_PARTNER)(end)
    assert kinds(rest) == [CloseConnection, ReleaseBlocks, SendDrop]
    assert room.outcome is HandoffOutcome.TIMED_OUT


def test_a_decode_leg_without_blocks_fails_before_its_partner_times_out() -> None:
    """Otherwise prefill would be excluded, and the retry would use the same full worker."""
    room = decode(placed=False, pulled=False)
    assert room.tick(7.4) == []
    end, drop = room.tick(7.5)
    assert isinstance(end, EndLeg)
    assert isinstance(end.error, Overloaded)
    assert (end.error.retryable, end.error.reason) == (True, NO_BLOCKS)
    assert end.error.retry_after_s == 10.0
    assert drop == SendDrop()
    assert room.outcome is HandoffOutcome.TIMED_OUT


def test_late_blocks_leave_prefill_the_rest_of_its_time() -> None:
    room = decode(placed=False, pulled=False)
    room.tick(7.4)
    room.start_pull()
    assert room.tick(9.9) == []
    assert failing(NO_PARTNER)(room.tick(10.0)[0])


def test_an_aborted_decode_leg_keeps_its_pages_until_prefill_confirms() -> None:
    room = decode()
    assert room.abort(1.0) == [Send(Signal.ABORT)]
    assert room.receive(1.1, Write([5], [1])) == []
    assert room.is_aborting
    assert ReleaseBlocks() in room.receive(1.2, Signal.ABORTED)
    assert (room.is_over, room.outcome) == (True, HandoffOutcome.ABORTED)


@pytest.mark.parametrize("message", [DONE, Fail(PEER_ABORTED), Signal.ABORTED])
def test_each_final_message_of_prefill_frees_the_pages_of_an_aborted_leg_without_another_end(
    message: Message,
) -> None:
    room = decode()
    room.abort(1.0)
    actions = room.receive(1.1, message)
    assert set(kinds(actions)) == {ReleaseBlocks, CloseConnection}
    assert room.is_over


def test_the_connection_of_a_silent_peer_closes_before_its_pages_are_released() -> None:
    room = decode()
    room.abort(1.0)
    room.receive(2.0, Write([5], [1]))
    assert room.tick(2.9) == []
    assert room.tick(3.0) == [CloseConnection(), ReleaseBlocks()]
    assert room.outcome is HandoffOutcome.FORCED


def test_a_decode_leg_that_leaves_before_its_pull_sends_a_drop() -> None:
    assert decode(placed=False, pulled=False).abort(0.0) == [SendDrop()]
    room = decode(pulled=False)
    assert room.abort(0.0) == [CloseConnection(), ReleaseBlocks(), SendDrop()]
    assert room.on_connected(PULL) == [CloseConnection()]


@pytest.mark.parametrize("message", [Fail(EXPIRED), Fail("SOMETHING_NEW")])
def test_the_decode_leg_fails_with_prefills_reason(message: Fail) -> None:
    hangup, release, end = decode().receive(0.0, message)
    assert (hangup, release) == (CloseConnection(), ReleaseBlocks())
    assert failing(message.reason)(end)


def test_a_lost_connection_ends_the_decode_leg() -> None:
    assert failing(PEER_LOST)(decode().on_connection_lost()[-1])
    assert failing(PEER_LOST)(decode(pulled=False).on_connection_lost()[-1])


def test_an_unexpected_message_of_prefill_counts_as_a_lost_connection() -> None:
    assert failing(PEER_LOST)(decode().receive(0.0, PULL)[-1])


def test_an_ended_room_returns_no_actions() -> None:
    room = decode()
    room.receive(0.0, DONE)
    assert [
        room.receive(1.0, DONE),
        room.on_connection_lost(),
        room.abort(1.0),
        room.tick(99.0),
    ] == [[]] * 4
    other = prefill(pull=True, kv=True)
    other.on_done_sent(0.0)
    other.receive(0.0, Signal.RECEIVED)
    assert [
        other.abort(),
        other.on_peer_dropped(),
        other.on_writing_stopped(),
        other.tick(99.0),
    ] == [[]] * 4
    assert other.receive(1.0, Signal.ABORT) == []
    assert other.on_connection_lost() == [CloseConnection()]
    assert (room.outcome, other.outcome) == (HandoffOutcome.HANDED_OVER, HandoffOutcome.HANDED_OVER)


# Both.


class Eager(DecodeMachine):
    """Releases its pages when the leg leaves, although a transfer may still write to them."""

    def abort(self, now: float) -> list[Action]:
        actions = super().abort(now)
        return [*actions, ReleaseBlocks()] if actions == [Send(Signal.ABORT)] else actions


class Pair:
    """Both ends of a room and the wire between them, driven by a random generator; pages are real.

    Released pages are owned and computed by another block at once.
    """

    CHUNKS = 3

    def __init__(self, rng: Random, decode_machine: type[DecodeMachine]) -> None:
        self.rng = rng
        self.now = 0.0
        self.blocks = BlockManager(2 * self.CHUNKS, 4)
        self.decode = decode_machine(LIMITS, 0.0)
        self.prefill: PrefillMachine | None = None
        self.pages: list[int] = []
        self.block_table = self.blocks.admit((), 4 * self.CHUNKS)
        assert self.block_table is not None
        self.is_placed = False
        self.is_legless = rng.random() < 0.2
        self.has_kv = False
        self.written = -1
        self.to_prefill: deque[Message | None] = deque()
        self.to_decode: deque[Message | None] = deque()
        self.counts: Counter[str] = Counter()
        self.left: set[str] = set()

    def room(self) -> PrefillMachine:
        self.prefill = self.prefill or PrefillMachine(LIMITS, self.now)
        return self.prefill

    def do(self, side: str, actions: list[Action]) -> None:
        for action in actions:
            self.act(side, action)

    def act(self, side: str, action: Action) -> None:
        out = self.to_prefill if side == "decode" else self.to_decode
        match action:
            case Send(message):
                out.append(message)
            case CloseConnection():
                out.append(None)
                (self.to_decode if side == "decode" else self.to_prefill).clear()
            case Dial():
                self.counts["dial"] = 1
            case StartWriting():
                self.written = 0
            case StopWriting():
                self.counts["stop"] = 1
            case ReleaseBlocks():
                self.counts[f"{side} release"] += 1
                if side == "decode" and self.counts["decode release"] == 1:
                    self.reuse()
            case KvArrived() | EndLeg():
                assert side not in self.left, "a leg that left gets no end"
                self.counts[f"{side} end"] += 1
                if isinstance(action, KvArrived):
                    assert self.written == self.CHUNKS, "all pages were written before"

    def reuse(self) -> None:
        assert self.block_table is not None
        self.blocks.release(self.block_table)
        again = self.blocks.admit((), 4 * self.CHUNKS)
        assert again is not None
        self.blocks.fill(again, 0, self.CHUNKS)

    def events(self) -> list[Callable[[], None]]:
        """The possible next events."""
        found = [self.pass_time]
        if not self.is_placed and not self.decode.is_over:
            found.append(self.start_pull)
        if self.counts["dial"]:
            found.append(self.connect)
        if self.to_decode:
            found.append(self.receive_at_decode)
        if self.to_prefill:
            found.append(self.receive_at_prefill)
        if not self.is_legless and (self.prefill is None or self.prefill.can_attach_leg):
            found.append(self.attach_leg)
        if self.prefill and self.prefill.has_leg and not self.prefill.is_over and not self.has_kv:
            found.append(self.on_prompt_computed)
        if 0 <= self.written <= self.CHUNKS and not self.counts["sent"]:
            found.append(self.write)
        if self.rng.random() < 0.1:
            found += [self.abort_decode, self.abort_prefill, self.cut]
        return found

    def pass_time(self) -> None:
        self.now += self.rng.choice([0.0, 0.1, 1.0, 5.0])
        self.do("decode", self.decode.tick(self.now))
        if self.prefill:
            self.do("prefill", self.prefill.tick(self.now))

    def start_pull(self) -> None:
        assert self.block_table is not None
        self.is_placed = True
        self.pages = [block.page for block in self.block_table.blocks]
        self.do("decode", self.decode.start_pull())

    def connect(self) -> None:
        self.counts["dial"] = 0
        pages = self.pages
        self.do("decode", self.decode.on_connected(Pull(1, 2, 4 * self.CHUNKS, 4, pages)))

    def receive_at_decode(self) -> None:
        message = self.to_decode.popleft()
        if self.decode.is_over:
            return
        if isinstance(message, Write):
            for page, stamp in zip(message.pages, message.stamps, strict=True):
                self.blocks.write(page, stamp)
        actions = (
            self.decode.on_connection_lost()
            if message is None
            else self.decode.receive(self.now, message)
        )
        self.do("decode", actions)

    def receive_at_prefill(self) -> None:
        message = self.to_prefill.popleft()
        if isinstance(message, Pull):
            self.do("prefill", self.room().attach_peer(self.now, message))
        elif self.prefill is not None and message is None:
            self.do("prefill", self.prefill.on_connection_lost())
        elif self.prefill is not None and message is not None:
            self.do("prefill", self.prefill.receive(self.now, message))

    def attach_leg(self) -> None:
        self.do("prefill", self.room().attach_leg(self.now))

    def on_prompt_computed(self) -> None:
        self.has_kv = True
        assert self.prefill is not None
        self.do("prefill", self.prefill.on_prompt_computed(self.now))

    def write(self) -> None:
        assert self.prefill is not None
        assert not self.counts["prefill release"], "blocks are read only while they are held"
        if self.counts["stop"]:
            self.counts["sent"] = 1
            self.do("prefill", self.prefill.on_writing_stopped())
        elif self.written == self.CHUNKS:
            self.counts["sent"] = 1
            self.to_decode.append(DONE)
            self.prefill.on_done_sent(self.now)
        else:
            self.to_decode.append(Write([self.pages[self.written]], [self.written]))
            self.written += 1
            self.prefill.extend_deadline(self.now, 0.0)

    def abort_decode(self) -> None:
        if not self.counts["decode end"]:
            self.left.add("decode")
            self.do("decode", self.decode.abort(self.now))

    def abort_prefill(self) -> None:
        if self.prefill and self.prefill.has_leg and not self.counts["prefill end"]:
            self.left.add("prefill")
            self.do("prefill", self.prefill.abort())

    def cut(self) -> None:
        """The connection breaks: data in flight is lost, and each end notices."""
        if not self.pages or self.counts["dial"]:
            return
        self.to_decode.clear()
        self.to_prefill.clear()
        self.to_decode.append(None)
        self.to_prefill.append(None)

    def is_over(self) -> bool:
        return self.decode.is_over and (self.prefill is None or self.prefill.is_over)


def play(seed: int, decode_machine: type[DecodeMachine] = DecodeMachine) -> Pair:
    """One random run of a room, to its end."""
    rng = Random(seed)
    pair = Pair(rng, decode_machine)
    for _ in range(400):
        rng.choice(pair.events())()
        if pair.is_over() and not pair.to_decode:
            break
    pair.blocks.take_corrupt_blocks()
    return pair


def test_in_every_order_of_events_both_ends_end_and_no_page_is_overwritten() -> None:
    outcomes: Counter[tuple[HandoffOutcome | None, HandoffOutcome | None]] = Counter()
    for seed in range(2000):
        pair = play(seed)
        counts, prefill_room = pair.counts, pair.prefill
        assert pair.is_over(), f"seed {seed}"
        assert pair.blocks.corrupt_pages == 0, f"seed {seed}"
        assert counts["decode release"] == pair.is_placed, f"seed {seed}"
        assert counts["prefill release"] == pair.has_kv, f"seed {seed}"
        assert counts["decode end"] + ("decode" in pair.left) == 1, f"seed {seed}"
        has_leg = prefill_room is not None and prefill_room.has_leg
        assert counts["prefill end"] <= 1, f"seed {seed}"
        assert counts["prefill end"] or "prefill" in pair.left or not has_leg, f"seed {seed}"
        outcomes[pair.decode.outcome, prefill_room.outcome if prefill_room else None] += 1
    # All branches were reached.
    assert {pair[0] for pair in outcomes} >= set(HandoffOutcome) - {HandoffOutcome.EXPIRED}
    assert outcomes[HandoffOutcome.HANDED_OVER, HandoffOutcome.HANDED_OVER] > 100


def test_pages_released_too_early_are_detected_as_overwritten() -> None:
    assert sum(play(seed, Eager).blocks.corrupt_pages for seed in range(500)) > 10
