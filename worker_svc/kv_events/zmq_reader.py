"""Reads an engine's KV events: per rank in order and without gaps, for the normalizer.

Each rank publishes numbered batches over ZeroMQ (PUB, loopback) and keeps the last ones for replay
(ROUTER). A subscriber cannot detect when its subscription takes effect, and a publisher drops what
a slow subscriber does not read. Therefore the reader requests a replay after a gap in the numbers,
and of the latest batches whenever the stream is idle. Batches that no replay has are a loss, which
is reported to the sink.

Numbers alone do not identify an engine: its successor starts at 0 again and may have reached the
same number. Therefore every replay starts with the last batch accepted, which must be present and
equal. If it is not, the engine restarted with an empty cache, and the reader starts over. The
reader requests such a replay on each new connection, before it accepts a batch of it. Each
connection has a socket of its own, so that batches of an engine that has ended are discarded with
their socket. Without replay, a batch with number 0 proves that all batches of the engine are known.

A replay may have holes, or lack its last batches or its end marker: a ROUTER drops what it cannot
send at once. The reader requests the rest as long as each replay brings new batches. Only batches
missing at the start of a replay are no longer kept.

The format is SGLang's "dynamo". Only there the hash of a block depends on adapter and salt, so that
hashes alone identify blocks of different adapters, in removals too. Hashes are opaque, signed
64-bit numbers. vLLM's format is supported too: its events may be arrays, its hashes digests of 32
bytes, of which the last eight are used.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from common.kv.events import Tier
from common.streams.backoff import Backoff
from common.streams.peer import keep_connected
from worker_svc.kv_events.external_events import (
    ExternalEvent,
    KvEventSink,
    PagesCleared,
    PagesRemoved,
    PagesStored,
    split_event,
)

# Replaces an engine's identifiers of images among token ids by the tokens of the mesh; None if one
# is unknown.
ToWords = Callable[[Sequence[int]], list[int] | None]
TOPIC: Final = "kv-events"
# Batches that SGLang keeps for replay, and limit of the receive queue; a replay returns the rest.
BUFFERED_BATCHES: Final = 10_000
# Default queue length of a socket, in messages; a replay shorter than this is complete.
SOCKET_QUEUE_MIN: Final = 1_000
# Idle time after which the latest batches are requested.
IDLE_S: Final = 1.0
# Time between two connections.
RECONNECT_INTERVAL_S: Final = 0.1
# After a failure of the reader, which counts as a loss of events.
FAILURE_PAUSE_S: Final = 1.0
# Time without a message after which a replay is abandoned. SGLang serves replay requests between
# batches, at least every 0.1 s.
REPLAY_TIMEOUT_S: Final = 5.0
# Attempts per replay: an engine that exits drops the requests it has not answered.
REPLAY_ATTEMPTS_MAX: Final = 2
# Time slice before the reader yields to the loop; batches that have arrived are read without
# yielding.
YIELD_INTERVAL_S: Final = 0.002
# Pages of an event applied at once: two or three milliseconds of work. With one token per page a
# prompt may have a hundred times as many.
PAGES_PER_PART_MAX: Final = 512

_SEQ_BYTES: Final = 8
_CONNECTION_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
)
_TIERS: Final[Mapping[str | None, Tier]] = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.DISK,
}
# Fields of events that are arrays, after the event's name.
_FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KvEventEndpoints:
    """Ports: rank r publishes at port + r of host and serves replays at replay_port + r of
    replay_host.

    replay_port None: the engine keeps no batches, so every missing batch is a loss.
    topic: the prefix of the topics that are read.
    """

    port: int
    replay_port: int | None
    topic: str = TOPIC
    host: str = "127.0.0.1"
    replay_host: str = "127.0.0.1"

    @classmethod
    def of_addresses(cls, events: str, replay: str | None) -> KvEventEndpoints:
        """Returns the endpoints of a server that runs already, of any topic: tcp://HOST:PORT of
        rank 0. Raises ValueError for another form."""
        host, port = _parse_tcp_address(events)
        replay_host, replay_port = (host, None) if replay is None else _parse_tcp_address(replay)
        return cls(port, replay_port, "", host, replay_host)

    def address(self, rank: int) -> str:
        """Returns where a rank publishes."""
        return _tcp_address(self.port + rank, self.host)

    def replay_address(self, rank: int) -> str | None:
        """Returns where a rank serves replays; None if it serves none."""
        if self.replay_port is None:
            return None
        return _tcp_address(self.replay_port + rank, self.replay_host)

    def config(self) -> str:
        """Returns SGLang's `kv_events_config`. Requires a replay_port."""
        assert self.replay_port is not None, "SGLang keeps batches"
        return json.dumps(
            {
                "publisher": "zmq",
                "format": "dynamo",
                "topic": TOPIC,
                "bind": True,
                "endpoint": _tcp_address(self.port),
                "replay_endpoint": _tcp_address(self.replay_port),
                "buffer_steps": BUFFERED_BATCHES,
            }
        )


