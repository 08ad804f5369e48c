"""Prefill and decode sims over real sockets: in one process, and as two worker processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest

from common.errors import InvalidRequest, MeshError, Unavailable, WorkerLost
from common.request.preprocessed import (
    BootstrapInfo,
    PrefillResult,
    PreprocessedRequest,
    PromptTokensDetails,
)
from common.rpc import channel as rpc
from common.rpc.status import mesh_error_from_rpc
from common.wire.preprocessed import dataclass_from_proto, to_proto
from kvmesh.engine.v1 import engine_pb2 as pb
from kvmesh.engine.v1 import engine_pb2_grpc
from kvmesh.types.v1 import load_pb2
from tests.kit.processes import Service
from tests.kit.requests import preprocessed_request
from tests.kit.waiting import WAIT_S, until
from worker_svc.engines.contract import (
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
)
from worker_svc.engines.handoff import NO_PARTNER, PEER_LOST
from worker_svc.engines.sim.config import (
    SIM_MODEL_DIR,
    SimConfig,
    SimHandoffConfig,
    SimModel,
    load_sim_model,
)
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.network import FRAME_BYTES_MAX
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.token_oracle import TokenOracle

MODEL = SimModel(tuple(range(100, 900)), (2, 3), 32_768)
TOKEN_ORACLE = TokenOracle(MODEL.word_ids, 2)
SHIPPED = load_sim_model(SIM_MODEL_DIR)
SHIPPED_TOKEN_ORACLE = TokenOracle(SHIPPED.word_ids, SHIPPED.eos_ids[0])
# Virtual-time tests prove how soon a lost peer is detected (test_worker_sim_transfer_server.py);
# these prove that it is detected on real sockets.
Messages: TypeAlias = list[pb.GenerateResponse] | MeshError
TOKENS = 24

pytestmark = pytest.mark.slow
request = partial(preprocessed_request, max_tokens=TOKENS)


def prompt_of(number: int) -> list[int]:
    """Some share a prefix; none is a prefix of another."""
    return [*([number % 5] * 64), *range(200, 200 + number % 40), number + 1000]


# Two engines in one process.


class Engines:
    """Three engines of one model; the pair uses real sockets."""

    def __init__(self, config: SimConfig, handoff: SimHandoffConfig) -> None:
        self.prefill = SimEngine(
            replace(config, handoff=replace(handoff, role="prefill")), model=MODEL
        )
        self.decode = SimEngine(
            replace(config, handoff=replace(handoff, role="decode")), model=MODEL
        )
        self.aggregated = SimEngine(config, model=MODEL)
        self.endpoint = EngineConfig()

    def bootstrap(self, room: int) -> BootstrapInfo:
        assert self.endpoint.bootstrap_host is not None
        assert self.endpoint.bootstrap_port is not None
        return BootstrapInfo(self.endpoint.bootstrap_host, self.endpoint.bootstrap_port, room)

    def is_idle(self) -> bool:
        return all(
            (load.rooms_open, load.kv_used_blocks, load.running, load.waiting) == (0, 0, 0, 0)
            for engine in (self.prefill, self.decode)
            for load in engine.loads()
        )

    async def check_idle(self) -> None:
        await until(self.is_idle, "rooms closed, blocks free")
        for engine in (self.prefill, self.decode):
            engine.blocks.check()
            assert (engine.counters["corrupt_pages"], engine.counters["corrupt_tokens"]) == (0, 0)


@asynccontextmanager
async def engines(config: SimConfig | None = None, **handoff: Any) -> AsyncIterator[Engines]:
    them = Engines(config or SimConfig(timing=Timing(speedup=20)), SimHandoffConfig(**handoff))
    them.endpoint = await them.prefill.start(1)
    await them.decode.start(2)
    await them.aggregated.start(3)
    try:
        yield them
    finally:
        for engine in (them.prefill, them.decode, them.aggregated):
            await engine.cleanup()


async def run(
    engine: SimEngine, preprocessed: PreprocessedRequest, ctx: GenerateContext | None = None
) -> list[LLMEngineOutput] | MeshError:
    """All chunks, or the error."""
    stream = engine.generate(preprocessed, ctx or GenerateContext("r"))
    try:
        async with aclosing(stream) as outputs:
            return [output async for output in outputs]
    except MeshError as error:
        return error


def tokens_of(outputs: list[LLMEngineOutput] | MeshError) -> list[int]:
    assert isinstance(outputs, list), f"it failed: {outputs!r}"
    return [token for output in outputs for token in output.token_ids]


async def test_a_hundred_concurrent_pairs_return_the_output_of_an_aggregated_engine() -> None:
    async with engines() as them:

        async def one(number: int) -> None:
            prompt = prompt_of(number)
            preprocessed = request(prompt, bootstrap_info=them.bootstrap(number))
            prefill, decode, alone = await asyncio.gather(
                run(them.prefill, preprocessed),
                run(them.decode, preprocessed),
                run(them.aggregated, request(prompt)),
            )
            oracle = TOKEN_ORACLE.continue_tokens(prompt, TOKENS)
            assert tokens_of(decode) == tokens_of(alone) == oracle
            assert tokens_of(prefill) == oracle[:1]

        await asyncio.gather(*[one(number) for number in range(100)])
        assert them.is_idle()
        await them.check_idle()
        for engine in (them.prefill, them.decode):
            assert engine.counters["rooms_handed_over"] == 100
        assert them.prefill.counters["pages_written"] == them.decode.counters["pages_received"]


async def test_a_hundred_completed_prefills_decode_to_the_output_of_an_aggregated_engine() -> None:
    async with engines(mode="completed") as them:

        async def one(number: int) -> None:
            prompt = prompt_of(number)
            prefill = await run(them.prefill, request(prompt, max_tokens=1))
            oracle = TOKEN_ORACLE.continue_tokens(prompt, TOKENS)
            assert isinstance(prefill, list)
            assert tokens_of(prefill) == oracle[:1]
            params = prefill[-1].disaggregated_params
            if params is None:
                assert oracle == []
                return
            preprocessed = request(prompt, prefill_result=PrefillResult(params))
            assert tokens_of(await run(them.decode, preprocessed)) == oracle

        await asyncio.gather(*[one(number) for number in range(100)])
        await them.check_idle()
        assert them.endpoint.disaggregated_endpoint is None


async def test_aborted_or_dropped_pairs_do_not_affect_other_pairs() -> None:
    rng = Random(1)
    # A page takes 2 ms: transfers are in flight much of the time.
    config = SimConfig(timing=Timing(), total_kv_blocks=200)
    async with engines(config, gb_per_s=1.0, chunk_pages=1) as them:
        responded = 0

        async def one(number: int) -> None:
            nonlocal responded
            # Sleep: the requests start at random times.
            await asyncio.sleep(rng.uniform(0, 1.0))
            prompt = prompt_of(number)
            preprocessed = request(prompt, bootstrap_info=them.bootstrap(number))
            contexts = [GenerateContext(f"{leg}{number}") for leg in "pd"]
            tasks = [
                asyncio.create_task(run(engine, preprocessed, ctx))
                for engine, ctx in zip((them.prefill, them.decode), contexts, strict=True)
            ]
            if rng.random() < 0.7:
                leg = rng.randrange(2)
                await asyncio.wait(tasks, timeout=rng.uniform(0, 0.3))
                if rng.random() < 0.5:
                    contexts[leg].stop_generating("test")
                else:
                    tasks[leg].cancel()
            _, late = await asyncio.wait(tasks, timeout=WAIT_S)
            assert not late
            if not tasks[1].cancelled() and not contexts[1].is_stopped:
                end = tasks[1].result()
                if isinstance(end, list):
                    assert tokens_of(end) == TOKEN_ORACLE.continue_tokens(prompt, TOKENS)
                    responded += 1
                else:
                    assert isinstance(end, WorkerLost)
                    assert end.retryable

        await asyncio.gather(*[one(number) for number in range(150)])
        await them.check_idle()
        assert responded > 20
        assert them.decode.counters["aborts_forced"] == 0
        control = request(prompt_of(7), bootstrap_info=them.bootstrap(2**63))
        _, decode = await asyncio.gather(run(them.prefill, control), run(them.decode, control))
        assert tokens_of(decode) == TOKEN_ORACLE.continue_tokens(prompt_of(7), TOKENS)


@pytest.mark.parametrize("phase", ["waiting", "computing", "transfer", "decoding"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_ends_in_any_phase_frees_the_other_side(role: str, phase: str) -> None:
    # The prompt takes 50 ms, the transfer 160, and then every token 6.
    async with engines(SimConfig(eos_one_in=0), gb_per_s=0.5, chunk_pages=1) as them:
        prompt = [1] * 600
        preprocessed = request(prompt, max_tokens=200, bootstrap_info=them.bootstrap(1))
        victim, other = (
            (them.prefill, them.decode) if role == "prefill" else (them.decode, them.prefill)
        )
        if phase == "waiting":
            them.prefill.freeze()
        tasks = [asyncio.create_task(run(engine, preprocessed)) for engine in (victim, other)]
        decode = them.decode.counters
        match phase:
            case "waiting" | "computing":
                await until(
                    lambda: them.prefill.loads()[0].rooms_open, "the leg has arrived at the worker"
                )
                await until(lambda: them.decode.loads()[0].kv_used_blocks, "decode has blocks")
            case "transfer":
                await until(
                    lambda: them.decode.counters["pages_received"] > decode["pages_received"],
                    "a page has arrived",
                )
            case _:
                await until(lambda: them.decode.loads()[0].running, "decode runs")
        await victim.cleanup()
        await asyncio.wait(tasks, timeout=WAIT_S)
        lost = await tasks[0]
        is_done = role == "prefill" and phase == "decoding"
        assert isinstance(lost, list if is_done else WorkerLost)
        await asyncio.wait(tasks, timeout=WAIT_S)
        end = tasks[1].result()
        if phase == "decoding":
            assert isinstance(end, list)
        else:
            assert isinstance(end, WorkerLost)
            assert end.retryable
        await them.check_idle()


async def test_connections_of_malformed_or_silent_peers_are_closed() -> None:
    async with engines(timeout_s=0.5) as them:
        bootstrap = them.bootstrap(1)
        address = bootstrap.bootstrap_host, bootstrap.bootstrap_port
        silent, _silent_writer = await asyncio.open_connection(*address)
        for sent in (
            b"GET / HTTP/1.1\r\n",
            (FRAME_BYTES_MAX + 1).to_bytes(4, "little"),
            b"\1\0\0\0\xff",
            b"\0\0\0\0",
        ):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()
        assert await asyncio.wait_for(silent.read(), WAIT_S) == b""
        _silent_writer.close()
        preprocessed = request(prompt_of(1), bootstrap_info=bootstrap)
        _, decode = await asyncio.gather(
            run(them.prefill, preprocessed), run(them.decode, preprocessed)
        )
        assert tokens_of(decode) == TOKEN_ORACLE.continue_tokens(prompt_of(1), TOKENS)
        await them.check_idle()


async def test_a_bootstrap_port_in_use_fails_the_start() -> None:
    async with engines() as them:
        handoff = SimHandoffConfig(role="prefill", port=them.bootstrap(1).bootstrap_port)
        other = SimEngine(SimConfig(handoff=handoff), model=MODEL)
        with pytest.raises(InvalidRequest, match="cannot listen") as refusal:
            await other.start(9)
        assert refusal.value.field == "bootstrap_port"
        await other.cleanup()


# Two worker processes.


class Worker:
    """A worker process with a gRPC client."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.channel = rpc.channel(service.address)
        self.stub = engine_pb2_grpc.EngineServiceStub(self.channel)

    async def info(self) -> pb.GetInfoResponse:
        info: pb.GetInfoResponse = await rpc.unary(
            self.stub.GetInfo, pb.GetInfoRequest(), timeout_s=WAIT_S
        )
        return info

    async def load(self) -> load_pb2.Load:
        reply: pb.GetLoadResponse = await rpc.unary(
            self.stub.GetLoad, pb.GetLoadRequest(), timeout_s=WAIT_S
        )
        return reply.loads[0]

    async def busy(self) -> None:
        """Returns when it holds KV."""

        async def is_busy() -> bool:
            return (await self.load()).kv_used_blocks > 0

        await until(is_busy, "the worker holds KV")

    async def rest(self, within_s: float = WAIT_S) -> None:
        """Returns when it holds no request and no KV."""

        async def is_at_rest() -> bool:
            load = await self.load()
            return not (load.rooms_open or load.kv_used_blocks or load.running or load.waiting)

        await until(is_at_rest, "the worker is at rest", within_s)

    async def generate(self, request_id: str, preprocessed: PreprocessedRequest) -> Messages:
        call = self.stub.Generate(
            pb.GenerateRequest(request=to_proto(preprocessed), request_id=request_id),
            timeout=WAIT_S,
        )
        messages: list[pb.GenerateResponse] = []
        try:
            async with rpc.cancelling(call):
                # Ends: the call has a time limit.
                while (message := await call.read()) is not grpc.aio.EOF:
                    assert isinstance(message, pb.GenerateResponse)
                    messages.append(message)
        except grpc.aio.AioRpcError as error:
            return mesh_error_from_rpc(error)
        return messages


