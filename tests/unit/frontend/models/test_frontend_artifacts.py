"""Fetching artifacts that a card does not contain, from workers that die, send wrong bytes or
stall.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    NotFound,
    Unavailable,
    WorkerLost,
)
from common.registry.card import Artifact, ModelCard
from common.registry.instances import Instance
from frontend_svc.models.artifacts import (
    ARTIFACT_BYTES_MAX,
    MISMATCH,
    ArtifactCollector,
    ArtifactFetcher,
)
from kvmesh.engine.v1 import engine_pb2
from tests.sim.loop import run_virtually

DATA = bytes(range(256)) * 40
CHUNK = 1000
NAME = "tokenizer.json"


class FakeWorker:
    """A fake worker. dies_after: bytes sent per call before it is lost; None: never.

    offsets: the requested offsets.
    """

    def __init__(
        self, data: bytes = DATA, *, dies_after: int | None = None, advertised: bytes | None = None
    ) -> None:
        self.data = data
        self.dies_after = dies_after
        self.advertised = Artifact.of(data if advertised is None else advertised)
        self.offsets: list[int] = []
        self.error: MeshError | None = None

    async def chunks(self, offset: int) -> AsyncIterator[engine_pb2.GetArtifactResponse]:
        self.offsets.append(offset)
        if self.error is not None:
            raise self.error
        sent = 0
        for at in range(offset, max(offset + 1, len(self.data)), CHUNK):
            if self.dies_after is not None and sent >= self.dies_after:
                raise WorkerLost("connection reset", retryable=True)
            part = engine_pb2.GetArtifactResponse(data=self.data[at : at + CHUNK])
            if at == offset:
                part.sha256, part.size = self.advertised.sha256, self.advertised.size
            sent += len(part.data)
            yield part


def card_of(data: bytes = DATA, *, inline: bool = False) -> ModelCard:
    return ModelCard(name="m", artifacts={NAME: Artifact.of(data, inline=inline)})


class SlowWorker(FakeWorker):
    """Sends a chunk every `pause_s`, below the chunk timeout."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s

    async def chunks(self, offset: int) -> AsyncIterator[engine_pb2.GetArtifactResponse]:
        async for part in super().chunks(offset):
            await asyncio.sleep(self.pause_s)
            yield part


def artifacts_of(
    *senders: FakeWorker, chunk_timeout_s: float = 10.0, card_timeout_s: float = 120.0
) -> ArtifactFetcher:
    workers = [
        Instance(
            id=number,
            namespace="default",
            service="worker",
            stable_name="",
            address=f"h:{number}",
            model="m",
        )
        for number in range(1, len(senders) + 1)
    ]

    @asynccontextmanager
    async def open_artifact(
        worker: Instance, name: str, offset: int
    ) -> AsyncIterator[AsyncIterator[engine_pb2.GetArtifactResponse]]:
        assert name == NAME
        yield senders[worker.id - 1].chunks(offset)

    def serving(checksum: str) -> Sequence[Instance]:
        assert checksum == card_of().checksum or len(checksum) == 64
        return workers

    return ArtifactFetcher(
        serving,
        open_artifact=open_artifact,
        chunk_timeout_s=chunk_timeout_s,
        card_timeout_s=card_timeout_s,
    )


async def fetched(artifacts: ArtifactFetcher, card: ModelCard | None = None) -> bytes | None:
    whole = await artifacts.complete_card(card or card_of())
    return whole.artifacts[NAME].inline


async def fetch_error(artifacts: ArtifactFetcher, card: ModelCard | None = None) -> MeshError:
    with pytest.raises(MeshError) as caught:
        await artifacts.complete_card(card or card_of())
    return caught.value


async def test_a_card_with_inline_artifacts_needs_no_worker() -> None:
    card = card_of(inline=True)
    assert await artifacts_of().complete_card(card) is card


