"""SGLang's KV events, rank by rank: in order, without gaps, as the canonicaliser takes them.

Each rank publishes numbered batches over ZeroMQ (PUB, loopback) and keeps the last ones for replay
(ROUTER). Nothing says when a subscription has begun to count, and a publisher drops what a slow
subscriber does not take: so a jump in the numbers is replayed, and so is the end whenever it is
quiet. What no replay has any more is a loss, which the sink is told of.

The format is SGLang's "dynamo": there, and only there, the hash of a block depends on adapter and
salt as well, so that hashes alone tell blocks of different adapters apart, in removals too. They
are opaque, signed 64-bit numbers.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import structlog
import zmq
import zmq.asyncio

from common.kv import Tier
from worker_svc.core.kv_events import ExternalEvent, PagesCleared, PagesRemoved, PagesStored

TOPIC: Final = "kv-events"
# Batches that SGLang keeps for replay.
KEPT_BATCHES: Final = 10_000
# After so much silence the end is asked for again.
QUIET_S: Final = 1.0
# SGLang looks for replay requests between batches, at least every 0.1 s.
REPLAY_S: Final = 5.0
# Batches before the loop gets its turn.
TURN_BATCHES: Final = 64

_SEQ_BYTES: Final = 8
_TIERS: Final[Mapping[str | None, Tier]] = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
    "EXTERNAL": Tier.DISK,
}

log = structlog.get_logger()


class KvSink(Protocol):
    """Who is told."""

    def take(self, events: Iterable[ExternalEvent]) -> None:
        """Takes in events, in order."""

    def lose(self, rank: int, why: str) -> None:
        """Events of a rank were lost beyond repair."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where rank r publishes: port + r, and serves replays: replay_port + r; on loopback."""

    port: int
    replay_port: int

    @staticmethod
    def free(ranks: int) -> Endpoints:
        """Ports that were free a moment ago. Raises OSError when there are none in a row."""
        base = _free_ports(2 * ranks)
        return Endpoints(base, base + ranks)

    def config(self) -> str:
        """SGLang's `kv_events_config`."""
        return json.dumps(
            {
                "publisher": "zmq",
                "format": "dynamo",
                "topic": TOPIC,
                "bind": True,
                "endpoint": _tcp(self.port),
                "replay_endpoint": _tcp(self.replay_port),
                "buffer_steps": KEPT_BATCHES,
            }
        )


def _tcp(port: int) -> str:
    return f"tcp://127.0.0.1:{port}"


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row."""
    error = OSError("no free ports in a row")
    for _ in range(64):
        with ExitStack() as held:
            first = held.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            base: int = first.getsockname()[1]
            try:
                for offset in range(1, count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", base + offset))
            except (OSError, OverflowError):
                continue
            return base
    raise error


class KvReader:
    """Follows one rank for ever. counts: batches, replayed (of them), gaps, losses, malformed."""

    def __init__(self, rank: int, endpoints: Endpoints, sink: KvSink) -> None:
        self.counts: Counter[str] = Counter()
        self._rank = rank
        self._endpoint = _tcp(endpoints.port + rank)
        self._replay_endpoint = _tcp(endpoints.replay_port + rank)
        self._sink = sink
        self._next = 0
        self._decode = msgspec.msgpack.Decoder().decode

    async def run(self) -> None:
        """Reads until cancelled."""
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as live:
            live.set(zmq.LINGER, 0)
            live.set(zmq.RCVHWM, 0)
            live.connect(self._endpoint)
            live.subscribe(TOPIC.encode())
            while True:
                await self._replay(context)
                await self._follow(context, live)

    async def _follow(self, context: zmq.asyncio.Context, live: zmq.asyncio.Socket) -> None:
        """Takes what comes, until it is quiet."""
        turns = 0
        while await live.poll(QUIET_S * 1000):
            _, number, payload = await live.recv_multipart()
            seq = int.from_bytes(number, "big")
            if seq > self._next:
                self.counts["gaps"] += 1
                await self._replay(context)
            self._accept(seq, payload)
            turns += 1
            if turns % TURN_BATCHES == 0:
                await asyncio.sleep(0)

    async def _replay(self, context: zmq.asyncio.Context) -> None:
        """Takes what SGLang has kept from the next batch on."""
        # A socket each time: what a request that timed out still brings must not end the next one.
        with context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.connect(self._replay_endpoint)
            await dealer.send_multipart([b"", self._next.to_bytes(_SEQ_BYTES, "big")])
            try:
                async with asyncio.timeout(REPLAY_S):
                    while True:
                        *_, number, payload = await dealer.recv_multipart()
                        seq = int.from_bytes(number, "big", signed=True)
                        if seq < 0:
                            return
                        self.counts["replayed"] += seq >= self._next
                        self._accept(seq, payload)
            except TimeoutError:
                log.warning("kv_replay_timed_out", dp_rank=self._rank, next=self._next)

    def _accept(self, seq: int, payload: bytes) -> None:
        if seq < self._next:
            return
        if seq > self._next:
            self._lose(f"batches {self._next} to {seq - 1} are kept no more")
        self._next = seq + 1
        self.counts["batches"] += 1
        try:
            events = list(external_events(self._decode(payload)[1], self._rank))
        except (msgspec.DecodeError, LookupError, TypeError, ValueError, OverflowError) as error:
            self.counts["malformed"] += 1
            self._lose(f"batch {seq} is malformed: {error!r}")
            return
        self._sink.take(events)

    def _lose(self, why: str) -> None:
        self.counts["losses"] += 1
        self._sink.lose(self._rank, why)


# Any: what an engine says, unpacked.
def external_events(events: Sequence[Mapping[str, Any]], rank: int) -> Iterator[ExternalEvent]:
    """Our events for SGLang's. Raises LookupError, TypeError or ValueError for what is none."""
    for event in events:
        match event["type"]:
            case "BlockStored":
                yield PagesStored(
                    event["block_hashes"],
                    event["parent_block_hash"],
                    np.asarray(event["token_ids"], dtype="<u4").tobytes(),
                    event["block_size"],
                    tier=_TIERS[event.get("medium")],
                    rank=rank,
                    lora=event.get("lora_name") or "",
                    salt=event.get("cache_salt") or "",
                )
            case "BlockRemoved":
                yield PagesRemoved(
                    event["block_hashes"], tier=_TIERS[event.get("medium")], rank=rank
                )
            case "AllBlocksCleared":
                yield PagesCleared(rank)
            case other:
                raise ValueError(f"unknown event {other!r}")