class Pair:
    """A prefill and a decode worker process."""

    def __init__(self, prefill: Worker, decode: Worker, endpoint: pb.GetInfoResponse) -> None:
        self.prefill = prefill
        self.decode = decode
        self.host, self.port = endpoint.bootstrap_host, endpoint.bootstrap_port

    async def output(
        self, room: int, prompt: Sequence[int], n: int = TOKENS
    ) -> tuple[Messages, Messages]:
        preprocessed = request(
            prompt, max_tokens=n, bootstrap_info=BootstrapInfo(self.host, self.port, room)
        )
        return await asyncio.gather(
            self.prefill.generate(f"p{room}", preprocessed),
            self.decode.generate(f"d{room}", preprocessed),
        )


@contextmanager
def processes(folder: Path, flags: Sequence[str]) -> Iterator[tuple[Service, Service]]:
    common = [f"--registry-path={folder / 'registry'}", "--notice-s=0.1", *flags]
    started: list[Service] = []
    try:
        for role in ("prefill", "decode"):
            started.append(Service("worker", [f"--role={role}", *common], folder, role))  # noqa: PERF401
        for service in started:
            service.wait_ready()
        yield started[0], started[1]
    finally:
        for service in started:
            service.close()


@asynccontextmanager
async def pair(folder: Path, *flags: str) -> AsyncIterator[Pair]:
    with processes(folder, flags) as (prefill, decode):
        workers = Worker(prefill), Worker(decode)
        try:
            yield Pair(*workers, await workers[0].info())
        finally:
            for worker in workers:
                await worker.channel.close()


