"""What a frontend tells its router of a request: what it wants, and how its answer grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.attach import LegSink, Order
from common.errors import MeshError, Unavailable
from common.instances import Instance, Snapshot
from common.preprocessed import (
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingHints,
    TokenIds,
    TokenLogprob,
)
from frontend_svc.core.request import Outcome, Placed, Plan
from frontend_svc.gateway import Gateway
from frontend_svc.router_client import RENEW_S, Key, Query, RouterClient
from kvmesh.router.v1 import router_pb2 as pb
from router_svc.core.fleet import Placement
from router_svc.core.load import BookingKey, LoadBook
from router_svc.router_proto import booking_from_proto
from tests.sim.loop import run_virtually

FRONTEND = 7
WORKER = 50
BLOCKS = 16


class BookKeeper:
    """A router that places everything on one worker, and does with the rest what a router does.

    frames: what it was sent.
    """

    def __init__(self, *, tracks: bool) -> None:
        self.tracks = tracks
        self.charges_prefill = True
        self.book = LoadBook()
        self.session = self.book.open_session(FRONTEND)
        self.frames: list[pb.SessionRequest] = []
        self.cut = asyncio.Event()

    @asynccontextmanager
    async def open(self, router: Instance) -> AsyncIterator[BookKeeper]:
        self.answers: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        yield self

    async def read(self) -> pb.SessionResponse | None:
        return await self.answers.get()

    async def write(self, frame: pb.SessionRequest) -> None:
        copy = pb.SessionRequest()
        copy.CopyFrom(frame)
        self.frames.append(copy)
        now = asyncio.get_running_loop().time()
        response = pb.SessionResponse()
        if frame.HasField("hello"):
            response.hello_ack.track_output_blocks = self.tracks
        for announced in frame.announced:
            booking = booking_from_proto(announced, FRONTEND, "announced")
            self.book.announce(booking, self.session, now)
        for new in frame.news:
            decision = pb.Decision(
                worker=pb.Placement(worker_id=WORKER),
                charged_prefill_tokens=new.query.total_tokens if self.charges_prefill else 0,
                charged_decode_blocks=-(-new.query.total_tokens // BLOCKS),
            )
            response.results.add(id=new.id, decision=decision)
            booked = pb.Booking(
                key=new.key,
                frontend_id=FRONTEND,
                model="m",
                worker=decision.worker,
                prefill_tokens=decision.charged_prefill_tokens,
                decode_blocks=decision.charged_decode_blocks,
                revision=1,
            )
            self.book.book(booking_from_proto(booked, FRONTEND, "b"), self.session, now)
        for done in frame.prefills_done:
            self.book.mark_prefill_done(BookingKey(FRONTEND, done.request_id, done.attempt))
        for output in frame.outputs:
            decay = output.decay_fraction if output.HasField("decay_fraction") else None
            key = BookingKey(FRONTEND, output.key.request_id, output.key.attempt)
            self.book.add_output_blocks(key, output.blocks, decay)
        for freed in frame.frees:
            self.book.free(BookingKey(FRONTEND, freed.request_id, freed.attempt))
        self.answers.put_nowait(response)

    @property
    def blocks(self) -> int:
        """What the worker holds."""
        now = asyncio.get_running_loop().time()
        return self.book.load(Placement(WORKER, 0), now).decode_blocks

    @property
    def outputs(self) -> list[pb.OutputBlocks]:
        return [output for frame in self.frames for output in frame.outputs]


class OneWorker:
    """Keeps the sinks of its orders, to be fed by hand."""

    def __init__(self) -> None:
        self.sinks: list[LegSink] = []
        self.open_slots: dict[int, int] = {}

    def submit(self, worker_id: int, address: str, order: Order, sink: LegSink) -> OneWorker:
        self.sinks.append(sink)
        sink.accepted()
        return self

    def abort(self, reason: str) -> None: ...

    def left_alone(self, pool: Iterable[int]) -> frozenset[int]:
        return frozenset()


class Silent:
    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...


class Bed:
    """A gateway, its router client, a router's book and a worker, joined."""

    def __init__(self, tracks: bool) -> None:
        self.router = BookKeeper(tracks=tracks)
        self.workers = OneWorker()
        self.client = RouterClient(
            FRONTEND,
            lambda: [Instance(1, "n", "router", "", "a:1")],
            lambda query: Unavailable("no router"),
            open_session=self.router.open,
        )
        worker = Instance(WORKER, "n", "worker", "", "a:2", model="m")
        self.gateway = Gateway(self.client, self.workers, lambda: Snapshot(1, {WORKER: worker}))

    async def open(
        self, name: str = "r", prompt: int = 32, *, query: Query | None = None, **parts: Any
    ) -> None:
        now = asyncio.get_running_loop().time()
        request = PreprocessedRequest(token_ids=TokenIds.of(list(range(prompt))), **parts)
        asked = query or Query("m", prompt, now, block_size=BLOCKS, routing=request.routing)
        self.ticket = self.gateway.open(Plan(name, request, now + 1e6), asked, Silent())
        await asyncio.sleep(0.1)

    async def generate(self, count: int) -> None:
        self.workers.sinks[-1].tokens([1] * count, ())
        await asyncio.sleep(0.1)


