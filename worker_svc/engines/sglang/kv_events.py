"""An engine's KV events, rank by rank: in order, without gaps, as the canonicaliser takes them.

Each rank publishes numbered batches over ZeroMQ (PUB, loopback) and keeps the last ones for replay
(ROUTER). Nothing says when a subscription has begun to count, and a publisher drops what a slow
subscriber does not take: so a jump in the numbers is replayed, and so is the end whenever it is
quiet. What no replay has any more is a loss, which the sink is told of.

Numbers alone do not tell an engine from its successor, which begins with 0 again and may have come
as far meanwhile. So every replay begins with the batch taken last: it must be there, as it was.
Where it is not the engine has begun anew, with an empty cache, and so does the reader. It asks so
whenever the connection is a new one, before it takes anything that came over it.

An answer may have holes, no last batches or no end: a ROUTER drops what it cannot send at once. So
the rest is asked for again, for as long as every answer brings something; only what is missing at
the beginning of an answer is kept no more.

The format is SGLang's "dynamo": there, and only there, the hash of a block depends on adapter and
salt as well, so that hashes alone tell blocks of different adapters apart, in removals too. They
are opaque, signed 64-bit numbers. vLLM's format is read too: its events may be arrays, its hashes
digests of 32 bytes, of which the last eight count.
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
# Batches that SGLang keeps for replay. As many may wait here: those beyond can be had again.
BUFFERED_BATCHES: Final = 10_000
# Messages that a socket takes before it drops any, by default; a shorter answer is whole.
SOCKET_QUEUE_MIN: Final = 1_000
# After so much silence the end is asked for again.
IDLE_S: Final = 1.0
# Silence at which an answer is given up. SGLang looks for requests between batches, at least every
# 0.1 s.
REPLAY_TIMEOUT_S: Final = 5.0
# An engine that goes away takes the requests with it that it has not answered: they are made again.
REPLAY_ATTEMPTS_MAX: Final = 2
# Work after which the loop gets its turn: batches that have arrived already are taken without one.
YIELD_INTERVAL_S: Final = 0.002
# Pages of an event that are taken at once: two milliseconds or three. A prompt may have a hundred
# times as many, where pages have one token.
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
# The fields of events that are arrays, behind the name of the event.
_FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KvEventEndpoints:
    """Where rank r publishes: port + r, and serves replays: replay_port + r; on loopback.

    replay_port None: the engine keeps nothing, so that whatever does not arrive is a loss.
    """

    port: int
    replay_port: int | None

    def config(self) -> str:
        """SGLang's `kv_events_config`. It has to keep batches."""
        assert self.replay_port is not None, "SGLang keeps batches here"
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
    """What came of a request for replay: all there is, a part, or what another engine has kept."""

    COMPLETE = auto()
    TRUNCATED = auto()
    OTHER_ENGINE = auto()


