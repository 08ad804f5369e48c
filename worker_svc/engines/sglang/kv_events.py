"""Reads an engine's KV events: per rank in order and without gaps, for the normalizer.

Each rank publishes numbered batches over ZeroMQ (PUB, loopback) and keeps the last ones for replay
(ROUTER). A subscriber cannot detect when its subscription takes effect, and a publisher drops what
a slow subscriber does not read. Therefore the reader requests a replay after a gap in the numbers,
and of the latest batches whenever the stream is idle. Batches that no replay has are a loss, which
is reported to the sink.

Numbers alone do not identify an engine: its successor starts at 0 again and may have reached the
same number. Therefore every replay starts with the last batch accepted, which must be present and
equal. If it is not, the engine restarted with an empty cache, and the reader starts over. The
reader requests such a replay after each reconnect, before it accepts a batch of the new connection.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final

import msgspec
import numpy as np
import structlog
import zmq
import zmq.asyncio

from common.kv.events import Tier
from worker_svc.kv_events.normalizer import (
    ExternalEvent,
    KvEventSink,
    PagesCleared,
    PagesRemoved,
    PagesStored,
)

TOPIC: Final = "kv-events"
# Batches that SGLang keeps for replay, and limit of the receive queue; a replay returns the rest.
BUFFERED_BATCHES: Final = 10_000
# Default queue length of a socket, in messages; a replay shorter than this is complete.
SOCKET_QUEUE_MIN: Final = 1_000
# Idle time after which the latest batches are requested.
IDLE_S: Final = 1.0
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
PAGES_PER_PART_MAX: Final = 1024

_SEQ_BYTES: Final = 8
_TIERS: Final[Mapping[str | None, Tier]] = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
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
    """Loopback ports: rank r publishes at port + r and serves replays at replay_port + r.

    replay_port None: the engine keeps no batches, so every missing batch is a loss.
    """

    port: int
    replay_port: int | None

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


def _tcp_address(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


class _ReplayResult(Enum):
    COMPLETE = auto()
    TRUNCATED = auto()
    OTHER_ENGINE = auto()


class KvEventReader:
    """Follows the events of one rank.

    counts: batches, replayed (of them), gaps, losses, malformed, resets; cut and unanswered
    replays.
    """

    def __init__(self, rank: int, endpoints: KvEventEndpoints, sink: KvEventSink) -> None:
        self.counts: Counter[str] = Counter()
        self._rank = rank
        self._endpoint = _tcp_address(endpoints.port + rank)
        self._replay_endpoint = (
            None if endpoints.replay_port is None else _tcp_address(endpoints.replay_port + rank)
        )
        self._sink = sink
        self._next_seq = 0
        # The last accepted batch; identifies the engine.
        self._last_payload = b""
        self._now = asyncio.get_running_loop().time
        self._slice_started_at = self._now()
        self._decode = msgspec.msgpack.Decoder().decode

    async def run(self) -> None:
        """Reads until cancelled; a failure counts as a loss, after which it starts over."""
        while True:
            try:
                await self._read()
            except Exception as error:
                log.exception("kv_reader_failed", dp_rank=self._rank, next=self._next_seq)
                self._report_loss(f"reading failed: {error!r}")
            await asyncio.sleep(IDLE_S)

    async def _read(self) -> None:
        with (
            zmq.asyncio.Context() as context,
            context.socket(zmq.SUB) as subscriber,
            subscriber.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED) as monitor,
        ):
            subscriber.set(zmq.LINGER, 0)
            subscriber.set(zmq.RCVHWM, BUFFERED_BATCHES)
            subscriber.connect(self._endpoint)
            subscriber.subscribe(TOPIC.encode())
            try:
                while True:
                    await self._repair_gap(context, 1)
                    await self._read_live_batches(context, subscriber, monitor)
            finally:
                subscriber.disable_monitor()

    async def _read_live_batches(
        self,
        context: zmq.asyncio.Context,
        subscriber: zmq.asyncio.Socket,
        monitor: zmq.asyncio.Socket,
    ) -> None:
        """Accepts batches until the stream is idle."""
        while await subscriber.poll(IDLE_S * 1000):
            _, number, payload = await subscriber.recv_multipart()
            seq = int.from_bytes(number, "big")
            is_new_connection = await _has_reconnected(monitor)
            self.counts["gaps"] += seq > self._next_seq
            if is_new_connection or seq > self._next_seq:
                is_same_engine = await self._repair_gap(context, REPLAY_ATTEMPTS_MAX)
                if is_new_connection and not is_same_engine and self._next_seq:
                    self._report_loss("reconnected; cannot verify that the engine is the same")
                    self._next_seq = seq
            await self._accept(seq, payload)

    async def _repair_gap(self, context: zmq.asyncio.Context, attempts_left: int) -> bool:
        """Replays from the next batch on; from 0 if the engine restarted.

        Returns False if the engine does not respond.
        """
        if self._replay_endpoint is None:
            return False
        while attempts_left:
            next_at_start = self._next_seq
            try:
                match await self._request_replay(context, self._replay_endpoint):
                    case _ReplayResult.COMPLETE:
                        return True
                    case _ReplayResult.OTHER_ENGINE:
                        self._reset()
                    case _ReplayResult.TRUNCATED:
                        self.counts["cut"] += 1
            except TimeoutError:
                self.counts["unanswered"] += 1
                log.warning("kv_replay_timed_out", dp_rank=self._rank, next=self._next_seq)
                attempts_left -= self._next_seq == next_at_start
        return False

    async def _request_replay(self, context: zmq.asyncio.Context, endpoint: str) -> _ReplayResult:
        """Requests one replay, from the last accepted batch on. Raises TimeoutError.

        Batches of another engine are not accepted. TRUNCATED implies that new ones were accepted.
        """
        next_at_request = self._next_seq
        is_verified = next_at_request == 0
        # A new socket per replay: late messages of an abandoned replay must not end the next one.
        with context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVHWM, BUFFERED_BATCHES)
            dealer.connect(endpoint)
            first = max(0, next_at_request - 1)
            await dealer.send_multipart([b"", first.to_bytes(_SEQ_BYTES, "big")])
            while True:
                async with asyncio.timeout(REPLAY_TIMEOUT_S):
                    *_, number, payload = await dealer.recv_multipart()
                seq = int.from_bytes(number, "big", signed=True)
                if seq < 0:
                    if not is_verified:
                        return _ReplayResult.OTHER_ENGINE
                    is_short = self._next_seq - first < SOCKET_QUEUE_MIN
                    return _ReplayResult.COMPLETE if is_short else _ReplayResult.TRUNCATED
                if not is_verified:
                    if seq == first and payload != self._last_payload:
                        return _ReplayResult.OTHER_ENGINE
                    is_verified = True
                    if seq > first:
                        # The last batch left the ring, so nothing identifies the engine.
                        self._report_loss(f"batches from {first} on are no longer kept")
                        self._next_seq = seq
                if seq > self._next_seq > next_at_request:
                    return _ReplayResult.TRUNCATED
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
        self._sink.reset(self._rank)

    async def _accept(self, seq: int, payload: bytes) -> None:
        await self._yield_if_due()
        if seq < self._next_seq:
            return
        if seq > self._next_seq:
            self._report_loss(f"batches {self._next_seq} to {seq - 1} are no longer kept")
        self._next_seq, self._last_payload = seq + 1, payload
        self.counts["batches"] += 1
        try:
            events = list(parse_events(self._decode(payload)[1], self._rank))
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, OverflowError) as error:
            self.counts["malformed"] += 1
            self._report_loss(f"batch {seq} is malformed: {error!r}")
            return
        for event in events:
            for part in _split_event(event):
                self._sink.take([part])
                await self._yield_if_due()

    def _report_loss(self, reason: str) -> None:
        self.counts["losses"] += 1
        self._sink.record_loss(self._rank, reason)


async def _has_reconnected(monitor: zmq.asyncio.Socket) -> bool:
    """Whether the connection changed since the last call."""
    has_changed = False
    # Messages of a connection arrive after its monitor event.
    while await monitor.poll(0):
        await monitor.recv_multipart()
        has_changed = True
    return has_changed


def _split_event(event: ExternalEvent) -> Iterator[ExternalEvent]:
    """Yields the event, split into equivalent ones of at most PAGES_PER_PART_MAX pages."""
    if isinstance(event, PagesCleared) or len(event.hashes) <= PAGES_PER_PART_MAX:
        yield event
        return
    for start in range(0, len(event.hashes), PAGES_PER_PART_MAX):
        end = start + PAGES_PER_PART_MAX
        hashes = event.hashes[start:end]
        if isinstance(event, PagesRemoved):
            yield replace(event, hashes=hashes)
            continue
        tokens_per_page = len(event.token_ids) // len(event.hashes)
        yield replace(
            event,
            hashes=hashes,
            parent=event.hashes[start - 1] if start else event.parent,
            token_ids=event.token_ids[start * tokens_per_page : end * tokens_per_page],
        )


# Any: unpacked events of an engine.
def parse_events(events: Sequence[Any], rank: int) -> Iterator[ExternalEvent]:
    """Yields the events of a batch. Raises LookupError, TypeError or ValueError if malformed."""
    for one in events:
        event = one
        if not isinstance(one, Mapping):
            event_type, *values = one
            # Omitted trailing fields have their defaults; unknown trailing fields are ignored.
            event = {"type": event_type, **dict(zip(_FIELDS[event_type], values, strict=False))}
        match event["type"]:
            case "BlockStored":
                yield PagesStored(
                    _hashes(event["block_hashes"]),
                    _hash(event["parent_block_hash"]),
                    np.asarray(event["token_ids"], dtype="<u4").tobytes(),
                    event["block_size"],
                    tier=_TIERS[event.get("medium")],
                    rank=rank,
                    lora=_read_lora(event),
                    salt=_read_salt(event),
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
    """Returns the salt, "" for none; None if blocks depend on unreadable keys (images, salts)."""
    if any(event.get("extra_keys") or ()):
        return None
    salt: str | None = event.get("cache_salt")
    return salt or ""