async def test_an_artifact_is_fetched_in_chunks_and_the_checksum_stays_the_same() -> None:
    artifacts = artifacts_of(FakeWorker())
    card = card_of()
    whole = await artifacts.complete_card(card)
    assert whole.artifacts[NAME].inline == DATA
    assert whole.checksum == card.checksum
    assert (artifacts.counters["fetched"], artifacts.counters["bytes"]) == (1, len(DATA))


async def test_an_empty_artifact_is_fetched() -> None:
    assert await fetched(artifacts_of(FakeWorker(b"")), card_of(b"")) == b""


async def test_a_second_worker_continues_a_transfer_that_the_first_one_broke_off() -> None:
    first, second = FakeWorker(dies_after=3 * CHUNK), FakeWorker()
    artifacts = artifacts_of(first, second)
    assert await fetched(artifacts) == DATA
    assert (first.offsets, second.offsets) == ([0], [3 * CHUNK])
    assert artifacts.counters["resumed"] == 1


async def test_the_next_attempt_continues_the_transfer_of_a_single_failing_worker() -> None:
    sender = FakeWorker(dies_after=2 * CHUNK)
    artifacts = artifacts_of(sender)
    assert isinstance(await fetch_error(artifacts), WorkerLost)
    assert sender.offsets == [0, 2 * CHUNK]
    sender.dies_after = None
    assert await fetched(artifacts) == DATA
    assert sender.offsets[-1] == 4 * CHUNK
    assert artifacts.counters["failed"] == 1


async def test_wrong_content_is_a_typed_error_that_is_counted_and_not_retried() -> None:
    wrong = FakeWorker(b"x" * len(DATA), advertised=DATA)
    artifacts = artifacts_of(wrong)
    for _ in range(3):
        error = await fetch_error(artifacts)
        assert isinstance(error, InvalidRequest)
        assert error.reason == MISMATCH
        assert "sha256" in error.message
    assert wrong.offsets == [0], "its content is known to be wrong"
    registry = CollectorRegistry()
    registry.register(ArtifactCollector(artifacts, "p"))
    assert b'p_card_artifacts_total{result="mismatches"} 1.0' in generate_latest(registry)


async def test_a_worker_that_reports_another_file_is_not_read() -> None:
    other, right = FakeWorker(b"another"), FakeWorker()
    artifacts = artifacts_of(other, right)
    assert await fetched(artifacts) == DATA
    assert (other.offsets, right.offsets) == ([0], [0])
    assert artifacts.counters["mismatches"] == 1


async def test_two_workers_that_contributed_to_wrong_content_each_send_the_whole_artifact() -> None:
    wrong = FakeWorker(b"x" * len(DATA), advertised=DATA, dies_after=3 * CHUNK)
    right = FakeWorker()
    artifacts = artifacts_of(wrong, right)
    assert await fetched(artifacts) == DATA
    assert right.offsets == [3 * CHUNK, 0]


async def test_more_bytes_than_the_artifacts_size_are_rejected() -> None:
    flood = FakeWorker(DATA * 50, advertised=DATA)
    error = await fetch_error(artifacts_of(flood))
    assert error.reason == MISMATCH
    assert "in the card" in error.message


@pytest.mark.parametrize(
    ("error", "kind"),
    [(NotFound("no such"), Unavailable), (Unavailable("draining"), Unavailable)],
)
async def test_a_worker_without_the_artifact_makes_it_unavailable(
    error: MeshError, kind: type[MeshError]
) -> None:
    sender = FakeWorker()
    sender.error = error
    assert isinstance(await fetch_error(artifacts_of(sender)), kind)


async def test_without_workers_an_artifact_is_unavailable() -> None:
    error = await fetch_error(artifacts_of())
    assert isinstance(error, Unavailable)
    assert NAME in error.message


