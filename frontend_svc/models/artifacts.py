"""Fetches artifacts of model cards that are too large for the registry from workers.

Every worker that serves a card has all of its artifacts. If a worker fails during a transfer,
another one continues from the first missing byte. The card has the size and SHA-256 of each
artifact. A worker with other content is not used again. If several workers contributed to wrong
content, the wrong part is unknown, so each then has to send the whole artifact. Received bytes stay
for the next attempt, up to CARD_BYTES_MAX in total.

Limits: ARTIFACT_BYTES_MAX per artifact, CARD_BYTES_MAX per card, CHUNK_TIMEOUT_S between two
chunks, CARD_TIMEOUT_S per attempt at a card with ATTEMPTS_PER_WORKER over all workers, and
CONCURRENT_CARDS_MAX cards at once. The remaining calls share the remaining time equally, so that
another worker follows a very slow one in time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import structlog
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from common.errors import DeadlineExceeded, InvalidRequest, MeshError, NotFound, Unavailable
from common.registry.card import Artifact, ModelCard, verify_artifact
from common.registry.instances import Instance
from common.rpc import channel as rpc
from common.rpc.status import map_rpc_errors
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc

ARTIFACT_BYTES_MAX = 256 << 20
CARD_BYTES_MAX = 512 << 20
CHUNK_TIMEOUT_S = 10.0
# A full card at 4 MB/s; the next attempt continues where this one ended.
CARD_TIMEOUT_S = 120.0
ATTEMPTS_PER_WORKER = 2
# Most meshes load fewer models at once; the bytes of each are in memory.
CONCURRENT_CARDS_MAX = 16
# Reason of an error: the received bytes differ from the card.
MISMATCH = "ARTIFACT_MISMATCH"

log = structlog.get_logger()

Chunks: TypeAlias = AsyncIterator[engine_pb2.GetArtifactResponse]
# Requests an artifact (name) from a worker, from an offset; leaving the context ends the call.
OpenArtifact: TypeAlias = Callable[[Instance, str, int], AbstractAsyncContextManager[Chunks]]


def grpc_artifact_opener(security: rpc.Security = rpc.PLAINTEXT) -> OpenArtifact:

    @asynccontextmanager
    async def open_artifact(worker: Instance, name: str, offset: int) -> AsyncIterator[Chunks]:
        channel = rpc.channel(worker.address, role="worker", security=security)
        try:
            call = engine_pb2_grpc.EngineServiceStub(channel).GetArtifact(
                engine_pb2.GetArtifactRequest(name=name, offset=offset),
                timeout=CARD_TIMEOUT_S,
            )
            async with rpc.cancelling(call):
                yield aiter(call)
        finally:
            await channel.close()

    return open_artifact


class ArtifactFetcher:
    """Completes cards, several at once. workers_with_card: the workers that serve the card of a
    checksum now. counters: fetched artifacts, their bytes, resumed transfers, failed attempts, and
    mismatches."""

    def __init__(
        self,
        workers_with_card: Callable[[str], Sequence[Instance]],
        *,
        open_artifact: OpenArtifact,
        chunk_timeout_s: float = CHUNK_TIMEOUT_S,
        card_timeout_s: float = CARD_TIMEOUT_S,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._card_timeout_s = card_timeout_s
        self._fetch_permits = asyncio.Semaphore(CONCURRENT_CARDS_MAX)
        self._workers_with_card = workers_with_card
        self._open_artifact = open_artifact
        self._chunk_timeout_s = chunk_timeout_s
        # By card and digest.
        self._partial_artifacts: dict[tuple[str, str], _PartialArtifact] = {}

    async def complete_card(self, card: ModelCard) -> ModelCard:
        """Returns the card with all artifacts inline. Raises InvalidRequest with reason
        ARTIFACT_MISMATCH for content that differs from the card, InvalidRequest for a card above
        the limits, Unavailable without workers, DeadlineExceeded after card_timeout_s, and
        otherwise the error of the last worker."""
        missing = {
            name: artifact for name, artifact in card.artifacts.items() if artifact.inline is None
        }
        if not missing:
            return card
        _check_bounds(card)
        try:
            async with self._fetch_permits:
                completed = await self._fetch_all(card, missing)
        except MeshError:
            self.counters["failed"] += 1
            raise
        for artifact in missing.values():
            self._partial_artifacts.pop((card.checksum, artifact.sha256), None)
        return replace(card, artifacts={**card.artifacts, **completed})

    async def _fetch_all(
        self, card: ModelCard, missing: Mapping[str, Artifact]
    ) -> dict[str, Artifact]:
        if sum(len(partial) for partial in self._partial_artifacts.values()) > CARD_BYTES_MAX:
            self._partial_artifacts = {
                key: partial
                for key, partial in self._partial_artifacts.items()
                if key[0] == card.checksum
            }
        deadline = asyncio.get_running_loop().time() + self._card_timeout_s
        completed: dict[str, Artifact] = {}
        for name, artifact in missing.items():
            partial = self._partial_artifacts.setdefault(
                (card.checksum, artifact.sha256), _PartialArtifact()
            )
            try:
                async with asyncio.timeout_at(deadline), partial.lock:
                    data = await self._fetch_artifact(
                        card.checksum, name, artifact, partial, deadline
                    )
            except TimeoutError:
                text = f"{name}: received {len(partial)}/{artifact.size} bytes within the "
                text += f"{self._card_timeout_s:g} s for one attempt at the card"
                raise DeadlineExceeded(text) from None
            completed[name] = replace(artifact, inline=data)
        return completed

    async def _fetch_artifact(
        self,
        checksum: str,
        name: str,
        artifact: Artifact,
        partial: _PartialArtifact,
        deadline: float,
    ) -> bytes:
        if partial.completed is not None:
            return partial.completed
        workers = self._workers_with_card(checksum)
        partial.mismatched_workers &= {worker.id for worker in workers}
        error: MeshError = Unavailable(f"no worker is left that could send {name}", 1.0)
        attempts = [*workers] * ATTEMPTS_PER_WORKER
        for number, worker in enumerate(attempts):
            if worker.id in partial.mismatched_workers:
                continue
            try:
                async with asyncio.timeout_at(_attempt_deadline(deadline, len(attempts) - number)):
                    return await self._fetch_from(worker, name, artifact, partial)
            except TimeoutError:
                received = f"received {len(partial)}/{artifact.size} bytes of {name}"
                error = Unavailable(f"worker {worker.id} is too slow: {received}", 1.0)
                log.warning("artifact_slow", name=name, worker_id=worker.id, reason=error.message)
            except MeshError as failure:
                error = failure
                log.warning("artifact_failed", name=name, worker_id=worker.id, reason=error.message)
        if partial.last_mismatch is not None and partial.mismatched_workers:
            raise partial.last_mismatch
        if isinstance(error, NotFound):  # NotFound would mean that the card is missing.
            raise Unavailable(f"no worker has {name}: {error.message}", 1.0)
        raise error

    async def _fetch_from(
        self, worker: Instance, name: str, artifact: Artifact, partial: _PartialArtifact
    ) -> bytes:
        """Returns the whole artifact, its missing part from this worker."""
        if partial.is_resume_disabled or len(partial.data) > artifact.size:
            partial.reset()
        self.counters["resumed"] += bool(partial.data)
        partial.source_ids.add(worker.id)
        data = partial.data
        async with self._open_artifact(worker, name, len(data)) as chunks:
            is_first = True
            async for chunk in _with_chunk_timeout(chunks, name, self._chunk_timeout_s):
                if is_first and (chunk.sha256, chunk.size) != (artifact.sha256, artifact.size):
                    partial.source_ids.discard(worker.id)
                    text = f"{name} of worker {worker.id} differs from its card"
                    raise self._record_mismatch(partial, {worker.id}, text)
                is_first = False
                data += chunk.data
                if len(data) > artifact.size:
                    break
        if len(data) < artifact.size:
            raise Unavailable(f"{name} ended after {len(data)}/{artifact.size} bytes", 1.0)
        # In a thread: a large artifact takes half a second.
        completed = await asyncio.to_thread(bytes, data)
        try:
            await asyncio.to_thread(verify_artifact, name, artifact, completed)
        except InvalidRequest as error:
            source_ids = set(partial.source_ids)
            partial.reset()
            raise self._record_mismatch(partial, source_ids, error.message) from None
        partial.reset()
        self.counters["fetched"] += 1
        self.counters["bytes"] += artifact.size
        partial.completed = completed
        return completed

    def _record_mismatch(
        self, partial: _PartialArtifact, source_ids: set[int], message: str
    ) -> InvalidRequest:
        """Returns the error to raise. source_ids: workers with possibly wrong content."""
        self.counters["mismatches"] += 1
        if len(source_ids) == 1:
            partial.mismatched_workers |= source_ids
        else:
            partial.is_resume_disabled = True
        partial.last_mismatch = InvalidRequest(message, "artifacts", reason=MISMATCH)
        return partial.last_mismatch


@dataclass(slots=True)
class _PartialArtifact:
    """The received part of one artifact."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during an attempt."""

    data: bytearray = field(default_factory=bytearray)
    completed: bytes | None = None

    source_ids: set[int] = field(default_factory=set)
    """Workers that sent `data`."""

    mismatched_workers: set[int] = field(default_factory=set)
    """Workers with content other than the card's."""

    is_resume_disabled: bool = False
    """Whether each worker has to send the whole artifact."""

    last_mismatch: InvalidRequest | None = None

    def __len__(self) -> int:
        return len(self.data) + len(self.completed or b"")

    def reset(self) -> None:
        self.data.clear()
        self.source_ids.clear()


