"""What a frontend tells its router of a request: what it wants, and how its answer grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.errors import MeshError, Unavailable, WorkerLost
from common.kv.hashing import HASH_SCHEME_ID, PrefixHasher, hashes_to_bytes
from common.registry.instances import Instance, Snapshot
from common.request.preprocessed import (
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingHints,
    SessionControl,
    TokenIds,
    TokenLogprob,
)
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.core.peers.placement_query import PlacementKey, Query
from frontend_svc.core.request.types import RequestOutcome, RequestPlan, RoutingDecision
from frontend_svc.peers.held_bookings import RENEW_INTERVAL_S
from frontend_svc.peers.router_client import RouterClient
from frontend_svc.request.gateway import Gateway
from kvmesh.router.v1 import router_pb2 as pb
from router_svc.core.load_tracker import LoadTracker
from router_svc.core.types import BookingKey, Placement
from router_svc.proto import booking_from_proto
from tests.sim.loop import run_virtually

FRONTEND = 7
ROUTER = 1
WORKER = 50
BLOCKS = 16


class BookKeeper:
    """A router that places everything on one worker, and does with the rest what a router does.

    frames: what it was sent.
    """

    def __init__(self, *, tracks: bool) -> None:
        self.tracks = tracks
        self.charges_prefill = True
        self.session_revision = 0  # What its decisions say.
        self.book = LoadTracker()
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
            response.hello_ack.router_id = ROUTER
            response.hello_ack.track_output_blocks = self.tracks
        for announced in frame.announced:
            booking = booking_from_proto(announced, FRONTEND, "announced")
            self.book.reregister(booking, self.session, now)
        for new in frame.news:
            decision = pb.Decision(
                worker=pb.Placement(worker_id=WORKER),
                charged_prefill_tokens=new.query.total_tokens if self.charges_prefill else 0,
                charged_decode_blocks=-(-new.query.total_tokens // BLOCKS),
                session_revision=self.session_revision,
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

    def submit(
        self, worker_id: int, address: str, leg_request: LegRequest, sink: LegSink
    ) -> OneWorker:
        self.sinks.append(sink)
        sink.accepted()
        return self

    def abort(self, reason: str) -> None: ...

    def excluded_workers(self, pool: Iterable[int]) -> frozenset[int]:
        return frozenset()


class Silent:
    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None: ...

    def finished(self, outcome: RequestOutcome) -> None: ...


class Bed:
    """A gateway, its router client, a router's book and a worker, joined."""

    def __init__(self, tracks: bool) -> None:
        self.router = BookKeeper(tracks=tracks)
        self.workers = OneWorker()
        self.client = RouterClient(
            FRONTEND,
            lambda: [Instance(ROUTER, "n", "router", "", "a:1")],
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
        self.handle = self.gateway.open(RequestPlan(name, request, now + 1e6), asked, Silent())
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
        bed.handle.client_gone()
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


def test_what_was_generated_is_prompt_to_whoever_goes_on_with_it() -> None:
    hasher = PrefixHasher(mesh_key=b"", model="m", block_size=BLOCKS)

    async def script(bed: Bed) -> None:
        now = asyncio.get_running_loop().time()
        prompt = TokenIds.of(list(range(40)))
        hints = RoutingHints(expected_output_tokens=400)
        empty = Query(
            "m", 0, now, hash_scheme=HASH_SCHEME_ID, block_size=BLOCKS, hasher=hasher, routing=hints
        )
        await bed.open(prompt=40, query=empty.extended(prompt, 40))
        generated: list[int] = []
        for count in (200, 150):
            await bed.generate(count)
            generated += [1] * count
            bed.workers.sinks[-1].lost(WorkerLost("gone", retryable=True))
            await asyncio.sleep(5.0)
            query = [new.query for frame in bed.router.frames for new in frame.news][-1]
            whole = [*prompt, *generated]
            assert query.total_tokens == len(whole)
            assert query.prefix_hashes == hashes_to_bytes(hasher.prefix_hashes(whole))
            assert query.expected_output_tokens == 400 - len(generated)
            held = -(-len(whole) // BLOCKS)
            assert bed.router.blocks == held, "of its prompt, before the first token"
        told = len(bed.router.outputs)
        await bed.generate(25)
        (last,) = bed.router.outputs[told:]
        assert (last.blocks, last.decay_fraction) == (1, 0.5), "of the 50 that were left"

    play(script)


def test_a_prompt_that_grows_in_small_steps_is_hashed_like_one_that_was_whole() -> None:
    hasher = PrefixHasher(mesh_key=b"", model="m", block_size=4)
    query = Query("m", 0, 0.0, block_size=4, hasher=hasher)
    ids: list[int] = []
    for count in (1, 3, 0, 2, 9, 1, 8):
        ids += range(len(ids), len(ids) + count)
        query = query.extended(TokenIds.of(ids), count)
        assert query.total_tokens == len(ids)
        assert query.prefix_hashes == hashes_to_bytes(hasher.prefix_hashes(ids))


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
        bed.router.book = LoadTracker()
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


@pytest.mark.parametrize(("revision", "session"), [(3, "alice"), (0, "")])
def test_what_is_announced_says_which_session_it_keeps(revision: int, session: str) -> None:
    async def script(bed: Bed) -> None:
        bed.router.session_revision = revision
        alice = RoutingHints(session_control=SessionControl("alice"), lora_name="french")
        await bed.open(routing=alice)
        bed.router.answers.put_nowait(None)
        await asyncio.sleep(1.0)
        (told,) = [booking for frame in bed.router.frames for booking in frame.announced]
        assert (told.session_id, told.session_revision) == (session, revision)
        assert told.lora_name == ("french" if session else "")

    play(script)


def test_a_booking_is_spoken_of_again_before_a_router_forgets_it() -> None:
    async def script(bed: Bed) -> None:
        await bed.open("a")
        await asyncio.sleep(RENEW_INTERVAL_S / 2)
        await bed.open("b")
        for _ in range(20):
            await asyncio.sleep(RENEW_INTERVAL_S / 4)
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
        await asyncio.sleep(RENEW_INTERVAL_S - 0.2)
        for _ in range(60):
            bed.client.output(("r", 0), 1, None)
            await asyncio.sleep(0.01)
        assert bed.router.blocks == 63
        assert any(frame.announced for frame in bed.router.frames)

    play(script)


def test_a_word_about_a_request_that_is_not_placed_is_of_no_effect() -> None:
    async def script(bed: Bed) -> None:
        placed: list[RoutingDecision | MeshError] = []
        key: PlacementKey = ("r", 0)
        bed.client.output(key, 1, None)
        bed.client.place(key, Query("m", 32, 0.0, block_size=BLOCKS), placed.append)
        bed.client.output(key, 1, None)
        await asyncio.sleep(0.1)
        assert len(placed) == 1
        assert (bed.router.blocks, bed.router.outputs) == (2, [])

    play(script)
