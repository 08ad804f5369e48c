"""Decode legs that wait for KV pages, and images, in the adapter over a fake SGLang."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import Overloaded, WorkerLost
from common.request.preprocessed import BootstrapInfo, PreprocessedRequest, TokenIds
from worker_svc.engines.contract import GenerateContext
from worker_svc.engines.handoff import NO_BLOCKS
from worker_svc.engines.sglang import engine as engine_module
from worker_svc.engines.sglang.config import SglangConfig
from worker_svc.engines.sglang.engine import SglangEngine
from worker_svc.engines.sglang.media import Images
from worker_svc.engines.sglang.sampling import EngineProperties, SglangRequest

FACTS = EngineProperties(
    vocab_size=100,
    context_length=64,
    max_input_tokens=59,
    eos_ids=frozenset({2}),
    dp_size=1,
    role="decode",
)


@dataclass
class Snapshot:
    timestamp: float = field(default_factory=time.time)
    dp_rank: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 1
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 160
    total_prefill_uncached_tokens: int = 0
    disaggregation: Any = None
    queues: Any = field(default_factory=lambda: SimpleNamespace(prealloc_ready=1))


class FakeSglang:
    """The part of `sglang.Engine` that a leg uses. late_chunks: chunks sent before the abort takes
    effect.
    """

    def __init__(self, *late_chunks: list[int]) -> None:
        self.snapshot = Snapshot()
        self.abort_error: list[str] = []
        self.may_respond = asyncio.Event()
        self._late_chunks = late_chunks
        self.tokenizer_manager = SimpleNamespace(
            load_snapshot_reader=SimpleNamespace(read_all=lambda: [self.snapshot]),
            abort_request=lambda rid: self.abort_error.append(rid),
        )

    async def async_generate(self, **_: Any) -> AsyncGenerator[dict[str, Any], None]:
        return self._stream()

    async def _stream(self) -> AsyncGenerator[dict[str, Any], None]:
        await self.may_respond.wait()
        for ids in self._late_chunks:
            yield {"output_ids": ids, "meta_info": {"finish_reason": None}}
        yield {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}


def engine_over(fake: FakeSglang) -> SglangEngine:
    """A decode worker without a waiting time for legs."""
    engine = SglangEngine(SglangConfig(role="decode", handoff_timeout_s=0.0))
    engine._engine, engine._properties = fake, FACTS
    return engine


async def read_until_aborted(engine: SglangEngine, fake: FakeSglang) -> None:
    """One read may not suffice: on a loaded machine fresh snapshots age."""
    async with asyncio.timeout(30):
        while not fake.abort_error:
            fake.snapshot = Snapshot()
            await engine._read_loads()


async def run_starved_leg(fake: FakeSglang) -> tuple[list[int], Exception]:
    """The tokens received nevertheless, and the end."""
    engine, tokens = engine_over(fake), list[int]()

    async def leg() -> None:
        room = BootstrapInfo("10.0.0.1", 9000, 1)
        request = PreprocessedRequest(token_ids=TokenIds.of([5, 6, 7]), bootstrap_info=room)
        async for one in engine.generate(request, GenerateContext("leg")):
            tokens.extend(one.token_ids)

    task = asyncio.create_task(leg())
    await read_until_aborted(engine, fake)
    fake.may_respond.set()
    with pytest.raises((Overloaded, WorkerLost)) as caught:
        await task
    return tokens, caught.value


async def test_a_starved_leg_ends_with_a_no_blocks_error() -> None:
    tokens, error = await run_starved_leg(FakeSglang())
    assert tokens == []
    assert isinstance(error, Overloaded)
    assert error.reason == NO_BLOCKS


async def test_a_first_token_that_crosses_the_abort_shows_that_the_leg_had_pages() -> None:
    tokens, error = await run_starved_leg(FakeSglang([4]))
    assert tokens == [4]
    assert isinstance(error, WorkerLost)
    assert error.retryable


async def test_only_a_fresh_snapshot_counts() -> None:
    """SGLang writes a snapshot every few steps, and none while it is stopped."""
    fake = FakeSglang()
    engine = engine_over(fake)
    engine._decode_queue.open("leg", 0, time.monotonic() - 100.0)
    fake.snapshot = Snapshot(timestamp=time.time() - 30.0)
    await engine._read_loads()
    assert fake.abort_error == []
    await read_until_aborted(engine, fake)
    assert fake.abort_error == ["leg"]


class NoTrials:
    async def run(self, *_: object) -> None: ...


async def test_images_that_wait_too_long_for_others_are_refused_and_may_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "sglang.srt.managers.schedule_batch"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(Modality=0, MultimodalDataItem=0))
    monkeypatch.setattr(engine_module, "IMAGE_WAIT_S", 0.01)
    fake = FakeSglang()
    fake.tokenizer_manager.processor = SimpleNamespace(image_processor=None)
    engine = engine_over(fake)
    engine._trials = NoTrials()  # type: ignore[assignment]
    preparing: list[bool] = []
    request = SglangRequest({}, images=Images([b"x"], [(1, 2)]))
    ctx = GenerateContext("late", on_preparing=preparing.append)
    async with engine._image_lock:
        with pytest.raises(Overloaded, match="images of other requests") as refused:
            await engine._start_generation(request, "late", ctx)
    assert refused.value.retryable
    assert preparing == [True, False], "the request does not count as lost meanwhile"