def _attempt_deadline(deadline: float, attempts: int) -> float | None:
    """Returns the deadline of the next of `attempts` calls; None for the last one: the deadline of
    all."""
    now = asyncio.get_running_loop().time()
    return None if attempts == 1 else now + (deadline - now) / attempts


def _check_bounds(card: ModelCard) -> None:
    for name, artifact in card.artifacts.items():
        if artifact.size > ARTIFACT_BYTES_MAX:
            text = f"artifact {name} too large: {artifact.size}/{ARTIFACT_BYTES_MAX} bytes"
            raise InvalidRequest(text, f"artifacts.{name}.size")
    total = sum(artifact.size for artifact in card.artifacts.values())
    if total > CARD_BYTES_MAX:
        raise InvalidRequest(f"artifacts too large: {total}/{CARD_BYTES_MAX} bytes", "artifacts")


async def _with_chunk_timeout(chunks: Chunks, name: str, timeout_s: float) -> Chunks:
    """Yields the chunks. Raises Unavailable if one takes too long, the MeshError of a failed
    call."""
    while True:
        try:
            with map_rpc_errors():
                async with asyncio.timeout(timeout_s):
                    chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Unavailable(f"{name} stalled: {timeout_s:g} s without a byte") from None
        yield chunk


class ArtifactCollector(Collector):
    """The counters of an ArtifactFetcher, for /metrics."""

    def __init__(self, artifacts: ArtifactFetcher, prefix: str) -> None:
        self._artifacts = artifacts
        self._prefix = prefix

    def collect(self) -> Iterator[CounterMetricFamily]:
        counters = self._artifacts.counters
        family = CounterMetricFamily(
            f"{self._prefix}_card_artifacts",
            "Transfers of card artifacts from workers, by result",
            labels=("result",),
        )
        for result in ("fetched", "resumed", "failed", "mismatches"):
            family.add_metric((result,), counters[result])
        yield family
        yield CounterMetricFamily(
            f"{self._prefix}_card_artifact_bytes",
            "Bytes of card artifacts received from workers",
            counters["bytes"],
        )
