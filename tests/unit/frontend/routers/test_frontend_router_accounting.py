"""What a frontend sends to its router: hints, output blocks, bookings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.errors import MeshError, Unavailable, WorkerLost
from common.kv.hashing import HASH_SCHEME_ID, PrefixHasher, hashes_to_bytes
from common.registry.instances import Instance, Snapshot, SnapshotDiff
from common.request.placement import Decision, Placement
from common.request.preprocessed import (
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingHints,
    SessionControl,
    TokenIds,
    TokenLogprob,
)
from common.request.token_stream import LegRequest, LegSink
from frontend_svc.members import Members
from frontend_svc.request.gateway import Gateway
from frontend_svc.request.placement_request import PlacementKey, PlacementRequest
from frontend_svc.request.types import RequestOutcome, RequestPlan
from frontend_svc.routers.bookings import RENEW_INTERVAL_S
from frontend_svc.routers.client import RouterClient
from kvmesh.router.v1 import router_pb2 as pb
from router_svc.core.booking import BookingKey
from router_svc.core.load_tracker import LoadTracker
from router_svc.proto import booking_from_proto
from tests.kit.placements import placement_request
from tests.sim.loop import run_virtually

FRONTEND = 7
ROUTER = 1
WORKER = 50
BLOCKS = 16


class BookKeeper:
    """A router that places every request on one worker and tracks the load like a real router.

    frames: the received ones.
    """

    def __init__(self, *, tracks: bool) -> None:
        self.tracks = tracks
        self.charges_prefill = True
        self.session_revision = 0  # of its decisions
        self.book = LoadTracker()
        self.session = self.book.open_session(FRONTEND)
        self.frames: list[pb.SessionRequest] = []
        self.cut = asyncio.Event()

    @asynccontextmanager
    async def open(self, router: Instance) -> AsyncIterator[BookKeeper]:
        self.responses: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        yield self

    async def read(self) -> pb.SessionResponse | None:
        return await self.responses.get()

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
        self.responses.put_nowait(response)

    @property
    def blocks(self) -> int:
        """KV blocks booked on the worker."""
        now = asyncio.get_running_loop().time()
        return self.book.load(Placement(WORKER, 0), now).decode_blocks

    @property
    def outputs(self) -> list[pb.OutputBlocks]:
        return [output for frame in self.frames for output in frame.outputs]


class OneWorker:
    """Keeps the sinks of its requests; the test sends the tokens."""

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


class IgnoringSink:
    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None: ...

    def finished(self, outcome: RequestOutcome) -> None: ...


class Harness:
    """A gateway with its router client, a router's load tracker and a worker."""

    def __init__(self, tracks: bool) -> None:
        self.router = BookKeeper(tracks=tracks)
        self.workers = OneWorker()
        self.client = RouterClient(
            FRONTEND, lambda query: Unavailable("no router"), open_session=self.router.open
        )
        router = Instance(ROUTER, "n", "router", "", "a:1")
        self.client.on_snapshot(Snapshot(1, {ROUTER: router}), SnapshotDiff())
        worker = Instance(WORKER, "n", "worker", "", "a:2", model="m")
        self.gateway = Gateway(self.client, self.workers, Members(Snapshot(1, {WORKER: worker})))

    async def open(
        self,
        name: str = "r",
        prompt: int = 32,
        *,
        query: PlacementRequest | None = None,
        **parts: Any,
    ) -> None:
        now = asyncio.get_running_loop().time()
        request = PreprocessedRequest(token_ids=TokenIds.of(list(range(prompt))), **parts)
        query = query or placement_request(
            "m", prompt, now, block_size=BLOCKS, routing=request.routing
        )
        plan = RequestPlan(name, request, now + 1e6)
        self.handle = self.gateway.open(plan, query, IgnoringSink())
        await asyncio.sleep(0.1)

    async def generate(self, count: int) -> None:
        self.workers.sinks[-1].tokens([1] * count, ())
        await asyncio.sleep(0.1)


def play(script: Callable[[Harness], Coroutine[Any, Any, None]], *, tracks: bool = True) -> None:
    async def main() -> None:
        harness = Harness(tracks)
        task = asyncio.get_running_loop().create_task(harness.client.run())
        try:
            await asyncio.sleep(0.1)
            await script(harness)
        finally:
            task.cancel()
            await asyncio.wait([task])

    run_virtually(main(), until=10_000.0)


