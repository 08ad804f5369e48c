"""Fetching what a card does not carry from workers that die midway, lie, or stay silent."""

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


class Holder:
    """A worker with content. dies_after: bytes it sends in a call until it is lost; None: never.

    asked: the offsets it was asked for.
    """

    def __init__(
        self, data: bytes = DATA, *, dies_after: int | None = None, claims: bytes | None = None
    ) -> None:
        self.data = data
        self.dies_after = dies_after
        self.claimed = Artifact.of(data if claims is None else claims)
        self.asked: list[int] = []
        self.error: MeshError | None = None

    async def chunks(self, offset: int) -> AsyncIterator[engine_pb2.GetArtifactResponse]:
        self.asked.append(offset)
        if self.error is not None:
            raise self.error
        sent = 0
        for at in range(offset, max(offset + 1, len(self.data)), CHUNK):
            if self.dies_after is not None and sent >= self.dies_after:
                raise WorkerLost("connection reset", retryable=True)
            part = engine_pb2.GetArtifactResponse(data=self.data[at : at + CHUNK])
            if at == offset:
                part.sha256, part.size = self.claimed.sha256, self.claimed.size
            sent += len(part.data)
            yield part


def card_of(data: bytes = DATA, *, inline: bool = False) -> ModelCard:
    return ModelCard(name="m", artifacts={NAME: Artifact.of(data, inline=inline)})