def ids_of(messages: object) -> list[int]:
    assert isinstance(messages, list), f"it failed: {messages!r}"
    return [token for message in messages for token in message.token_ids]


@pytest.mark.row("S2-26", "S2-27", "S2-46", "S2-90")
async def test_a_decode_worker_takes_a_handoff_and_reports_the_details_of_its_prompt(
    tmp_path: Path,
) -> None:
    prompt = prompt_of(39)
    oracle = SHIPPED_TOKEN_ORACLE.continue_tokens(prompt, TOKENS)
    flags = ("--speedup=20", "--handoff=completed", "--local-prefill=false")
    async with pair(tmp_path, *flags) as both:
        for number, cached in enumerate((0, 96)):
            prefill = await both.prefill.generate(f"p{number}", request(prompt, max_tokens=1))
            assert ids_of(prefill) == oracle[:1]
            assert isinstance(prefill, list)
            handoff = dataclass_from_proto(PrefillResult, prefill[-1].prefill_result, "")
            assert handoff.prompt_tokens_details == PromptTokensDetails(cached_tokens=cached)
            details = PromptTokensDetails(
                cached_tokens=cached, audio_tokens=number, cache_write_tokens=7
            )
            handoff = replace(handoff, prompt_tokens_details=details)
            decode = await both.decode.generate(
                f"d{number}", request(prompt, prefill_result=handoff)
            )
            assert ids_of(decode) == oracle
            assert isinstance(decode, list)
            reported = decode[-1].usage.prompt_tokens_details
            assert dataclass_from_proto(PromptTokensDetails, reported, "") == details


