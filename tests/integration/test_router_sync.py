"""Replication of bookings over real gRPC sockets, with the memory registry."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

import router_svc.app
from common.errors import Conflict, InvalidRequest, MeshError
from common.registry.instances import Instance, KvIndex
from common.registry.registry import MemoryRegistry, MemoryStore, Watch
from common.rpc import channel as rpc
from common.rpc.status import mesh_error_from_rpc
from common.streams.silence import SYNC
from kvmesh.router.v1 import router_pb2 as pb
from kvmesh.router.v1 import router_pb2_grpc
from router_svc.core.booking import BookingKey
from router_svc.core.load_tracker import ORPHAN_S
from router_svc.core.replication import Replica
from tests.kit.local_router import FRONTEND, NS, LocalRouter, key, local_router, new
from tests.kit.waiting import WAIT_S, until


class Bed:
    """Routers of one registry, and workers to decide among."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.store = MemoryStore()
        self.registry = MemoryRegistry(self.store)

    async def node(
        self, *, registered: bool = True, watched: MemoryRegistry | None = None, **settings: Any
    ) -> LocalRouter:
        return await self.stack.enter_async_context(
            local_router(watched, store=self.store, registered=registered, **settings)
        )

    async def nodes(self, count: int) -> list[LocalRouter]:
        """Routers with streams to all the others."""
        nodes = [await self.node() for _ in range(count)]
        await until(lambda: all(peers(n) == count - 1 for n in nodes), "all routers are connected")
        return nodes


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    async with AsyncExitStack() as stack:
        bed = Bed(stack)
        stack.push_async_callback(bed.registry.close)
        for worker_id in (1, 2):
            await bed.registry.register(
                Instance(worker_id, NS, "worker", "", f"w:{worker_id}", model="m", block_size=16)
            )
        yield bed


def peers(node: LocalRouter) -> int:
    return len(node.app.peers.replica.peers)


def orphans(node: LocalRouter) -> int:
    return node.router.load_tracker.orphan_count


def owned(node: LocalRouter) -> list[BookingKey]:
    """Keys of the bookings that it sends to peers."""
    load_tracker = node.router.load_tracker
    return [booking.key for booking in load_tracker if load_tracker.get_own(booking.key)]


async def dump(node: LocalRouter) -> dict[str, pb.Booking]:
    response: pb.DumpResponse = await node.unary("Dump", pb.DumpRequest())
    return {booking.key.request_id: booking for booking in response.bookings}


async def agree(nodes: list[LocalRouter], count: int) -> dict[str, pb.Booking]:
    """The bookings of all routers, once they are equal and that many."""
    dumps: list[dict[str, pb.Booking]] = []

    async def is_equal() -> bool:
        dumps[:] = [await dump(node) for node in nodes]
        return all(dump == dumps[0] for dump in dumps) and len(dumps[0]) == count

    await until(is_equal, f"all routers have the same {count} bookings")
    return dumps[0]


@pytest.mark.row("S1-04", "S1-05")
async def test_a_booking_of_one_router_counts_at_all_until_its_end(bed: Bed) -> None:
    nodes = await bed.nodes(3)
    async with nodes[0].session() as first, nodes[1].session() as second:
        for number in range(3):
            await first.place(number)
        for number in range(3, 5):
            await second.place(number)
        booked = await agree(nodes, 5)
        assert {b.prefill_tokens for b in booked.values()} == {100}
        await first.send(prefills_done=[key(0)], outputs=[pb.OutputBlocks(key=key(1), blocks=2)])
        await first.send(frees=[key(2)])
        booked = await agree(nodes, 4)
        assert booked["r0"].prefill_tokens == 0
        assert (booked["r1"].decode_blocks, booked["r1"].revision) == (9, 2)
        assert all(orphans(node) == 0 for node in nodes)
        await first.send(frees=[key(0), key(1)])
        await second.send(frees=[key(3), key(4)])
        await agree(nodes, 0)