async def test_a_card_above_the_limits_is_rejected_without_a_request() -> None:
    sender = FakeWorker()
    huge = Artifact("0" * 64, ARTIFACT_BYTES_MAX + 1)
    error = await fetch_error(artifacts_of(sender), ModelCard(name="m", artifacts={NAME: huge}))
    assert error.field == f"artifacts.{NAME}.size"
    many = {f"a{i}": Artifact("0" * 64, ARTIFACT_BYTES_MAX) for i in range(3)}
    error = await fetch_error(artifacts_of(sender), ModelCard(name="m", artifacts=many))
    assert error.field == "artifacts"
    assert sender.offsets == []


async def test_the_time_between_two_chunks_is_limited() -> None:
    class Silent(FakeWorker):
        async def chunks(self, offset: int) -> AsyncIterator[engine_pb2.GetArtifactResponse]:
            await asyncio.Event().wait()
            yield engine_pb2.GetArtifactResponse()

    assert await fetched(artifacts_of(Silent(), FakeWorker(), chunk_timeout_s=0.3)) == DATA


def test_a_very_slow_worker_is_abandoned_in_time_and_the_next_attempt_continues() -> None:
    async def main() -> tuple[list[float], list[int], ArtifactFetcher]:
        loop = asyncio.get_running_loop()
        sender = SlowWorker(pause_s=9.0)  # of 11 chunks: 99 s in all
        artifacts = artifacts_of(sender, card_timeout_s=40.0)
        took = []
        for _ in range(2):
            began = loop.time()
            error = await fetch_error(artifacts)
            took.append(loop.time() - began)
            assert isinstance(error, DeadlineExceeded)
            assert NAME in error.message
            assert f"{len(DATA)} bytes" in error.message
        assert await fetched(artifacts) == DATA
        return took, sender.offsets, artifacts

    took, offsets, artifacts = run_virtually(main())
    assert took == [40.0, 40.0]
    assert offsets == sorted(offsets), "each attempt continues the last one"
    assert offsets[0] == 0 < offsets[-1]
    assert artifacts.counters["failed"] == 2


def test_another_worker_sends_the_rest_of_a_very_slow_transfer() -> None:
    async def main() -> tuple[float, list[int], list[int]]:
        slow, quick = SlowWorker(pause_s=9.0), FakeWorker()
        artifacts = artifacts_of(slow, quick, card_timeout_s=80.0)
        began = asyncio.get_running_loop().time()
        assert await fetched(artifacts) == DATA
        return asyncio.get_running_loop().time() - began, slow.offsets, quick.offsets

    took_s, slow, quick = run_virtually(main())
    assert took_s == 20.0, "a fourth of the time: two passes over two workers"
    assert (slow, quick) == ([0], [2 * CHUNK])


def test_two_cards_with_a_common_artifact_are_fetched_concurrently() -> None:
    async def main() -> None:
        artifacts = artifacts_of(SlowWorker(pause_s=1.0))
        one, other = (
            card_of(),
            ModelCard(name="n", artifacts={NAME: Artifact.of(DATA, inline=False)}),
        )
        got = await asyncio.gather(*(fetched(artifacts, card) for card in (one, one, other)))
        assert got == [DATA] * 3
        assert artifacts.counters["mismatches"] == 0

    run_virtually(main())


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 6 * CHUNK),
    deaths=st.lists(st.integers(1, 5).map(lambda n: n * CHUNK), max_size=4),
    lie=st.booleans(),
)
def test_with_any_failing_or_wrong_workers_the_bytes_are_right_or_an_error_is_raised(
    size: int, deaths: list[int], lie: bool
) -> None:
    data = DATA[:size]

    async def run() -> None:
        senders = [FakeWorker(data, dies_after=after) for after in deaths]
        if lie:
            senders.append(FakeWorker(b"x" * size, advertised=data))
        senders.append(FakeWorker(data))
        assert await fetched(artifacts_of(*senders), card_of(data)) == data

    asyncio.run(run())