def test_hints_of_the_client_reach_the_router() -> None:
    async def script(harness: Harness) -> None:
        override = RouterConfigOverride(router_temperature=0.5)
        hints = RoutingHints(expected_output_tokens=64, priority_jump=3.0)
        await harness.open(router_config_override=override, routing=hints)
        (query,) = [new.query for frame in harness.router.frames for new in frame.news]
        assert query.config_override.router_temperature == 0.5
        assert query.expected_output_tokens == 64
        assert query.routing.priority_jump == 3.0

    play(script)


def test_a_strict_priority_reaches_the_router() -> None:
    async def script(harness: Harness) -> None:
        now = asyncio.get_running_loop().time()
        await harness.open(query=placement_request("m", 32, now, strict_priority=2))
        (query,) = [new.query for frame in harness.router.frames for new in frame.news]
        assert query.strict_priority == 2

    play(script)


@pytest.mark.row("S1-83")
def test_output_blocks_add_load_that_decays_toward_the_expected_end() -> None:
    async def script(harness: Harness) -> None:
        await harness.open(routing=RoutingHints(expected_output_tokens=64))
        assert harness.router.blocks == 2
        await harness.generate(1)
        assert harness.router.blocks == 3, "3 blocks at (1 - 1/64)"
        await harness.generate(15)
        assert len(harness.router.outputs) == 1, "no new block, no message"
        await harness.generate(32)
        (_, second) = harness.router.outputs
        assert (second.blocks, second.decay_fraction) == (2, 0.25)
        assert harness.router.blocks == 1, "5 blocks at a quarter"
        harness.handle.abort()
        await asyncio.sleep(0.1)
        assert (harness.router.blocks, len(harness.router.book)) == (0, 0)

    play(script)


def test_without_an_expected_length_output_blocks_count_in_full() -> None:
    async def script(harness: Harness) -> None:
        await harness.open()
        await harness.generate(40)
        (output,) = harness.router.outputs
        assert (output.blocks, output.HasField("decay_fraction")) == (3, False)
        assert harness.router.blocks == 5

    play(script)