async def test_decisions_carry_the_addresses_of_their_workers(bed: Bed) -> None:
    node = await bed.node()
    async with node.session() as session:
        decision = (await session.place(0)).decision
    assert decision.worker_address == f"w:{decision.worker.worker_id}"
    assert decision.prefill_address == ""


async def test_bookings_of_a_dead_router_count_until_reregistered_or_for_three_seconds(
    bed: Bed,
) -> None:
    dying, *rest = await bed.nodes(3)
    async with dying.session() as session:
        for number in range(3):
            await session.place(number)
        held = await agree(rest, 3)
        await dying.die()
    await until(lambda: all(orphans(n) == 3 for n in rest), "they are orphans at all routers")
    assert await agree(rest, 3) == held
    async with rest[0].session(FRONTEND, held["r0"], held["r1"]):
        await until(lambda: all(orphans(n) == 1 for n in rest), "two were adopted at all routers")
        for node in rest:
            node.clock.now += ORPHAN_S
        assert (await agree(rest, 2)).keys() == {"r0", "r1"}
        assert all(orphans(node) == 0 for node in rest)


async def test_bookings_of_a_frontend_that_moves_are_not_counted_twice(bed: Bed) -> None:
    old, new = await bed.nodes(2)
    async with old.session() as session:
        await session.place(0)
        held = await agree([old, new], 1)
    async with new.session(FRONTEND, *held.values()) as session:
        await until(lambda: owned(new), "the new router owns it")
        # The end may arrive at the old router after the beginning has arrived at the new one.
        await until(lambda: not owned(old), "the old router has handed it over")
        assert await agree([old, new], 1) == held
        assert orphans(old) == 0
        await session.send(frees=[key(0)])
        await agree([old, new], 0)


async def test_bookings_of_a_frontend_gone_from_discovery_are_freed_at_all_routers(
    bed: Bed,
) -> None:
    nodes = await bed.nodes(2)
    lease = await bed.registry.register(Instance(FRONTEND, NS, "frontend", "", "f:1"))
    async with nodes[0].session() as session:
        await session.place(0)
        await agree(nodes, 1)
        await lease.close()
    await agree(nodes, 0)


async def test_a_starting_router_has_the_bookings_of_its_peers_before_it_serves(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_svc.app, "STARTUP_TIMEOUT_S", WAIT_S)
    first, second = await bed.nodes(2)
    async with first.session() as one, second.session() as two:
        await one.place(0)
        await two.place(1)
        late = await bed.node(registered=False)
        assert (await dump(late)).keys() == {"r0", "r1"}
        assert orphans(late) == 2, "until the peers discover it and send a full sync"
        await late.app.register()
        await until(lambda: peers(late) == 2 and orphans(late) == 0, "the peers send a full sync")
        await one.send(frees=[key(0)])
        await agree([first, second, late], 1)


@pytest.mark.slow
async def test_a_router_that_starts_after_a_peer_died_counts_its_bookings(
    bed: Bed,
) -> None:
    dying, left = await bed.nodes(2)
    async with dying.session() as session:
        for number in range(3):
            await session.place(number)
        held = await agree([dying, left], 3)
        await dying.die()
    await until(lambda: orphans(left) == 3, "no frontend has registered them again yet")
    # Discovery still shows the dead router: the start waits for it at most STARTUP_TIMEOUT_S.
    late = await bed.node(registered=False)
    assert await agree([late], 3) == held, (
        "no peer has discovered it: the bookings are from the snapshot"
    )
    async with left.session(FRONTEND, *held.values()):
        await until(lambda: not orphans(left), "their frontend moves to the remaining router")
        await late.app.register()
        await until(
            lambda: peers(late) == 1 and not orphans(late),
            "which sends them to the starting router",
        )
        for node in (left, late):
            node.clock.now += ORPHAN_S
        assert await agree([left, late], 3) == held


