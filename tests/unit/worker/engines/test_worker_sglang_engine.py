"""Decode legs that wait for KV pages, on SGLang's adapter over an SGLang that is played."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import Overloaded, WorkerLost
from common.request.preprocessed import BootstrapInfo, PreprocessedRequest, TokenIds
from worker_svc.engines.contract import EngineContext, GenerateContext
from worker_svc.engines.handoff import NO_BLOCKS
from worker_svc.engines.sglang.engine import SglangConfig, SglangEngine
from worker_svc.engines.sglang.sampling import EngineProperties

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


class Played:
    """As much of `sglang.Engine` as a leg meets. says: chunks before it ends by its abort."""

    def __init__(self, *says: list[int]) -> None:
        self.snapshot = Snapshot()
        self.abort_error: list[str] = []
        self.may_speak = asyncio.Event()
        self._says = says
        self.tokenizer_manager = SimpleNamespace(
            load_snapshot_reader=SimpleNamespace(read_all=lambda: [self.snapshot]),
            abort_request=lambda rid: self.abort_error.append(rid),
        )

    async def async_generate(self, **_: Any) -> AsyncGenerator[dict[str, Any], None]:
        return self._stream()

    async def _stream(self) -> AsyncGenerator[dict[str, Any], None]:
        await self.may_speak.wait()
        for ids in self._says:
            yield {"output_ids": ids, "meta_info": {"finish_reason": None}}
        yield {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}


def engine_over(played: Played) -> SglangEngine:
    """A decode worker whose legs have waited long enough as soon as they are there."""
    engine = SglangEngine(SglangConfig(role="decode", handoff_timeout_s=0.0))
    engine._engine, engine._properties = played, FACTS
    return engine


async def read_until_aborted(engine: SglangEngine, played: Played) -> None:
    """One reading need not do: a loaded machine makes fresh snapshots old."""
    async with asyncio.timeout(30):
        while not played.abort_error:
            played.snapshot = Snapshot()
            await engine._read_loads()


async def heard_of_a_starved_leg(played: Played) -> tuple[list[int], Exception]:
    """The tokens that it had all the same, and how it ended."""
    engine, heard = engine_over(played), list[int]()

    async def leg() -> None:
        room = BootstrapInfo("10.0.0.1", 9000, 1)
        request = PreprocessedRequest(token_ids=TokenIds.of([5, 6, 7]), bootstrap_info=room)
        async for one in engine.generate(request, GenerateContext(EngineContext("leg"))):
            heard.extend(one.token_ids)

    task = asyncio.create_task(leg())
    await read_until_aborted(engine, played)
    played.may_speak.set()
    with pytest.raises((Overloaded, WorkerLost)) as caught:
        await task
    return heard, caught.value


async def test_a_starved_leg_ends_with_a_no_blocks_error() -> None:
    heard, error = await heard_of_a_starved_leg(Played())
    assert heard == []
    assert isinstance(error, Overloaded)
    assert error.reason == NO_BLOCKS


async def test_a_first_token_that_crosses_the_abort_shows_that_the_leg_had_pages() -> None:
    heard, error = await heard_of_a_starved_leg(Played([4]))
    assert heard == [4]
    assert isinstance(error, WorkerLost)
    assert error.retryable


async def test_only_a_fresh_snapshot_counts() -> None:
    """SGLang writes one each few steps, and none while it stands still."""
    played = Played()
    engine = engine_over(played)
    engine._decode_queue.open("leg", 0, time.monotonic() - 100.0)
    played.snapshot = Snapshot(timestamp=time.time() - 30.0)
    await engine._read_loads()
    assert played.abort_error == []
    await read_until_aborted(engine, played)
    assert played.abort_error == ["leg"]
