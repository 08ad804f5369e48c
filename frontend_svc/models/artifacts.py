"""Artifacts of model cards that are too large for the registry: workers are asked for them.

Any worker that serves a card has all of its artifacts, so one that dies midway is followed by
another, from the byte on that is missing. The card says what must have come, by size and SHA-256. A
worker with other content is not asked again; where several have contributed nobody knows whose
bytes are wrong, so each is asked for the whole of it then. What has come stays for the next try, up
to CARD_BYTES_MAX in all.

Bounds: ARTIFACT_BYTES_MAX an artifact, CARD_BYTES_MAX a card, CHUNK_S between two chunks, CARD_S
for a try at a card, PASSES over all workers a try, FETCHES_MAX cards at once. Of the time that is
left to an artifact each call has an equal share, so that a worker which trickles is followed by
another while there is time; what it sent is kept.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TypeAlias

import structlog
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from common.errors import DeadlineExceeded, InvalidRequest, MeshError, NotFound, Unavailable
from common.registry.card import Artifact, ModelCard, verify_artifact
from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.rpc.interceptors import raising_mesh_errors
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc

ARTIFACT_BYTES_MAX = 256 << 20
CARD_BYTES_MAX = 512 << 20
CHUNK_S = 10.0
# A full card at 4 MB/s; the next try goes on where this one ended.
CARD_S = 120.0
PASSES = 2
# More than there are models to load at once in most meshes; the bytes of each are in memory.
FETCHES_MAX = 16
# Names a transfer whose bytes are not those of the card.
MISMATCH = "ARTIFACT_MISMATCH"

log = structlog.get_logger()

Chunks: TypeAlias = AsyncIterator[engine_pb2.GetArtifactResponse]
# Asks a worker for an artifact (name) from an offset on; leaving the context ends the call.
OpenCall: TypeAlias = Callable[[Instance, str, int], AbstractAsyncContextManager[Chunks]]


def grpc_artifacts(security: rpc.Security = rpc.PLAINTEXT) -> OpenCall:
    """GetArtifact over gRPC. The channel belongs to the call and dies with it."""

    @asynccontextmanager
    async def open_call(worker: Instance, name: str, offset: int) -> AsyncIterator[Chunks]:
        channel = rpc.channel(worker.address, security=security)
        try:
            call = engine_pb2_grpc.EngineServiceStub(channel).GetArtifact(
                engine_pb2.GetArtifactRequest(name=name, offset=offset),
                timeout=CARD_S,
                metadata=rpc.call_metadata(security),
            )
            async with rpc.cancelling(call):
                yield aiter(call)
        finally:
            await channel.close()

    return open_call


class Artifacts:
    """Completes cards, several at once. holders: the workers that serve the card of a checksum now.

    counters: fetched artifacts, their bytes, resumed transfers, failed tries, and mismatches.
    """

    def __init__(
        self,
        holders: Callable[[str], Sequence[Instance]],
        *,
        open_call: OpenCall,
        chunk_s: float = CHUNK_S,
        card_s: float = CARD_S,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._card_s = card_s
        self._turns = asyncio.Semaphore(FETCHES_MAX)
        self._holders = holders
        self._open_call = open_call
        self._chunk_s = chunk_s
        # By card and digest: what has come of artifacts that are not whole, and whose content is
        # wrong.
        self._partial: dict[tuple[str, str], _Partial] = {}

    async def complete(self, card: ModelCard) -> ModelCard:
        """The card with all artifacts inline.

        Raises InvalidRequest with reason ARTIFACT_MISMATCH where content is not what the card says,
        InvalidRequest for a card above the bounds, Unavailable where nobody can be asked,
        DeadlineExceeded where it takes longer than card_s, and what the last worker failed with.
        """
        missing = {name: one for name, one in card.artifacts.items() if one.inline is None}
        if not missing:
            return card
        _check_bounds(card)
        try:
            async with self._turns:
                whole = await self._fetch_all(card, missing)
        except MeshError:
            self.counters["failed"] += 1
            raise
        for artifact in missing.values():
            self._partial.pop((card.checksum, artifact.sha256), None)
        return replace(card, artifacts={**card.artifacts, **whole})

    async def _fetch_all(
        self, card: ModelCard, missing: Mapping[str, Artifact]
    ) -> dict[str, Artifact]:
        self._forget_others(card.checksum)
        by = asyncio.get_running_loop().time() + self._card_s
        whole: dict[str, Artifact] = {}
        for name, artifact in missing.items():
            partial = self._partial.setdefault((card.checksum, artifact.sha256), _Partial())
            try:
                async with asyncio.timeout_at(by), partial.lock:
                    data = await self._fetch(card.checksum, name, artifact, partial, by)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{name}: {len(partial)} of {artifact.size} bytes have come, and the "
                    f"{self._card_s:g} s for a try at the card are over"
                ) from None
            whole[name] = replace(artifact, inline=data)
        return whole

    def _forget_others(self, checksum: str) -> None:
        """Lets go of what other cards have come to, when it is too much."""
        if sum(len(one) for one in self._partial.values()) > CARD_BYTES_MAX:
            self._partial = {key: one for key, one in self._partial.items() if key[0] == checksum}

    async def _fetch(
        self, checksum: str, name: str, artifact: Artifact, partial: _Partial, by: float
    ) -> bytes:
        if partial.whole is not None:
            return partial.whole
        workers = self._holders(checksum)
        partial.wrong &= {worker.id for worker in workers}
        error: MeshError = Unavailable(f"no worker can be asked for {name}", 1.0)
        calls = [*workers] * PASSES
        for number, worker in enumerate(calls):
            if worker.id in partial.wrong:
                continue
            try:
                async with asyncio.timeout_at(_share(by, len(calls) - number)):
                    return await self._take(worker, name, artifact, partial)
            except TimeoutError:
                error = Unavailable(
                    f"worker {worker.id} is too slow: {len(partial)} of {artifact.size} bytes of "
                    f"{name} have come",
                    1.0,
                )
                log.warning("artifact_slow", name=name, worker_id=worker.id, why=error.message)
            except MeshError as failure:
                log.warning("artifact_failed", name=name, worker_id=worker.id, why=failure.message)
                error = failure
        if partial.mismatch is not None and partial.wrong:
            raise partial.mismatch
        if isinstance(error, NotFound):  # which would say that there is no card
            raise Unavailable(f"no worker has {name}: {error.message}", 1.0)
        raise error

    async def _take(
        self, worker: Instance, name: str, artifact: Artifact, partial: _Partial
    ) -> bytes:
        """The whole artifact, the rest of it from this worker."""
        if partial.distrusted or len(partial.data) > artifact.size:
            partial.begin_anew()
        self.counters["resumed"] += bool(partial.data)
        partial.sources.add(worker.id)
        data = partial.data
        async with self._open_call(worker, name, len(data)) as chunks:
            is_first = True
            async for chunk in _timely(chunks, name, self._chunk_s):
                if is_first and (chunk.sha256, chunk.size) != (artifact.sha256, artifact.size):
                    partial.sources.discard(worker.id)
                    raise self._mismatch(
                        partial, {worker.id}, f"worker {worker.id} has another {name} than its card"
                    )
                is_first = False
                data += chunk.data
                if len(data) > artifact.size:
                    break
        if len(data) < artifact.size:
            raise Unavailable(f"{name} ended after {len(data)} of {artifact.size} bytes", 1.0)
        try:
            # Off the loop, which other requests need: it takes half a second where it is large.
            whole = await asyncio.to_thread(_verified, name, artifact, data)
        except InvalidRequest as error:
            sources = set(partial.sources)
            partial.begin_anew()
            raise self._mismatch(partial, sources, error.message) from None
        partial.begin_anew()
        self.counters["fetched"] += 1
        self.counters["bytes"] += artifact.size
        partial.whole = whole
        return whole

    def _mismatch(self, partial: _Partial, sources: set[int], why: str) -> InvalidRequest:
        """sources: whose content it may be that is wrong."""
        self.counters["mismatches"] += 1
        if len(sources) == 1:
            partial.wrong |= sources
        else:
            partial.distrusted = True
        partial.mismatch = InvalidRequest(why, "artifacts", reason=MISMATCH)
        return partial.mismatch


class _Partial:
    """What has come of one artifact.

    lock: of the one try under way. sources: who it came from. wrong: workers whose content is not
    the card's. distrusted: nobody's bytes are continued by another any more. mismatch: the last
    one.
    """

    __slots__ = ("data", "distrusted", "lock", "mismatch", "sources", "whole", "wrong")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.data = bytearray()
        self.whole: bytes | None = None
        self.sources: set[int] = set()
        self.wrong: set[int] = set()
        self.distrusted = False
        self.mismatch: InvalidRequest | None = None

    def __len__(self) -> int:
        return len(self.data) + len(self.whole or b"")

    def begin_anew(self) -> None:
        self.data.clear()
        self.sources.clear()


def _verified(name: str, artifact: Artifact, data: bytearray) -> bytes:
    whole = bytes(data)
    verify_artifact(name, artifact, whole)
    return whole


def _share(by: float, calls: int) -> float | None:
    """Until when the next of so many calls may take; None for the last one: until all is over."""
    now = asyncio.get_running_loop().time()
    return None if calls == 1 else now + (by - now) / calls


def _check_bounds(card: ModelCard) -> None:
    for name, artifact in card.artifacts.items():
        if artifact.size > ARTIFACT_BYTES_MAX:
            raise InvalidRequest(
                f"artifact {name} has {artifact.size} bytes; {ARTIFACT_BYTES_MAX} is the most",
                f"artifacts.{name}.size",
            )
    total = sum(artifact.size for artifact in card.artifacts.values())
    if total > CARD_BYTES_MAX:
        raise InvalidRequest(
            f"the artifacts have {total} bytes together; {CARD_BYTES_MAX} is the most", "artifacts"
        )


async def _timely(chunks: Chunks, name: str, limit_s: float) -> Chunks:
    """The chunks; Unavailable where one takes too long, the MeshError of a call that fails."""
    while True:
        try:
            with raising_mesh_errors():
                async with asyncio.timeout(limit_s):
                    chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Unavailable(f"{name} does not come on: {limit_s:g} s without a byte") from None
        yield chunk


class ArtifactCollector(Collector):
    """The counters of Artifacts, for /metrics."""

    def __init__(self, artifacts: Artifacts, prefix: str) -> None:
        self._artifacts = artifacts
        self._prefix = prefix

    def collect(self) -> Iterator[CounterMetricFamily]:
        """See prometheus_client."""
        counters = self._artifacts.counters
        family = CounterMetricFamily(
            f"{self._prefix}_card_artifacts",
            "Transfers of card artifacts from workers, by what became of them",
            labels=("result",),
        )
        for result in ("fetched", "resumed", "failed", "mismatches"):
            family.add_metric((result,), counters[result])
        yield family
        yield CounterMetricFamily(
            f"{self._prefix}_card_artifact_bytes",
            "Bytes of card artifacts that came from workers",
            counters["bytes"],
        )