class _LoopYielder:
    """Gives the loop its turn once TURN_S has passed since the last."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._slice_started_at = self._now()

    async def yield_if_due(self) -> None:
        """Call it after each piece of work."""
        if self._now() - self._slice_started_at > YIELD_INTERVAL_S:
            await asyncio.sleep(0)
            self._slice_started_at = self._now()


class KvEventReader:
    """Follows one rank for ever.

    counts: batches, replayed (of them), gaps, losses, malformed, resets, replays that were cut or
    unanswered (from some batch on).
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
        # The batch taken last, by which the engine is known again.
        self._last_payload = b""
        self._yielder = _LoopYielder()
        self._decode = msgspec.msgpack.Decoder().decode

    async def run(self) -> None:
        """Reads until cancelled; what fails is a loss, after which it begins again."""
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
        """Takes what comes, until it is quiet."""
        while await subscriber.poll(IDLE_S * 1000):
            _, number, payload = await subscriber.recv_multipart()
            seq = int.from_bytes(number, "big")
            is_new_connection = await _has_reconnected(monitor)
            self.counts["gaps"] += seq > self._next_seq
            if is_new_connection or seq > self._next_seq:
                is_same_engine = await self._repair_gap(context, REPLAY_ATTEMPTS_MAX)
                if is_new_connection and not is_same_engine and self._next_seq:
                    self._report_loss("nothing shows that it is the same engine")
                    self._next_seq = seq
            await self._accept(seq, payload)

    async def _repair_gap(self, context: zmq.asyncio.Context, attempts_left: int) -> bool:
        """Takes what the engine has kept from the next batch on; or all, if it has begun anew.

        False when it does not answer.
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
        """One replay, from the batch taken last on. Raises TimeoutError once nothing more comes.

        Of another engine's nothing is taken. Cut is an answer only behind something new.
        """
        next_at_request = self._next_seq
        is_verified = next_at_request == 0
        # A socket each time: what a request that timed out still brings must not end the next one.
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
                if seq < 0 and not is_verified:
                    return _ReplayResult.OTHER_ENGINE
                if seq < 0:
                    return (
                        _ReplayResult.TRUNCATED
                        if self._next_seq - first >= SOCKET_QUEUE_MIN
                        else _ReplayResult.COMPLETE
                    )
                if not is_verified:
                    if seq == first and payload != self._last_payload:
                        return _ReplayResult.OTHER_ENGINE
                    is_verified = True
                    if seq > first:
                        # The ring is past it: nothing shows whose batches these are.
                        self._report_loss(f"batches from {first} on are kept no more")
                        self._next_seq = seq
                if seq > self._next_seq > next_at_request:
                    return _ReplayResult.TRUNCATED
                self.counts["replayed"] += seq >= self._next_seq
                await self._accept(seq, payload)

    def _reset(self) -> None:
        log.warning("kv_engine_began_anew", dp_rank=self._rank, next_at_request=self._next_seq)
        self.counts["resets"] += 1
        self._next_seq, self._last_payload = 0, b""
        self._sink.reset(self._rank)

    async def _accept(self, seq: int, payload: bytes) -> None:
        await self._yielder.yield_if_due()
        if seq < self._next_seq:
            return
        if seq > self._next_seq:
            self._report_loss(f"batches {self._next_seq} to {seq - 1} are kept no more")
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
                await self._yielder.yield_if_due()

    def _report_loss(self, reason: str) -> None:
        self.counts["losses"] += 1
        self._sink.record_loss(self._rank, reason)


async def _has_reconnected(monitor: zmq.asyncio.Socket) -> bool:
    """Whether the connection has changed since the last call."""
    has_changed = False
    # What comes over a connection comes after the event that tells of it.
    while await monitor.poll(0):
        await monitor.recv_multipart()
        has_changed = True
    return has_changed


def _split_event(event: ExternalEvent) -> Iterator[ExternalEvent]:
    """The event, or several that mean the same, of at most PART_PAGES pages each."""
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


# Any: what an engine says, unpacked.
def parse_events(events: Sequence[Any], rank: int) -> Iterator[ExternalEvent]:
    """Our events for an engine's. Raises LookupError, TypeError or ValueError for what is none."""
    for one in events:
        event = one if isinstance(one, Mapping) else _event_fields(one)
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


def _event_fields(event: Sequence[Any]) -> Mapping[str, Any]:
    event_type, *values = event
    # What is left out at the end has its default; what is there beyond is not for us.
    return {"type": event_type, **dict(zip(_FIELDS[event_type], values, strict=False))}


def _hash(value: int | bytes | None) -> int | None:
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value


def _hashes(values: Sequence[int | bytes]) -> Sequence[int]:
    return [int.from_bytes(v[-8:], "big") if isinstance(v, bytes) else v for v in values]


def _read_lora(event: Mapping[str, Any]) -> str | None:
    """None: it is of an adapter that the event does not name."""
    name: str | None = event.get("lora_name")
    if not name and event.get("lora_id") is not None:
        return None
    return name or ""


def _read_salt(event: Mapping[str, Any]) -> str | None:
    """None: blocks are told apart by keys (images, salts) which are not to be read from outside."""
    if any(event.get("extra_keys") or ()):
        return None
    salt: str | None = event.get("cache_salt")
    return salt or ""