@pytest.mark.row("S2-18", "S2-19", "S2-20", "S2-48")
async def test_two_worker_processes_return_correct_output_for_a_hundred_pairs(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, "--speedup=20", "--local-prefill=false") as both:
        info = await both.decode.info()
        assert (info.role, info.local_prefill) == ("decode", False)
        assert (await both.prefill.info()).transfer_group == info.transfer_group != ""

        outputs = await asyncio.gather(*[both.output(i, prompt_of(i)) for i in range(100)])

        for number, (prefill, decode) in enumerate(outputs):
            oracle = SHIPPED_TOKEN_ORACLE.continue_tokens(prompt_of(number), TOKENS)
            assert (ids_of(prefill), ids_of(decode)) == (oracle[:1], oracle)
        for worker in (both.prefill, both.decode):
            await worker.rest()
        refusal = await both.decode.generate("plain", request([1, 2, 3]))
        assert isinstance(refusal, Unavailable)
        assert refusal.reason == "NO_LOCAL_PREFILL"


async def test_a_completed_prefill_crosses_processes_as_plain_json(tmp_path: Path) -> None:
    async with pair(tmp_path, "--speedup=20", "--handoff=completed") as both:
        assert both.port == 0
        prompts = map(prompt_of, range(100))
        prompt = next(
            p for p in prompts if len(SHIPPED_TOKEN_ORACLE.continue_tokens(p, TOKENS)) > 1
        )
        messages = await both.prefill.generate("p", request(prompt, max_tokens=1))
        assert isinstance(messages, list)
        result = dataclass_from_proto(PrefillResult, messages[-1].prefill_result)
        decode = await both.decode.generate("d", request(prompt, prefill_result=result))
        assert ids_of(decode) == SHIPPED_TOKEN_ORACLE.continue_tokens(prompt, TOKENS)
        for worker in (both.prefill, both.decode):
            await worker.rest()