def test_after_a_migration_generated_tokens_count_as_prompt() -> None:
    hasher = PrefixHasher(mesh_key=b"", model="m", block_size=BLOCKS)

    async def script(harness: Harness) -> None:
        now = asyncio.get_running_loop().time()
        prompt = TokenIds.of(list(range(40)))
        hints = RoutingHints(expected_output_tokens=400)
        empty = placement_request(
            "m", 0, now, hash_scheme=HASH_SCHEME_ID, block_size=BLOCKS, hasher=hasher, routing=hints
        )
        await harness.open(prompt=40, query=empty.extended(prompt, 40))
        generated: list[int] = []
        for count in (200, 150):
            await harness.generate(count)
            generated += [1] * count
            harness.workers.sinks[-1].lost(WorkerLost("gone", retryable=True))
            await asyncio.sleep(5.0)
            query = [new.query for frame in harness.router.frames for new in frame.news][-1]
            whole = [*prompt, *generated]
            assert query.total_tokens == len(whole)
            assert query.prefix_hashes == hashes_to_bytes(hasher.prefix_hashes(whole))
            assert query.expected_output_tokens == 400 - len(generated)
            held = -(-len(whole) // BLOCKS)
            assert harness.router.blocks == held, "the prompt, before the first token"
        sent = len(harness.router.outputs)
        await harness.generate(25)
        (last,) = harness.router.outputs[sent:]
        assert (last.blocks, last.decay_fraction) == (1, 0.5), "25 of 50 expected tokens are left"

    play(script)


def test_a_prompt_extended_in_steps_has_the_hashes_of_the_whole_prompt() -> None:
    hasher = PrefixHasher(mesh_key=b"", model="m", block_size=4)
    request = placement_request("m", 0, 0.0, block_size=4, hasher=hasher)
    ids: list[int] = []
    for count in (1, 3, 0, 2, 9, 1, 8):
        ids += range(len(ids), len(ids) + count)
        request = request.extended(TokenIds.of(ids), count)
        assert request.query.total_tokens == len(ids)
        assert request.query.prefix_hashes == hashes_to_bytes(hasher.prefix_hashes(ids))


def test_a_router_that_does_not_track_output_receives_none() -> None:
    async def script(harness: Harness) -> None:
        await harness.open()
        await harness.generate(100)
        assert harness.router.outputs == []
        assert harness.router.blocks == 2

    play(script, tracks=False)


def test_output_between_two_frames_is_one_message_and_one_revision() -> None:
    async def script(harness: Harness) -> None:
        await harness.open()
        for _ in range(3):
            harness.workers.sinks[-1].tokens([1] * 16, ())
        await asyncio.sleep(0.1)
        (output,) = harness.router.outputs
        assert output.blocks == 3
        harness.router.responses.put_nowait(None)  # ends the session; the client opens another one
        await asyncio.sleep(1.0)
        (announced,) = harness.router.frames[-1].announced or harness.router.frames[-2].announced
        held = harness.router.book.get(BookingKey(FRONTEND, "r", 0))
        assert held is not None
        assert (announced.decode_blocks, announced.revision) == (5, held.revision)
        assert harness.router.blocks == 5

    play(script)


def test_a_new_router_receives_the_same_load_as_the_old_one() -> None:
    async def script(harness: Harness) -> None:
        await harness.open(routing=RoutingHints(expected_output_tokens=64))
        await harness.generate(48)
        harness.router.book = LoadTracker()
        harness.router.session = harness.router.book.open_session(FRONTEND)
        harness.router.responses.put_nowait(None)
        await asyncio.sleep(1.0)
        assert harness.router.blocks == 1, "5 blocks at a quarter"

    play(script)


@pytest.mark.parametrize(("charges", "tokens"), [(True, 32), (False, 0)])
def test_an_announced_booking_has_the_booked_load(charges: bool, tokens: int) -> None:
    async def script(harness: Harness) -> None:
        harness.router.charges_prefill = charges
        await harness.open()
        harness.router.responses.put_nowait(None)
        await asyncio.sleep(1.0)
        (announced,) = [booking for frame in harness.router.frames for booking in frame.announced]
        assert (announced.prefill_tokens, announced.decode_blocks, announced.revision) == (
            tokens,
            2,
            1,
        )

    play(script)


@pytest.mark.parametrize(("revision", "session"), [(3, "alice"), (0, "")])
def test_an_announced_booking_has_its_session(revision: int, session: str) -> None:
    async def script(harness: Harness) -> None:
        harness.router.session_revision = revision
        alice = RoutingHints(session_control=SessionControl("alice"), lora_name="french")
        await harness.open(routing=alice)
        harness.router.responses.put_nowait(None)
        await asyncio.sleep(1.0)
        (announced,) = [booking for frame in harness.router.frames for booking in frame.announced]
        assert (announced.session_id, announced.session_revision) == (session, revision)
        assert announced.lora_name == ("french" if session else "")

    play(script)


def test_a_booking_is_renewed_before_a_router_expires_it() -> None:
    async def script(harness: Harness) -> None:
        await harness.open("a")
        await asyncio.sleep(RENEW_INTERVAL_S / 2)
        await harness.open("b")
        for _ in range(20):
            await asyncio.sleep(RENEW_INTERVAL_S / 4)
            harness.router.book.expire(asyncio.get_running_loop().time())
        assert len(harness.router.book) == 2
        renewed = [b.key.request_id for frame in harness.router.frames for b in frame.announced]
        assert renewed.count("a") >= 4
        assert renewed.count("b") >= 4
        await harness.generate(16)
        assert harness.router.blocks == 5, "2 + 3"

    play(script)


def test_output_in_a_renewal_is_not_sent_again() -> None:
    async def script(harness: Harness) -> None:
        await harness.open()
        harness.client.output(("r", 0), 1, None)
        await asyncio.sleep(RENEW_INTERVAL_S - 0.2)
        for _ in range(60):
            harness.client.output(("r", 0), 1, None)
            await asyncio.sleep(0.01)
        assert harness.router.blocks == 63
        assert any(frame.announced for frame in harness.router.frames)

    play(script)


def test_output_of_an_unplaced_request_is_ignored() -> None:
    async def script(harness: Harness) -> None:
        placed: list[Decision | MeshError] = []
        key: PlacementKey = ("r", 0)
        harness.client.output(key, 1, None)
        harness.client.place(key, placement_request("m", 32, 0.0, block_size=BLOCKS), placed.append)
        harness.client.output(key, 1, None)
        await asyncio.sleep(0.1)
        assert len(placed) == 1
        assert (harness.router.blocks, harness.router.outputs) == (2, [])

    play(script)