class _Silent(MemoryRegistry):
    """A registry that does not respond at first."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.is_ready = asyncio.Event()

    @asynccontextmanager
    async def watch(self, namespace: str) -> AsyncGenerator[Watch, None]:
        await self.is_ready.wait()
        async with super().watch(namespace) as watch:
            yield watch


async def test_a_router_that_starts_before_its_registry_fetches_snapshots_later(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_svc.app, "STARTUP_TIMEOUT_S", 0.05)
    first = await bed.node()
    async with first.session() as session:
        await session.place(0)
        registry = _Silent(bed.store)
        late = await bed.node(registered=False, watched=registry)
        assert await dump(late) == {}, "the router serves without peers"
        registry.is_ready.set()
        assert (await agree([late], 1)).keys() == {"r0"}
        assert peers(late) == 0, "no peer has discovered it: the bookings are from the snapshot"


async def test_output_blocks_and_decay_give_the_same_load_at_all_routers(bed: Bed) -> None:
    nodes = await bed.nodes(2)

    async def check_load(blocks: int, load: int) -> pb.Booking:
        """The booking, once all routers have these blocks of it with this load."""
        for node in nodes:

            async def has_blocks(node: LocalRouter = node) -> bool:
                return (await dump(node)).get("r0", pb.Booking()).decode_blocks == blocks

            await until(has_blocks, f"the booking has {blocks} blocks")
            held = (await dump(node))["r0"]
            load_trackers = await node.unary("Dump", pb.DumpRequest())
            weights = {
                w.worker.worker_id: w.load.potential_decode_blocks for w in load_trackers.workers
            }
            assert weights[held.worker.worker_id] == load
        return held

    async with nodes[0].session() as session:
        await session.place(0)
        await agree(nodes, 1)
        await session.send(outputs=[pb.OutputBlocks(key=key(0), blocks=3)])
        await check_load(10, 10)
        await session.send(outputs=[pb.OutputBlocks(key=key(0), blocks=6, decay_fraction=0.5)])
        held = await check_load(16, 8)
        assert (held.revision, held.decay_fraction) == (3, 0.5)
        async with nodes[1].session(FRONTEND, held) as other:
            await until(lambda: owned(nodes[1]), "the other router owns it")
            await other.send(outputs=[pb.OutputBlocks(key=key(0), blocks=4, decay_fraction=0.25)])
            await check_load(20, 5)
        late = await bed.node()
        nodes.append(late)
        await check_load(20, 5)


@pytest.mark.parametrize(("kv_index", "kv_events"), [("approx", True), ("events", False)])
async def test_a_prompt_placed_by_one_router_is_a_hit_at_another(
    bed: Bed, kv_index: KvIndex, kv_events: bool
) -> None:
    await check_prompts_are_shared(bed, kv_index, kv_events=kv_events)


async def test_predicted_entries_of_one_router_count_at_another(bed: Bed) -> None:
    """No worker publishes an event."""
    await check_prompts_are_shared(bed, "events", router_predicted_ttl_secs=60.0)


async def check_prompts_are_shared(bed: Bed, kv_index: KvIndex, **settings: Any) -> None:
    nodes = [await bed.node(recent_miss_weight=0, **settings) for _ in range(2)]
    fields: dict[str, Any] = {"model": "a", "block_size": 16, "kv_index": kv_index}
    await nodes[0].add(*(Instance(n, NS, "worker", "", f"w:{n}", **fields) for n in range(10, 18)))
    await nodes[1].sees(*range(10, 18))
    await until(lambda: all(peers(node) == 1 for node in nodes), "the routers are connected")
    query: dict[str, Any] = {
        "model": "a",
        "total_tokens": 100,
        "prefix_hashes": b"".join(n.to_bytes(8, "little") for n in range(1, 7)),
        "hash_scheme": 1,
        "block_size": 16,
    }
    placed = await nodes[0].route(1, **query)
    assert placed.predicted_cached_tokens == 0
    explain = pb.ExplainRequest(query=pb.Query(**query))

    async def explained() -> pb.ExplainResponse | None:
        response: pb.ExplainResponse = await nodes[1].unary("Explain", explain)
        return response if response.decision.overlap_blocks else None

    other = await until(explained, "the other router has the blocks in its index")
    assert other is not None
    assert other.decision.worker == placed.worker
    assert other.decision.predicted_cached_tokens == 96
    holders = [c.worker for c in other.candidates if c.overlap_blocks]
    assert holders == [placed.worker], "the other workers hold nothing"


async def test_a_malformed_prompt_of_a_peer_is_refused_and_the_rest_applied(bed: Bed) -> None:
    node = await bed.node()
    async with _sync_call(node, 900) as call:
        odd = pb.PlacedPrompt(model="m", prefix_hashes=b"odd", hash_scheme=1, block_size=16)
        whole = {"upserts": [_booking(0)], "begins_all": True, "ends_all": True}
        await call.write(_frame(900, 1, prompts=[odd], **whole))
        await until(lambda: peers(node) == 1 and not orphans(node), "the router is a peer")
        assert (await dump(node)).keys() == {"r0"}
        assert node.app.peers.replica.refused == 1


async def test_a_peer_that_does_not_respond_does_not_delay_the_start(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_svc.app, "STARTUP_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = f"127.0.0.1:{hung.getsockname()[1]}"
        await bed.registry.register(Instance(900, NS, "router", "", address))
        async with asyncio.timeout(WAIT_S):
            node = await bed.node()
        assert not node.app.peers.caught_up.is_set()
        async with node.session() as session:
            assert (await session.place(0)).HasField("decision")


class _HungPeer(router_pb2_grpc.RouterServiceServicer):
    """A peer that hangs after it has sent its snapshot."""

    def __init__(self) -> None:
        self.calls = 0

    async def Sync(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        self.calls += 1
        await context.write(pb.SyncResponse(router_id=900, ends_snapshot=True))
        await asyncio.get_running_loop().create_future()


async def test_a_peer_that_hangs_is_dialled_again(bed: Bed) -> None:
    server = rpc.server()
    hung = _HungPeer()  # type: ignore[abstract]  # It serves nothing else.
    router_pb2_grpc.add_RouterServiceServicer_to_server(hung, server)
    port = rpc.bind(server, "127.0.0.1", 0)
    await server.start()
    bed.stack.push_async_callback(server.stop, None)
    await bed.registry.register(Instance(900, NS, "router", "", f"127.0.0.1:{port}"))
    node = await bed.node()

    def is_dialled_again() -> bool:
        node.clock.now += SYNC.limit_s / 100
        return hung.calls >= 2

    await until(is_dialled_again, "the stream is opened again")


async def test_a_silent_peer_is_lost_and_accepted_again(bed: Bed) -> None:
    node = await bed.node()
    async with _sync_call(node, 900) as call:
        await call.write(_frame(900, 1, upserts=[_booking(0)], begins_all=True, ends_all=True))
        await until(lambda: peers(node) == 1 and not orphans(node), "the router is a peer")
        node.clock.now += SYNC.limit_s + 0.1
        await until(lambda: peers(node) == 0, "silence ends the stream")
        assert orphans(node) == 1
        assert "no frame from the peer" in str(await _error_of(call))
    async with _sync_call(node, 900) as call:
        await call.write(_frame(900, 1, upserts=[_booking(0)], begins_all=True, ends_all=True))
        await until(lambda: peers(node) == 1 and not orphans(node), "the router is a peer again")


async def test_a_wrong_digest_causes_a_request_for_a_full_sync(bed: Bed) -> None:
    node = await bed.node()
    async with _sync_call(node, 900) as call:
        await call.write(_frame(900, 1, begins_all=True, ends_all=True))
        assert not (await call.read()).resend
        await call.write(_frame(900, 2, digest=12345))
        response = await call.read()
        assert (response.resend, response.acked_sequence) == (True, 2)
        assert node.metric("sync_resends") == 1
        assert node.metric("peers") == 1


async def test_a_newer_stream_of_a_peer_ends_its_older_one(bed: Bed) -> None:
    node = await bed.node()
    async with _sync_call(node, 900) as older, _sync_call(node, 900) as newer:
        full_sync = {"upserts": [_booking(0)], "begins_all": True, "ends_all": True}
        await older.write(_frame(900, 1, **full_sync))
        await older.read()
        await newer.write(_frame(900, 1, **full_sync))
        await newer.read()
        await older.write(_frame(900, 2))
        assert isinstance(error := await _error_of(older), Conflict)
        assert error.reason == "REPLACED"
        assert peers(node) == 1
        assert orphans(node) == 0


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ([{"router_id": 0, "sequence": 1}], "router_id"),
        ([{"router_id": 900, "sequence": 1}, {"router_id": 901, "sequence": 2}], "router_id"),
        ([{"router_id": 900, "sequence": 0}], "sequence"),
    ],
    ids=["no id", "two ids", "no sequence"],
)
async def test_an_invalid_frame_is_refused_and_its_field_named(
    bed: Bed, frames: list[dict[str, Any]], field: str
) -> None:
    node = await bed.node()
    async with _sync_call(node, 900) as call:
        for frame in frames:
            await call.write(pb.SyncRequest(**frame))
        assert isinstance(error := await _error_of(call), InvalidRequest)
        assert error.field == field
    await until(lambda: peers(node) == 0, "the stream has ended")


async def test_invalid_entries_of_a_peer_do_not_affect_its_stream_or_later_entries(
    bed: Bed,
) -> None:
    node = await bed.node()
    wrong = [pb.Booking(), pb.Booking(frontend_id=1), _booking(9)]
    wrong[-1].revision = 2**64 - 1
    binding = pb.SessionBinding(session_id="s", revision=1, bound_by=key(0), frontend_id=1)
    async with _sync_call(node, 900) as call:
        entries = {"upserts": [*wrong, _booking(0)], "removals": [pb.Booking(frontend_id=1)]}
        await call.write(
            _frame(900, 1, begins_all=True, ends_all=True, bindings=[binding], **entries)
        )
        assert not (await call.read()).resend
        await call.write(_frame(900, 2, upserts=[_booking(1)], digest=12345))
        response = await call.read()
        assert (response.resend, response.acked_sequence) == (False, 2), (
            "the digest of its sender includes the refused entries"
        )
        assert (await dump(node)).keys() == {"r0", "r1"}
        assert node.metric("sync_refused") == 5


async def test_a_router_that_drains_ends_the_streams_of_its_peers(bed: Bed) -> None:
    leaving, staying = await bed.nodes(2)
    async with leaving.session() as session:
        await session.place(0)
        held = await agree([leaving, staying], 1)
        await leaving.app.deregister()
        assert await leaving.app.drain(WAIT_S) == [], "no call was cancelled"
    async with staying.session(FRONTEND, *held.values()):
        await until(lambda: owned(staying), "the frontend moved to the other router")


async def test_routers_replicate_thousands_of_bookings(bed: Bed) -> None:
    nodes = await bed.nodes(2)
    count = 3000
    async with nodes[0].session() as session:
        await session.send(news=[new(n) for n in range(count)])
        await session.results(count)
        await agree(nodes, count)
        await session.send(frees=[key(n) for n in range(count)])
        await agree(nodes, 0)
    replicas: list[Replica] = [node.app.peers.replica for node in nodes]
    assert [(r.resends, r.refused) for r in replicas] == [(0, 0), (0, 0)]


@asynccontextmanager
async def _sync_call(node: LocalRouter, router_id: int) -> AsyncIterator[Any]:
    """A Sync call of a fake peer, after the snapshot."""
    call: Any = node.stub.Sync()
    async with rpc.cancelling(call):
        async with asyncio.timeout(WAIT_S):
            while not (await call.read()).ends_snapshot:
                pass
        yield call


def _frame(router_id: int, sequence: int, **parts: Any) -> pb.SyncRequest:
    return pb.SyncRequest(router_id=router_id, sequence=sequence, **parts)


def _booking(number: int) -> pb.Booking:
    return pb.Booking(
        key=key(number),
        frontend_id=FRONTEND,
        model="m",
        worker=pb.Placement(worker_id=1),
        prefill_tokens=10,
        revision=1,
    )


async def _error_of(call: Any) -> MeshError:
    """The error at the end of a call, after its frames."""
    async with asyncio.timeout(WAIT_S):
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return mesh_error_from_rpc(error)
    raise AssertionError("the call ended without error")