# A page takes 42 ms, a prompt of 320 tokens 0.84 s.
SLOW_LINK = ("--transfer-gb-per-s=0.05", "--handoff-timeout-s=1.5")


# A stopped peer is silent for 1.5 s, and then does not confirm the Abort for 2 s. With a stopped
# decode, prefill first writes everything, 3.4 s, and then misses the acknowledgement for 1.5 s.
# With the default of --handoff-timeout-s it would take 10 s plus 2 s for the Abort.
GONE_S = 10.0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_lost_during_a_transfer_frees_its_peer(
    tmp_path: Path, victim: str, how: signal.Signals
) -> None:
    async with pair(tmp_path, *SLOW_LINK) as both:
        loop = asyncio.get_running_loop()
        # After half a second one transfer is running and the others wait for the link.
        legs = [asyncio.create_task(both.output(room, [room + 1] * 320)) for room in range(4)]
        await asyncio.sleep(0)
        await both.decode.busy()
        began = loop.time()
        while loop.time() < began + 0.5:
            await both.decode.load()
        killed, alive = both.prefill, both.decode
        if victim == "decode":
            killed, alive = alive, killed
        killed.service.send(how)
        await alive.rest(GONE_S)
        if how is signal.SIGSTOP:
            killed.service.send(signal.SIGCONT)
            await killed.rest()
        lost = 0
        for room, (prefill, decode) in enumerate(await asyncio.gather(*legs)):
            survivor = prefill if alive is both.prefill else decode
            if isinstance(survivor, list):  # handed over before the kill on a slow machine
                oracle = SHIPPED_TOKEN_ORACLE.continue_tokens([room + 1] * 320, TOKENS)
                assert ids_of(survivor) == (oracle[:1] if alive is both.prefill else oracle)
                continue
            assert isinstance(survivor, WorkerLost)
            assert survivor.retryable
            assert survivor.reason in (PEER_LOST, NO_PARTNER)
            lost += 1
        assert lost > 0
        if how is signal.SIGSTOP:
            _, decode = await both.output(99, prompt_of(5))
            assert ids_of(decode) == SHIPPED_TOKEN_ORACLE.continue_tokens(prompt_of(5), TOKENS)


@pytest.mark.row("S4-42")
async def test_a_draining_prefill_worker_ends_its_transfers_first(tmp_path: Path) -> None:
    async with pair(tmp_path, "--transfer-gb-per-s=0.05") as both:
        prompt = [9] * 320
        leg = asyncio.create_task(both.output(1, prompt))
        await both.decode.busy()
        both.prefill.service.send(signal.SIGTERM)
        prefill, decode = await leg
        oracle = SHIPPED_TOKEN_ORACLE.continue_tokens(prompt, TOKENS)
        assert (ids_of(prefill), ids_of(decode)) == (oracle[:1], oracle)
        assert await asyncio.to_thread(both.prefill.service.wait) == 0
