"""The links of the KV plane in a simulation, and those between routers.

Handoffs, publications, subscriptions; the real ones are TCP between engines and two gRPC calls to
the indexer. Unlike on a gRPC stream, batches of KV events may also be garbled here: lost,
duplicated and reordered. A batch is lost only if another one follows, since the loss of the last
one could not be detected. Messages between routers may be lost too; digests show that.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from random import Random

from google.protobuf.message import Message

from common.errors import MeshError
from common.registry.instances import Instance
from kvmesh.indexer.v1 import indexer_pb2
from kvmesh.router.v1 import router_pb2
from router_svc.index_replica import Subscribe, Subscription
from router_svc.replication_sync import OpenSync, Stream
from tests.sim.net import Process, SimNetwork, StreamEnd
from worker_svc.engines.sim.messages import FRAME_LENGTH_BYTES, from_bytes, to_frame
from worker_svc.engines.sim.messages import Message as HandoffMessage
from worker_svc.engines.sim.network import Connection
from worker_svc.kv_events.publish_link import OpenCall, PublishCall

# Addresses of the streams of an indexer and of the handoffs of an engine.
PUBLISH = "{}/publish"
SUBSCRIBE = "{}/subscribe"
SYNC = "{}/sync"
KV_HOST = "kv"
# How long a batch is held back for another one to overtake it, in seconds.
_HELD_S = 1.0


def kv_address(host: str, port: int) -> str:
    """The address of the handoffs of a prefill engine."""
    return f"{host}:{port}"


class _HandoffConnection:
    """See Connection."""

    def __init__(self, end: StreamEnd) -> None:
        self.end = end
        self.closed = asyncio.Event()

    def send(self, message: HandoffMessage) -> None:
        self.end.push(to_frame(message))

    async def flushed(self) -> None:
        try:
            await self.end.wait_for_capacity()
        except MeshError as error:
            raise ConnectionResetError(str(error)) from None

    async def receive(self) -> HandoffMessage | None:
        try:
            frame = None if self.closed.is_set() else await self.end.read()
        except MeshError:
            return None
        if frame is None or self.closed.is_set():
            return None
        return from_bytes(frame[FRAME_LENGTH_BYTES:])

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            self.end.finish(None)
            self.end.cut(None)  # wakes a pending receive


class HandoffNetwork:
    """The Network of one engine: its streams live and die with its process.

    refused: addresses that refuse connections for now.
    """

    def __init__(self, net: SimNetwork, process: Process, refused: set[str], rng: Random) -> None:
        self._net = net
        self._process = process
        self._refused = refused
        self._rng = rng
        self._address = ""

    async def listen(
        self, host: str, port: int, on_connection: Callable[[Connection], None]
    ) -> int:
        """See Network; connections are served until they end, whatever the peer does."""
        assert port, "a simulated engine needs a port"

        async def handle(end: StreamEnd) -> None:
            connection = _HandoffConnection(end)
            try:
                on_connection(connection)
                await connection.closed.wait()
            finally:
                connection.close()

        self._address = kv_address(host, port)
        self._net.listen(self._address, self._process, handle, is_cancelled=False)
        return port

    def close(self) -> None:
        """See Network."""
        self._net.close(self._address, self._process)

    async def dial(self, host: str, port: int) -> Connection:
        """See Network."""
        address = kv_address(host, port)
        await asyncio.sleep(self._rng.uniform(0.0, 0.01))
        refused = address in self._refused or not self._net.is_listening(address)
        if refused or not self._process.is_alive:
            raise ConnectionRefusedError(f"no listener at {address}")
        return _HandoffConnection(self._net.dial(self._process, address))


class Garble:
    """Share of batches that are garbled now, 0..1: 0 is a correct network."""

    def __init__(self, rng: Random) -> None:
        self.rate = 0.0
        self.count = 0
        self.rng = rng


class _Garbler:
    """Garbles the batches of one stream. send: puts a frame on the stream if it is still open."""

    def __init__(self, garble: Garble, send: Callable[[bytes], None]) -> None:
        self._garble = garble
        self._send = send
        self._held: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None

    def transform(self, frame: bytes) -> list[bytes]:
        """The frames to send now that this batch has arrived."""
        garble, held = self._garble, self._held
        frames = [frame]
        if held is not None:
            self._clear_held()
            match garble.rng.randrange(3):
                case 0:
                    frames = [frame]  # the previous one is lost
                case 1:
                    frames = [frame, held]
                case _:
                    frames = [held, frame, held]
        elif garble.rate and garble.rng.random() < garble.rate:
            garble.count += 1
            self._held = frame
            self._timer = asyncio.get_running_loop().call_later(_HELD_S, self._release_held)
            frames = []
        return frames

    def _release_held(self) -> None:
        held = self._held
        self._clear_held()
        if held is not None:
            self._send(held)

    def _clear_held(self) -> None:
        self._held = None
        if self._timer is not None:
            self._timer.cancel()


class _PublishCall:
    """See PublishCall."""

    def __init__(self, end: StreamEnd, garble: Garble) -> None:
        self._end = end
        self._garbler = _Garbler(garble, end.push)

    async def write(self, request: indexer_pb2.PublishRequest, /) -> None:
        frame = request.SerializeToString()
        frames = self._garbler.transform(frame) if request.HasField("batch") else [frame]
        for one in frames:
            await self._end.write(one)

    async def done_writing(self) -> None:
        self._end.half_close()

    async def __aiter__(self) -> AsyncIterator[indexer_pb2.PublishResponse]:
        while (message := await self._end.read()) is not None:
            yield indexer_pb2.PublishResponse.FromString(message)


def make_publish_opener(net: SimNetwork, process: Process, garble: Garble) -> OpenCall:
    """How a worker reaches indexers."""

    @asynccontextmanager
    async def open_call(indexer: Instance) -> AsyncIterator[PublishCall]:
        end = net.dial(process, PUBLISH.format(indexer.address))
        try:
            yield _PublishCall(end, garble)
        finally:
            end.finish(None)

    return open_call


class ReadDelay:
    """How long one process takes for each message it reads, in seconds."""

    def __init__(self) -> None:
        self.slow_s = 0.0


class _Subscription:
    """See Subscription. A message with garbled batches is split."""

    def __init__(self, end: StreamEnd, garble: Garble, read_delay: ReadDelay) -> None:
        self._end = end
        self._pace = read_delay
        self._ready: list[bytes] = []
        # By source: each has an order of its own. A released batch is read with the next message.
        self._garblers: dict[int, _Garbler] = defaultdict(
            lambda: _Garbler(garble, self._ready.append)
        )
        self._garble = garble

    async def read(self) -> indexer_pb2.SubscribeResponse | None:
        while not self._ready:
            if self._pace.slow_s:
                await asyncio.sleep(self._pace.slow_s)
            message = await self._end.read()
            if message is None:
                return None
            response = indexer_pb2.SubscribeResponse.FromString(message)
            if not (self._garble.rate or self._garblers):
                return response
            self._ready += self._garbled(response)
        return indexer_pb2.SubscribeResponse.FromString(self._ready.pop(0))

    def _garbled(self, response: indexer_pb2.SubscribeResponse) -> Iterable[bytes]:
        parts = [*response.more]
        del response.more[:]
        for part in (response, *parts):
            frame = part.SerializeToString()
            if part.HasField("batch"):
                yield from self._garblers[part.source.worker_id].transform(frame)
            else:
                yield frame


def make_subscribe_opener(
    net: SimNetwork, process: Process, garble: Garble, read_delay: ReadDelay
) -> Subscribe:
    """How a router reaches indexers. read_delay: of its reads."""

    @asynccontextmanager
    async def subscribe(
        indexer: Instance, request: indexer_pb2.SubscribeRequest
    ) -> AsyncIterator[Subscription]:
        end = net.dial(process, SUBSCRIBE.format(indexer.address))
        try:
            end.push(request.SerializeToString())
            yield _Subscription(end, garble, read_delay)
        finally:
            end.finish(None)

    return subscribe


class _SyncStream:
    """See `router_svc.replication_sync.Stream`. Frames may lose their bookings."""

    def __init__(self, end: StreamEnd, garble: Garble) -> None:
        self._end = end
        self._garble = garble

    async def read(self) -> router_pb2.SyncResponse | None:
        message = await self._end.read()
        return None if message is None else router_pb2.SyncResponse.FromString(message)

    async def write(self, frame: router_pb2.SyncRequest) -> None:
        garble = self._garble
        update_count = len(frame.upserts) + len(frame.removals) + len(frame.released)
        if garble.rate and update_count and garble.rng.random() < garble.rate:
            garble.count += 1
            del frame.upserts[:], frame.removals[:], frame.released[:]
        await self._end.write(frame.SerializeToString())


def make_sync_opener(net: SimNetwork, process: Process, garble: Garble) -> OpenSync:
    """How a router reaches the others."""

    @asynccontextmanager
    async def open_sync(router: Instance) -> AsyncIterator[Stream]:
        end = net.dial(process, SYNC.format(router.address))
        try:
            yield _SyncStream(end, garble)
        finally:
            end.finish(None)

    return open_sync


class StreamContext:
    """The part of a servicer's context that a stream needs."""

    def __init__(self, end: StreamEnd) -> None:
        self._end = end

    async def write(self, message: Message) -> None:
        """Sends a message; returns when the window has capacity."""
        await self._end.write(message.SerializeToString())