def _tcp_address(port: int, host: str = "127.0.0.1") -> str:
    return f"tcp://{host}:{port}"


def _parse_tcp_address(address: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    if not (address.startswith("tcp://") and colon and host and port.isdecimal()):
        raise ValueError(f"{address!r} is not tcp://HOST:PORT")
    return host, int(port)


class _Reconnect(Exception):
    """The connection ended, or is not one to the engine that runs now."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """A live connection to one engine. ended: done when the connection has ended."""

    context: zmq.asyncio.Context
    subscriber: zmq.asyncio.Socket
    ended: asyncio.Future[Any]

    async def receive(self, source: zmq.asyncio.Socket, timeout_s: float) -> list[bytes]:
        """Returns the next message of `source`. Raises TimeoutError, and _Reconnect."""
        if self.ended.done():
            raise _Reconnect
        receiving = asyncio.ensure_future(source.recv_multipart())
        if not receiving.done():
            futures = (receiving, self.ended)
            await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if receiving.done():
            return receiving.result()
        receiving.cancel()
        if self.ended.done():
            raise _Reconnect
        raise TimeoutError


class KvEventReader:
    """Follows the events of one rank.

    counts: batches, replayed (of them), gaps, losses, malformed, resets; cut and unanswered
    replays.
    """

    def __init__(
        self,
        rank: int,
        endpoints: KvEventEndpoints,
        sink: KvEventSink,
        to_words: ToWords | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._rank = rank
        self._endpoint = endpoints.address(rank)
        self._replay_endpoint = endpoints.replay_address(rank)
        self._topic = endpoints.topic.encode()
        self._sink = sink
        self._to_words = to_words
        self._next_seq = 0
        # The last accepted batch; identifies the engine.
        self._last_payload = b""
        # Whether a loss was reported since the engine's start.
        self._has_lost = False
        self._now = asyncio.get_running_loop().time
        self._slice_started_at = self._now()
        self._decode = msgspec.msgpack.Decoder().decode
        self._backoff = Backoff(FAILURE_PAUSE_S, FAILURE_PAUSE_S, None)

    async def run(self) -> None:
        """Reads until cancelled; a failure counts as a loss, after which it starts over."""
        with zmq.asyncio.Context() as context:
            await keep_connected(partial(self._connect, context), self._backoff, self._on_failure)

    def _on_failure(self, error: Exception, _: float) -> None:
        log.exception("kv_reader_failed", dp_rank=self._rank, next=self._next_seq)
        self._report_loss(f"reading failed: {error!r}")

    async def _connect(self, context: zmq.asyncio.Context) -> bool:
        with suppress(_Reconnect):
            await self._read_connection(context)
        await asyncio.sleep(RECONNECT_INTERVAL_S)
        return True

    async def _read_connection(self, context: zmq.asyncio.Context) -> None:
        """Reads one connection until it ends. Batches that still wait then are discarded."""
        with (
            context.socket(zmq.SUB) as subscriber,
            subscriber.get_monitor_socket(_CONNECTION_EVENTS) as monitor,
        ):
            subscriber.set(zmq.LINGER, 0)
            subscriber.set(zmq.RCVHWM, BUFFERED_BATCHES)
            # Otherwise batches of the next engine would follow those of this one.
            subscriber.set(zmq.RECONNECT_IVL, -1)
            subscriber.subscribe(self._topic)
            subscriber.connect(self._endpoint)
            ended = None
            try:
                first_event = parse_monitor_message(await monitor.recv_multipart())
                if first_event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    ended = asyncio.ensure_future(monitor.poll())
                    await self._follow(_Connection(context, subscriber, ended))
            finally:
                if ended is not None:
                    ended.cancel()
                subscriber.disable_monitor()

    async def _follow(self, connection: _Connection) -> NoReturn:
        """Accepts batches. Raises _Reconnect."""
        if not await self._repair_gap(connection, REPLAY_ATTEMPTS_MAX) and self._next_seq:
            self._report_loss("reconnected; cannot verify that the engine is the same")
            self._next_seq = 0
        while True:
            try:
                _, number, payload = await connection.receive(connection.subscriber, IDLE_S)
            except TimeoutError:
                await self._repair_gap(connection, 1)
                continue
            seq = int.from_bytes(number, "big")
            if seq > self._next_seq:
                self.counts["gaps"] += 1
                await self._repair_gap(connection, REPLAY_ATTEMPTS_MAX)
            await self._accept(seq, payload)

    async def _repair_gap(self, connection: _Connection, attempts_left: int) -> bool:
        """Replays from the next batch on. Returns False if the engine does not respond.

        Raises _Reconnect if the engine is another one.
        """
        if self._replay_endpoint is None:
            return False
        while attempts_left:
            next_at_start = self._next_seq
            try:
                if await self._request_replay(connection, self._replay_endpoint):
                    return True
                self.counts["cut"] += 1
            except TimeoutError:
                self.counts["unanswered"] += 1
                log.warning("kv_replay_timed_out", dp_rank=self._rank, next=self._next_seq)
                attempts_left -= self._next_seq == next_at_start
        return False

    async def _request_replay(self, connection: _Connection, endpoint: str) -> bool:
        """Requests one replay, from the last accepted batch on.

        Returns whether it is complete; otherwise new batches were accepted. Batches of another
        engine are not accepted. Raises TimeoutError, and _Reconnect if the engine is another one.
        """
        next_at_request = self._next_seq
        is_verified = next_at_request == 0
        # A new socket per replay: late messages of an abandoned replay must not end the next one.
        with connection.context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVHWM, BUFFERED_BATCHES)
            dealer.connect(endpoint)
            first = max(0, next_at_request - 1)
            await dealer.send_multipart([b"", first.to_bytes(_SEQ_BYTES, "big")])
            while True:
                *_, number, payload = await connection.receive(dealer, REPLAY_TIMEOUT_S)
                seq = int.from_bytes(number, "big", signed=True)
                is_other_engine = seq < 0 or (seq == first and payload != self._last_payload)
                if not is_verified and is_other_engine:
                    self._reset()
                    raise _Reconnect
                if seq < 0:
                    return self._next_seq - first < SOCKET_QUEUE_MIN
                if not is_verified:
                    is_verified = True
                    if seq > first:
                        # The last batch left the ring, so nothing identifies the engine.
                        self._report_loss(f"batches from {first} on are no longer kept")
                        self._next_seq = seq
                if seq > self._next_seq > next_at_request:
                    return False
                self.counts["replayed"] += seq >= self._next_seq
                await self._accept(seq, payload)

    async def _yield_if_due(self) -> None:
        """Yields to the event loop once YIELD_INTERVAL_S has passed since the last yield."""
        if self._now() - self._slice_started_at > YIELD_INTERVAL_S:
            await asyncio.sleep(0)
            self._slice_started_at = self._now()

    def _reset(self) -> None:
        log.warning("kv_engine_restarted", dp_rank=self._rank, next_at_request=self._next_seq)
        self.counts["resets"] += 1
        self._next_seq, self._last_payload = 0, b""
        self._has_lost = False
        self._sink.reset(self._rank)

    async def _accept(self, seq: int, payload: bytes) -> None:
        await self._yield_if_due()
        if seq < self._next_seq:
            return
        if seq == 0 and self._has_lost:
            # The first batch of an engine: its cache was empty before.
            self._reset()
        if seq > self._next_seq:
            self._report_loss(f"batches {self._next_seq} to {seq - 1} are no longer kept")
        self._next_seq, self._last_payload = seq + 1, payload
        self.counts["batches"] += 1
        try:
            batch = self._decode(payload)
            raw_events = batch["events"] if isinstance(batch, Mapping) else batch[1]
            events = list(parse_events(raw_events, self._rank, self._to_words))
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, OverflowError) as error:
            self.counts["malformed"] += 1
            self._report_loss(f"batch {seq} is malformed: {error!r}")
            return
        for event in events:
            for part in split_event(event, PAGES_PER_PART_MAX):
                self._sink.take([part])
                await self._yield_if_due()

    def _report_loss(self, reason: str) -> None:
        self.counts["losses"] += 1
        self._has_lost = True
        self._sink.record_loss(self._rank, reason)


# Any: unpacked events of an engine.
def parse_events(
    events: Sequence[Any], rank: int, to_words: ToWords | None = None
) -> Iterator[ExternalEvent]:
    """Yields the events of a batch. to_words: None if the engine takes no images.

    Raises LookupError, TypeError or ValueError if malformed.
    """
    for raw_event in events:
        event = raw_event
        if not isinstance(raw_event, Mapping):
            event_type, *values = raw_event
            # Omitted trailing fields have their defaults; unknown trailing fields are ignored.
            event = {"type": event_type, **dict(zip(_FIELDS[event_type], values, strict=False))}
        match event["type"]:
            case "BlockStored":
                token_ids = event["token_ids"]
                words = token_ids if to_words is None else to_words(token_ids)
                yield PagesStored(
                    _hashes(event["block_hashes"]),
                    _hash(event["parent_block_hash"]),
                    np.asarray([0] * len(token_ids) if words is None else words, "<u4").tobytes(),
                    event["block_size"],
                    tier=_TIERS[event.get("medium")],
                    rank=rank,
                    lora=_read_lora(event),
                    salt=None if words is None else _read_salt(event),
                )
            case "BlockRemoved":
                yield PagesRemoved(
                    _hashes(event["block_hashes"]), tier=_TIERS[event.get("medium")], rank=rank
                )
            case "AllBlocksCleared":
                yield PagesCleared(rank)
            case other:
                raise ValueError(f"unknown event {other!r}")


def _hash(value: int | bytes | None) -> int | None:
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value


def _hashes(values: Sequence[int | bytes]) -> Sequence[int]:
    return [int.from_bytes(v[-8:], "big") if isinstance(v, bytes) else v for v in values]


def _read_lora(event: Mapping[str, Any]) -> str | None:
    """Returns the adapter's name, "" for none; None if the event does not name it."""
    name: str | None = event.get("lora_name")
    if not name and event.get("lora_id") is not None:
        return None
    return name or ""


def _read_salt(event: Mapping[str, Any]) -> str | None:
    """Returns the salt, "" for none; None if blocks depend on unreadable keys (images, salts). The
    adapter is one of vLLM's keys."""
    adapter = [event.get("lora_name")]
    if any(keys and list(keys) != adapter for keys in event.get("extra_keys") or ()):
        return None
    salt: str | None = event.get("cache_salt")
    return salt or ""