class Trickle(Holder):
    """Sends a chunk every `pause_s`, never late enough to be called silent."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s

    async def chunks(self, offset: int) -> AsyncIterator[engine_pb2.GetArtifactResponse]:
        async for part in super().chunks(offset):
            await asyncio.sleep(self.pause_s)
            yield part


def artifacts_of(
    *holders: Holder, chunk_timeout_s: float = 10.0, card_timeout_s: float = 120.0
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
        for number in range(1, len(holders) + 1)
    ]

    @asynccontextmanager
    async def open_artifact(
        worker: Instance, name: str, offset: int
    ) -> AsyncIterator[AsyncIterator[engine_pb2.GetArtifactResponse]]:
        assert name == NAME
        yield holders[worker.id - 1].chunks(offset)

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


async def refusal(artifacts: ArtifactFetcher, card: ModelCard | None = None) -> MeshError:
    with pytest.raises(MeshError) as caught:
        await artifacts.complete_card(card or card_of())
    return caught.value


async def test_what_is_inline_needs_nobody() -> None:
    card = card_of(inline=True)
    assert await artifacts_of().complete_card(card) is card


async def test_an_artifact_comes_in_chunks_and_the_card_stays_the_same_card() -> None:
    artifacts = artifacts_of(Holder())
    card = card_of()
    whole = await artifacts.complete_card(card)
    assert whole.artifacts[NAME].inline == DATA
    assert whole.checksum == card.checksum
    assert (artifacts.counters["fetched"], artifacts.counters["bytes"]) == (1, len(DATA))


async def test_an_empty_artifact_is_one_too() -> None:
    assert await fetched(artifacts_of(Holder(b"")), card_of(b"")) == b""


async def test_a_worker_that_dies_midway_is_followed_by_another_from_there_on() -> None:
    first, second = Holder(dies_after=3 * CHUNK), Holder()
    artifacts = artifacts_of(first, second)
    assert await fetched(artifacts) == DATA
    assert (first.asked, second.asked) == ([0], [3 * CHUNK])
    assert artifacts.counters["resumed"] == 1


async def test_a_lone_worker_that_keeps_failing_is_continued_at_the_next_try() -> None:
    holder = Holder(dies_after=2 * CHUNK)
    artifacts = artifacts_of(holder)
    assert isinstance(await refusal(artifacts), WorkerLost)
    assert holder.asked == [0, 2 * CHUNK]
    holder.dies_after = None
    assert await fetched(artifacts) == DATA
    assert holder.asked[-1] == 4 * CHUNK
    assert artifacts.counters["failed"] == 1


async def test_wrong_content_is_a_typed_error_and_counted_and_not_fetched_again() -> None:
    liar = Holder(b"x" * len(DATA), claims=DATA)
    artifacts = artifacts_of(liar)
    for _ in range(3):
        error = await refusal(artifacts)
        assert isinstance(error, InvalidRequest)
        assert error.reason == MISMATCH
        assert "sha256" in error.message
    assert liar.asked == [0], "its content is known to be wrong"
    registry = CollectorRegistry()
    registry.register(ArtifactCollector(artifacts, "p"))
    assert b'p_card_artifacts_total{result="mismatches"} 1.0' in generate_latest(registry)


async def test_a_worker_that_says_itself_that_it_has_another_file_sends_none_of_it() -> None:
    other, right = Holder(b"another"), Holder()
    artifacts = artifacts_of(other, right)
    assert await fetched(artifacts) == DATA
    assert (other.asked, right.asked) == ([0], [0])
    assert artifacts.counters["mismatches"] == 1


async def test_of_two_that_made_a_wrong_whole_each_is_asked_for_all_of_it() -> None:
    liar = Holder(b"x" * len(DATA), claims=DATA, dies_after=3 * CHUNK)
    right = Holder()
    artifacts = artifacts_of(liar, right)
    assert await fetched(artifacts) == DATA
    assert right.asked == [3 * CHUNK, 0]


async def test_more_bytes_than_the_card_says_are_not_taken() -> None:
    flood = Holder(DATA * 50, claims=DATA)
    error = await refusal(artifacts_of(flood))
    assert error.reason == MISMATCH
    assert "in the card" in error.message


@pytest.mark.parametrize(
    ("error", "kind"),
    [(NotFound("no such"), Unavailable), (Unavailable("draining"), Unavailable)],
)
async def test_a_worker_that_does_not_have_it_is_said_so(
    error: MeshError, kind: type[MeshError]
) -> None:
    holder = Holder()
    holder.error = error
    assert isinstance(await refusal(artifacts_of(holder)), kind)


async def test_where_there_is_nobody_to_ask_that_is_said() -> None:
    error = await refusal(artifacts_of())
    assert isinstance(error, Unavailable)
    assert NAME in error.message


async def test_a_card_beyond_the_bounds_is_refused_before_anybody_is_asked() -> None:
    holder = Holder()
    huge = Artifact("0" * 64, ARTIFACT_BYTES_MAX + 1)
    error = await refusal(artifacts_of(holder), ModelCard(name="m", artifacts={NAME: huge}))
    assert error.field == f"artifacts.{NAME}.size"
    many = {f"a{i}": Artifact("0" * 64, ARTIFACT_BYTES_MAX) for i in range(3)}
    error = await refusal(artifacts_of(holder), ModelCard(name="m", artifacts=many))
    assert error.field == "artifacts"
    assert holder.asked == []


async def test_silence_between_two_chunks_is_bounded() -> None:
    class Silent(Holder):
        async def chunks(self, offset: int) -> AsyncIterator[engine_pb2.GetArtifactResponse]:
            await asyncio.Event().wait()
            yield engine_pb2.GetArtifactResponse()

    assert await fetched(artifacts_of(Silent(), Holder(), chunk_timeout_s=0.3)) == DATA


def test_a_peer_that_trickles_is_given_up_in_time_and_continued_at_the_next_try() -> None:
    async def main() -> tuple[list[float], list[int], ArtifactFetcher]:
        loop = asyncio.get_running_loop()
        holder = Trickle(pause_s=9.0)  # of 11 chunks: 99 s in all
        artifacts = artifacts_of(holder, card_timeout_s=40.0)
        took = []
        for _ in range(2):
            began = loop.time()
            error = await refusal(artifacts)
            took.append(loop.time() - began)
            assert isinstance(error, DeadlineExceeded)
            assert NAME in error.message
            assert f"{len(DATA)} bytes" in error.message
        assert await fetched(artifacts) == DATA
        return took, holder.asked, artifacts

    took, asked, artifacts = run_virtually(main())
    assert took == [40.0, 40.0]
    assert asked == sorted(asked), "it goes on where it was"
    assert asked[0] == 0 < asked[-1]
    assert artifacts.counters["failed"] == 2


def test_while_one_peer_trickles_another_is_asked_for_the_rest() -> None:
    async def main() -> tuple[float, list[int], list[int]]:
        slow, quick = Trickle(pause_s=9.0), Holder()
        artifacts = artifacts_of(slow, quick, card_timeout_s=80.0)
        began = asyncio.get_running_loop().time()
        assert await fetched(artifacts) == DATA
        return asyncio.get_running_loop().time() - began, slow.asked, quick.asked

    took_s, slow, quick = run_virtually(main())
    assert took_s == 20.0, "a fourth of the time: two passes over two workers"
    assert (slow, quick) == ([0], [2 * CHUNK])


def test_two_cards_that_share_a_file_are_fetched_at_once_and_mix_nothing_up() -> None:
    async def main() -> None:
        artifacts = artifacts_of(Trickle(pause_s=1.0))
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
def test_whatever_dies_or_lies_the_bytes_are_right_or_there_is_an_error(
    size: int, deaths: list[int], lie: bool
) -> None:
    data = DATA[:size]

    async def run() -> None:
        holders = [Holder(data, dies_after=after) for after in deaths]
        if lie:
            holders.append(Holder(b"x" * size, claims=data))
        holders.append(Holder(data))
        assert await fetched(artifacts_of(*holders), card_of(data)) == data

    asyncio.run(run())