def play(script: Callable[[Bed], Coroutine[Any, Any, None]], *, tracks: bool = True) -> None:
    async def main() -> None:
        bed = Bed(tracks)
        task = asyncio.get_running_loop().create_task(bed.client.run())
        try:
            await asyncio.sleep(0.1)
            await script(bed)
        finally:
            task.cancel()
            await asyncio.wait([task])

    run_virtually(main(), until=10_000.0)


def test_a_request_says_to_its_router_what_its_client_said() -> None:
    async def script(bed: Bed) -> None:
        override = RouterConfigOverride(router_temperature=0.5)
        hints = RoutingHints(expected_output_tokens=64, priority_jump=3.0)
        await bed.open(router_config_override=override, routing=hints)
        (query,) = [new.query for frame in bed.router.frames for new in frame.news]
        assert query.config_override.router_temperature == 0.5
        assert query.expected_output_tokens == 64
        assert query.routing.priority_jump == 3.0

    play(script)


def test_a_level_of_priority_goes_with_the_question() -> None:
    async def script(bed: Bed) -> None:
        now = asyncio.get_running_loop().time()
        await bed.open(query=Query("m", 32, now, strict_priority=2))
        (query,) = [new.query for frame in bed.router.frames for new in frame.news]
        assert query.strict_priority == 2

    play(script)


@pytest.mark.row("S1-83")
def test_an_answer_that_grows_weighs_more_and_less_the_nearer_its_end_is() -> None:
    async def script(bed: Bed) -> None:
        await bed.open(routing=RoutingHints(expected_output_tokens=64))
        assert bed.router.blocks == 2
        await bed.generate(1)
        assert bed.router.blocks == 3, "3 blocks at (1 - 1/64)"
        await bed.generate(15)
        assert len(bed.router.outputs) == 1, "no new block, no word"
        await bed.generate(32)
        (_, second) = bed.router.outputs
        assert (second.blocks, second.decay_fraction) == (2, 0.25)
        assert bed.router.blocks == 1, "5 blocks at a quarter"
        bed.ticket.client_gone()
        await asyncio.sleep(0.1)
        assert (bed.router.blocks, len(bed.router.book)) == (0, 0)

    play(script)


def test_without_a_guess_of_the_length_blocks_weigh_what_they_are() -> None:
    async def script(bed: Bed) -> None:
        await bed.open()
        await bed.generate(40)
        (output,) = bed.router.outputs
        assert (output.blocks, output.HasField("decay_fraction")) == (3, False)
        assert bed.router.blocks == 5

    play(script)


