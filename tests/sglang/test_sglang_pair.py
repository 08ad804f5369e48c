"""Prefill and decode in two worker processes with KV transfers; finally one of them is killed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from common.errors import InvalidRequest, Overloaded, WorkerLost
from common.request.preprocessed import FinishReason, PreprocessedRequest, StopConditions
from common.wire.preprocessed import finish_reason_from_proto
from kvmesh.engine.v1 import engine_pb2 as pb
from tests.sglang.conftest import Trio
from tests.sglang.sglang_workers import (
    HANDOFF_S,
    START_S,
    WAIT_S,
    Generated,
    WorkerProcess,
    greedy_request,
    make_bootstrap_info,
)
from worker_svc.engines.contract import GenerateContext
from worker_svc.engines.handoff import NO_BLOCKS

if TYPE_CHECKING:
    from worker_svc.engines.sglang.engine import SglangEngine

NS = "default"
PROMPT = list(range(100, 140))


async def alone(engine: SglangEngine, request: PreprocessedRequest) -> list[int]:
    ctx = GenerateContext("alone")
    return [token async for one in engine.generate(request, ctx) for token in one.token_ids]


async def together(
    trio: Trio, request: PreprocessedRequest, room: int
) -> tuple[Generated, Generated]:
    """Both legs as a frontend starts them: at once, prefill with max_tokens 1."""
    request = replace(request, bootstrap_info=make_bootstrap_info(await trio.prefill.info(), room))
    stop = replace(request.stop_conditions, max_tokens=1, min_tokens=None)
    first = replace(request, stop_conditions=stop)
    async with asyncio.timeout(WAIT_S):
        return tuple(  # type: ignore[return-value]
            await asyncio.gather(
                trio.prefill.generate(first, f"p{room}"), trio.decode.generate(request, f"d{room}")
            )
        )


@pytest.mark.row("S4-16", "S4-17", "S4-18", "S4-19")
async def test_only_prefill_advertises_a_handoff_address(trio: Trio) -> None:
    prefill, decode = await trio.prefill.info(), await trio.decode.info()
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert prefill.bootstrap_host == "127.0.0.1"
    assert prefill.bootstrap_port > 0
    assert not decode.HasField("bootstrap_host")
    assert not decode.HasField("bootstrap_port")
    assert prefill.transfer_group == decode.transfer_group != ""
    assert prefill.card_checksum == decode.card_checksum


async def test_the_decode_worker_advertises_why_it_publishes_no_blocks(trio: Trio) -> None:
    prefill, decode = await trio.prefill.info(), await trio.decode.info()
    assert prefill.kv_index == "events"
    assert decode.kv_index == "none"
    assert "keeps no prefixes" in decode.kv_index_reason
    assert not decode.local_prefill


async def test_a_pair_returns_what_one_engine_returns(trio: Trio) -> None:
    rng = Random(1)
    for turn, length in enumerate([5, 16, 33, 200, 700, 5, 16, 33, 64, 129, 480, 700]):
        prompt = [rng.randrange(3, 4000) for _ in range(length)]
        request = greedy_request(prompt, 24)
        expected = await alone(trio.aggregated, request)
        prefill, decode = await together(trio, request, rng.getrandbits(62))
        assert decode.token_ids == expected, f"turn {turn}, {length} tokens"
        assert prefill.token_ids == expected[:1]
        assert prefill.last.usage.prompt_tokens == length
        assert finish_reason_from_proto(prefill.last.finish_reason) is FinishReason.LENGTH
        assert prefill.last.HasField("prefill_result")
        assert not decode.last.HasField("prefill_result")
    await trio.prefill.settled()
    await trio.decode.settled()


async def test_sixteen_concurrent_pairs_do_not_mix(trio: Trio) -> None:
    requests = [greedy_request([500 + i] * (20 + 7 * i), 16) for i in range(16)]
    expected = [await alone(trio.aggregated, one) for one in requests]
    pairs = await asyncio.gather(*(together(trio, one, 7000 + i) for i, one in enumerate(requests)))
    assert [decode.token_ids for _, decode in pairs] == expected
    await trio.prefill.settled()
    await trio.decode.settled()


async def test_output_that_ends_at_its_first_token_ends_at_decode_too(trio: Trio) -> None:
    request = greedy_request(PROMPT, 8)
    first = (await alone(trio.aggregated, request))[0]
    stop = StopConditions(stop_token_ids_hidden=(first,), max_tokens=8)
    _, decode = await together(trio, replace(request, stop_conditions=stop), 8001)
    assert decode.token_ids == []
    assert finish_reason_from_proto(decode.last.finish_reason) is FinishReason.STOP
    await trio.prefill.settled()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_without_a_rendezvous_is_rejected(trio: Trio, role: str) -> None:
    worker = getattr(trio, role)
    with pytest.raises(InvalidRequest) as caught:
        await worker.generate(greedy_request(PROMPT, 4), "lonely")
    assert caught.value.field == "bootstrap_info"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_probe_needs_no_partner(trio: Trio, role: str) -> None:
    probe = replace(greedy_request([7]), is_probe=True)
    response = await getattr(trio, role).generate(probe, "probe", timeout_s=10)
    assert len(response.token_ids) == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_idle_engine_responds_to_a_probe(trio: Trio, role: str) -> None:
    worker = getattr(trio, role)
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        counters = (await worker.info()).counters
        if counters["canaries"] > counters["canaries_failed"]:
            break
        assert loop.time() - began < WAIT_S, "no probe succeeded"
        await asyncio.sleep(0.1)
    await worker.settled()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_without_its_partner_ends_in_time_and_leaves_no_open_room(
    trio: Trio, role: str
) -> None:
    worker = getattr(trio, role)
    info = await trio.prefill.info()
    request = replace(
        greedy_request(PROMPT, 4), bootstrap_info=make_bootstrap_info(info, 9000 + len(role))
    )
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(WorkerLost) as caught:
        await worker.generate(request, "alone")
    assert caught.value.retryable
    assert loop.time() - began < HANDOFF_S + WAIT_S / 2
    await worker.settled()


async def test_a_decode_worker_without_free_kv_pages_reports_it_and_continues(trio: Trio) -> None:
    """Regression: prefill reported that its partner never connected."""
    rng = Random(5)
    long = [greedy_request([rng.randrange(3, 4000) for _ in range(2048)], 2000) for _ in range(2)]
    late = greedy_request([rng.randrange(3, 4000) for _ in range(2700)], 4)
    loop = asyncio.get_running_loop()
    running = [asyncio.create_task(together(trio, one, 9200 + i)) for i, one in enumerate(long)]
    try:
        await trio.decode.running(len(long))
        info = await trio.prefill.info()
        room = replace(late, bootstrap_info=make_bootstrap_info(info, 9210))
        stop = replace(room.stop_conditions, max_tokens=1)
        first = asyncio.create_task(
            trio.prefill.generate(replace(room, stop_conditions=stop), "late-prefill")
        )
        began = loop.time()
        with pytest.raises(Overloaded) as caught:
            await trio.decode.generate(room, "late")
        assert caught.value.reason == NO_BLOCKS
        assert caught.value.retry_after_s == HANDOFF_S
        assert loop.time() - began >= HANDOFF_S / 2
        with pytest.raises(WorkerLost):
            await first
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    await trio.prefill.settled()
    await trio.decode.settled()
    _, decode = await together(trio, late, 9220)
    assert len(decode.token_ids) == 4


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_abort_ends_a_leg_that_waits_for_its_partner(trio: Trio, role: str) -> None:
    worker = getattr(trio, role)
    info = await trio.prefill.info()
    request = replace(
        greedy_request(PROMPT, 4), bootstrap_info=make_bootstrap_info(info, 9100 + len(role))
    )
    leg = asyncio.create_task(worker.generate(request, f"waits-{role}"))
    await worker.settled(rooms=1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await worker.stub.Abort(pb.AbortRequest(request_id=f"waits-{role}"), timeout=WAIT_S)
    response = await leg
    assert finish_reason_from_proto(response.last.finish_reason) is FinishReason.CANCELLED
    assert loop.time() - began < HANDOFF_S / 2, "it did not wait for the timeout"
    await worker.settled()


@pytest.mark.row("S4-44")
async def test_a_start_that_sglang_rejects_reports_the_reason_and_leaves_no_process(
    trio: Trio, tmp_path: Path
) -> None:
    model = trio.aggregated.config.model_dir
    async with WorkerProcess.started(
        "aggregated", model=model, folder=tmp_path, engine_args={"no_such_argument": 1}
    ) as worker:
        assert await asyncio.wait_for(worker.process.wait(), START_S) == 1
    log = (tmp_path / "aggregated.log").read_text()
    assert "SGLang rejected its arguments" in log
    assert "no_such_argument" in log
