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
from common.rpc.interceptors import map_rpc_errors
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc

ARTIFACT_BYTES_MAX = 256 << 20
CARD_BYTES_MAX = 512 << 20
CHUNK_TIMEOUT_S = 10.0
# A full card at 4 MB/s; the next try goes on where this one ended.
CARD_TIMEOUT_S = 120.0
ATTEMPTS_PER_WORKER = 2
# More than there are models to load at once in most meshes; the bytes of each are in memory.
CONCURRENT_CARDS_MAX = 16
# Names a transfer whose bytes are not those of the card.
MISMATCH = "ARTIFACT_MISMATCH"

log = structlog.get_logger()

Chunks: TypeAlias = AsyncIterator[engine_pb2.GetArtifactResponse]
# Asks a worker for an artifact (name) from an offset on; leaving the context ends the call.
OpenArtifact: TypeAlias = Callable[[Instance, str, int], AbstractAsyncContextManager[Chunks]]


def grpc_artifact_opener(security: rpc.Security = rpc.PLAINTEXT) -> OpenArtifact:
    """GetArtifact over gRPC. The channel belongs to the call and dies with it."""

    @asynccontextmanager
    async def open_artifact(worker: Instance, name: str, offset: int) -> AsyncIterator[Chunks]:
        channel = rpc.channel(worker.address, security=security)
        try:
            call = engine_pb2_grpc.EngineServiceStub(channel).GetArtifact(
                engine_pb2.GetArtifactRequest(name=name, offset=offset),
                timeout=CARD_TIMEOUT_S,
                metadata=rpc.call_metadata(security),
            )
            async with rpc.cancelling(call):
                yield aiter(call)
        finally:
            await channel.close()

    return open_artifact


class ArtifactFetcher:
    """Completes cards, several at once. holders: the workers that serve the card of a checksum now.

    counters: fetched artifacts, their bytes, resumed transfers, failed tries, and mismatches.
    """

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
        # By card and digest: what has come of artifacts that are not whole, and whose content is
        # wrong.
        self._partial_artifacts: dict[tuple[str, str], _PartialArtifact] = {}

    async def complete_card(self, card: ModelCard) -> ModelCard:
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
        self._evict_other_cards(card.checksum)
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
                raise DeadlineExceeded(
                    f"{name}: {len(partial)} of {artifact.size} bytes have come, and the "
                    f"{self._card_timeout_s:g} s for a try at the card are over"
                ) from None
            completed[name] = replace(artifact, inline=data)
        return completed

    def _evict_other_cards(self, checksum: str) -> None:
        """Lets go of what other cards have come to, when it is too much."""
        if sum(len(one) for one in self._partial_artifacts.values()) > CARD_BYTES_MAX:
            self._partial_artifacts = {
                key: one for key, one in self._partial_artifacts.items() if key[0] == checksum
            }

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
        error: MeshError = Unavailable(f"no worker can be asked for {name}", 1.0)
        attempts = [*workers] * ATTEMPTS_PER_WORKER
        for number, worker in enumerate(attempts):
            if worker.id in partial.mismatched_workers:
                continue
            try:
                async with asyncio.timeout_at(_attempt_deadline(deadline, len(attempts) - number)):
                    return await self._fetch_from(worker, name, artifact, partial)
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
        if partial.last_mismatch is not None and partial.mismatched_workers:
            raise partial.last_mismatch
        if isinstance(error, NotFound):  # which would say that there is no card
            raise Unavailable(f"no worker has {name}: {error.message}", 1.0)
        raise error

    async def _fetch_from(
        self, worker: Instance, name: str, artifact: Artifact, partial: _PartialArtifact
    ) -> bytes:
        """The whole artifact, the rest of it from this worker."""
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
                    raise self._record_mismatch(
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
            completed = await asyncio.to_thread(_verify, name, artifact, data)
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
        self, partial: _PartialArtifact, source_ids: set[int], why: str
    ) -> InvalidRequest:
        """sources: whose content it may be that is wrong."""
        self.counters["mismatches"] += 1
        if len(source_ids) == 1:
            partial.mismatched_workers |= source_ids
        else:
            partial.is_resume_disabled = True
        partial.last_mismatch = InvalidRequest(why, "artifacts", reason=MISMATCH)
        return partial.last_mismatch


class _PartialArtifact:
    """What has come of one artifact.

    lock: of the one try under way. sources: who it came from. wrong: workers whose content is not
    the card's. distrusted: nobody's bytes are continued by another any more. mismatch: the last
    one.
    """

    __slots__ = (
        "completed",
        "data",
        "is_resume_disabled",
        "last_mismatch",
        "lock",
        "mismatched_workers",
        "source_ids",
    )

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.data = bytearray()
        self.completed: bytes | None = None
        self.source_ids: set[int] = set()
        self.mismatched_workers: set[int] = set()
        self.is_resume_disabled = False
        self.last_mismatch: InvalidRequest | None = None

    def __len__(self) -> int:
        return len(self.data) + len(self.completed or b"")

    def reset(self) -> None:
        self.data.clear()
        self.source_ids.clear()


def _verify(name: str, artifact: Artifact, data: bytearray) -> bytes:
    completed = bytes(data)
    verify_artifact(name, artifact, completed)
    return completed


def _attempt_deadline(deadline: float, attempts: int) -> float | None:
    """Until when the next of so many calls may take; None for the last one: until all is over."""
    now = asyncio.get_running_loop().time()
    return None if attempts == 1 else now + (deadline - now) / attempts


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


async def _with_chunk_timeout(chunks: Chunks, name: str, timeout_s: float) -> Chunks:
    """The chunks; Unavailable where one takes too long, the MeshError of a call that fails."""
    while True:
        try:
            with map_rpc_errors():
                async with asyncio.timeout(timeout_s):
                    chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise Unavailable(f"{name} does not come on: {timeout_s:g} s without a byte") from None
        yield chunk


class ArtifactCollector(Collector):
    """The counters of Artifacts, for /metrics."""

    def __init__(self, artifacts: ArtifactFetcher, prefix: str) -> None:
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