def test_a_router_that_does_not_track_output_hears_nothing_of_it() -> None:
    async def script(bed: Bed) -> None:
        await bed.open()
        await bed.generate(100)
        assert bed.router.outputs == []
        assert bed.router.blocks == 2

    play(script, tracks=False)


def test_growth_between_two_frames_is_one_word_and_one_revision() -> None:
    async def script(bed: Bed) -> None:
        await bed.open()
        for _ in range(3):
            bed.workers.sinks[-1].tokens([1] * 16, ())
        await asyncio.sleep(0.1)
        (output,) = bed.router.outputs
        assert output.blocks == 3
        bed.router.answers.put_nowait(None)  # The session ends, and another one is opened.
        await asyncio.sleep(1.0)
        (told,) = bed.router.frames[-1].announced or bed.router.frames[-2].announced
        held = bed.router.book.get(BookingKey(FRONTEND, "r", 0))
        assert held is not None
        assert (told.decode_blocks, told.revision) == (5, held.revision)
        assert bed.router.blocks == 5

    play(script)


def test_what_a_new_router_is_told_is_what_the_old_one_knew() -> None:
    async def script(bed: Bed) -> None:
        await bed.open(routing=RoutingHints(expected_output_tokens=64))
        await bed.generate(48)
        bed.router.book = LoadBook()
        bed.router.session = bed.router.book.open_session(FRONTEND)
        bed.router.answers.put_nowait(None)
        await asyncio.sleep(1.0)
        assert bed.router.blocks == 1, "5 blocks at a quarter"

    play(script)


@pytest.mark.parametrize(("charges", "tokens"), [(True, 32), (False, 0)])
def test_what_is_announced_is_what_was_charged(charges: bool, tokens: int) -> None:
    async def script(bed: Bed) -> None:
        bed.router.charges_prefill = charges
        await bed.open()
        bed.router.answers.put_nowait(None)
        await asyncio.sleep(1.0)
        (told,) = [booking for frame in bed.router.frames for booking in frame.announced]
        assert (told.prefill_tokens, told.decode_blocks, told.revision) == (tokens, 2, 1)

    play(script)


def test_a_booking_is_spoken_of_again_before_a_router_forgets_it() -> None:
    async def script(bed: Bed) -> None:
        await bed.open("a")
        await asyncio.sleep(RENEW_S / 2)
        await bed.open("b")
        for _ in range(20):
            await asyncio.sleep(RENEW_S / 4)
            bed.router.book.expire(asyncio.get_running_loop().time())
        assert len(bed.router.book) == 2
        told = [b.key.request_id for frame in bed.router.frames for b in frame.announced]
        assert told.count("a") >= 4
        assert told.count("b") >= 4
        await bed.generate(16)
        assert bed.router.blocks == 5, "2 + 3"

    play(script)


def test_growth_that_is_announced_is_not_told_a_second_time() -> None:
    async def script(bed: Bed) -> None:
        await bed.open()
        bed.client.output(("r", 0), 1, None)
        await asyncio.sleep(RENEW_S - 0.2)
        for _ in range(60):
            bed.client.output(("r", 0), 1, None)
            await asyncio.sleep(0.01)
        assert bed.router.blocks == 63
        assert any(frame.announced for frame in bed.router.frames)

    play(script)


def test_a_word_about_a_request_that_is_not_placed_is_of_no_effect() -> None:
    async def script(bed: Bed) -> None:
        placed: list[Placed | MeshError] = []
        key: Key = ("r", 0)
        bed.client.output(key, 1, None)
        bed.client.place(key, Query("m", 32, 0.0, block_size=BLOCKS), placed.append)
        bed.client.output(key, 1, None)
        await asyncio.sleep(0.1)
        assert len(placed) == 1
        assert (bed.router.blocks, bed.router.outputs) == (2, [])

    play(script)
