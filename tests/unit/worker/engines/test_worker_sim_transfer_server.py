"""Prefill and decode sims in virtual time: transfers, timeouts, and late page writes."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeVar

import pytest

from common.errors import (
    Conflict,
    InvalidRequest,
    MeshError,
    Overloaded,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from common.request.preprocessed import (
    BootstrapInfo,
    FinishReason,
    PrefillResult,
    PreprocessedRequest,
    RoutingHints,
)
from tests.kit.requests import context, preprocessed_request
from tests.sim.loop import run_virtually
from worker_svc.engines.contract import (
    EngineConfig,
    GenerateContext,
    LLMEngineOutput,
    validate_stream,
)
from worker_svc.engines.handoff import (
    EXPIRED,
    MISMATCH,
    NO_BLOCKS,
    NO_PARTNER,
    PEER_ABORTED,
    PEER_LOST,
    ROOM_TAKEN,
)
from worker_svc.engines.sim.block_manager import BlockManager
from worker_svc.engines.sim.config import SimConfig, SimHandoffConfig, SimModel
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.messages import Drop, Fail, Message, Pull, Signal, Write
from worker_svc.engines.sim.network import Connection
from worker_svc.engines.sim.timing import Timing
from worker_svc.engines.sim.token_oracle import TokenOracle
from worker_svc.engines.sim.transfer import Action, DecodeMachine, ReleaseBlocks
from worker_svc.kv_events.external_events import PagesRemoved, PagesStored

MODEL = SimModel(tuple(range(100, 900)), (2, 3), 32_768)
TOKEN_ORACLE = TokenOracle(MODEL.word_ids, 2)
# A prompt of 64 tokens takes 64 ms, a decode-only step 1 ms.
TIMING = Timing(base_s=1e-3, prefill_token_s=1e-3, decode_seq_s=0.0, kv_token_s=0.0)
# A page of 16 tokens takes 16 ms.
LINK = SimHandoffConfig(gb_per_s=1e-3, bytes_per_token=1000, latency_s=0.0, chunk_pages=1)
PROMPT = list(range(1, 65))

T = TypeVar("T")
Result = tuple[list[int], LLMEngineOutput]
request = partial(preprocessed_request, max_tokens=8)


class MemoryConnection:
    """One side of a connection in memory: messages arrive in order, each with its delay."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.peer: MemoryConnection = self
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._under_way: deque[Message | None] = deque()
        self._last_at = 0.0
        self._is_over = False

    def send(self, message: Message) -> None:
        self._later(message)

    async def flushed(self) -> None:
        if self._is_over:
            raise ConnectionResetError("the connection is closed")
        await asyncio.sleep(0)

    async def receive(self) -> Message | None:
        message = None if self._is_over else await self._messages.get()
        self._is_over = self._is_over or message is None
        return None if self._is_over else message

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._messages.put_nowait(None)
            self._later(None)

    def _later(self, message: Message | None) -> None:
        loop = asyncio.get_running_loop()
        self._last_at = max(self._last_at, loop.time() + self.network.delay())
        self._under_way.append(message)
        loop.call_at(self._last_at, self._land)

    def _land(self) -> None:
        # Timers of equal time have no order.
        message = self._under_way.popleft()
        if not self.network.is_severed:
            self.peer._messages.put_nowait(message)


class MemoryNetwork:
    """Connections in memory. is_severed: data in flight and later is lost, without an error."""

    def __init__(self, rng: Random | None = None, delay_s: float = 1e-3) -> None:
        self.rng = rng
        self.delay_s = delay_s
        self.is_severed = False
        self.listeners: dict[int, Callable[[Connection], None]] = {}
        self.open: list[MemoryConnection] = []

    def delay(self) -> float:
        return self.rng.expovariate(1 / self.delay_s) if self.rng else self.delay_s

    async def listen(
        self, host: str, port: int, on_connection: Callable[[Connection], None]
    ) -> int:
        port = port or 1000 + len(self.listeners)
        self.listeners[port] = on_connection
        return port

    def close(self) -> None:
        self.listeners.clear()

    async def dial(self, host: str, port: int) -> Connection:
        await asyncio.sleep(2 * self.delay())
        if port not in self.listeners:
            raise ConnectionRefusedError(f"no listener on {port}")
        ours, theirs = MemoryConnection(self), MemoryConnection(self)
        ours.peer, theirs.peer = theirs, ours
        self.open += [ours, theirs]
        self.listeners[port](theirs)
        return ours

    def cut(self) -> None:
        """All connections break, and both sides notice."""
        for one in self.open:
            one.close()


class Legs:
    """A prefill and a decode engine, and requests to them."""

    def __init__(self, prefill: SimEngine, decode: SimEngine, network: MemoryNetwork) -> None:
        self.prefill = prefill
        self.decode = decode
        self.network = network
        self.prefill_config = EngineConfig()
        self.decode_config = EngineConfig()

    def bootstrap(self, room: int = 1) -> dict[str, Any]:
        host, port = self.prefill_config.bootstrap_host, self.prefill_config.bootstrap_port
        assert host is not None
        assert port is not None
        return {"bootstrap_info": BootstrapInfo(host, port, room)}

    def is_idle(self) -> bool:
        for engine in (self.prefill, self.decode):
            load = engine.loads()[0]
            if load.rooms_open or load.kv_used_blocks or load.running or load.waiting:
                return False
            count = engine.counters
            ended = sum(count[cause] for cause in ("finished", "cancelled", "closed", "failed"))
            if ended != count["accepted"]:
                return False
        for engine in (self.prefill, self.decode):
            engine.blocks.check()
        return True

    async def rest(self, within_s: float) -> None:
        end = asyncio.get_running_loop().time() + within_s
        while not self.is_idle():
            assert asyncio.get_running_loop().time() < end, "rooms or blocks are left over"
            await asyncio.sleep(0.01)

    async def pair(self, prompt: list[int], n: int, room: int = 1) -> tuple[Result, Result]:
        asked = request(prompt, max_tokens=n, **self.bootstrap(room))
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(run(self.prefill, asked, f"p{room}"))
            second = tasks.create_task(run(self.decode, asked, f"d{room}"))
        return first.result(), second.result()


@asynccontextmanager
async def legs(
    *,
    network: MemoryNetwork | None = None,
    prefill: SimConfig | None = None,
    decode: SimConfig | None = None,
    engine: type[SimEngine] = SimEngine,
    **handoff: Any,
) -> AsyncIterator[Legs]:
    network = network or MemoryNetwork()
    prefill, decode = prefill or SimConfig(timing=TIMING), decode or SimConfig(timing=TIMING)
    prefill = replace(prefill, handoff=replace(LINK, role="prefill", **handoff))
    decode = replace(decode, handoff=replace(LINK, role="decode", **handoff))
    both = Legs(
        engine(prefill, model=MODEL, network=network),
        engine(decode, model=MODEL, network=network),
        network,
    )
    both.prefill_config = await both.prefill.start(7)
    both.decode_config = await both.decode.start(8)
    try:
        yield both
    finally:
        await both.prefill.cleanup()
        await both.decode.cleanup()


async def run(
    engine: SimEngine, asked: PreprocessedRequest, request_id: str = "r"
) -> tuple[list[int], LLMEngineOutput]:
    """All tokens and the terminal chunk."""
    stream = engine.generate(asked, context(request_id))
    async with aclosing(validate_stream(stream, request_id=request_id)) as outputs:
        chunks = [output async for output in outputs]
    return [token for one in chunks for token in one.token_ids], chunks[-1]


async def error_of(work: Coroutine[Any, Any, object]) -> MeshError:
    with pytest.raises(MeshError) as caught:
        await work
    return caught.value


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(condition: Callable[[], bool], what: str, within_s: float = 5.0) -> float:
    """Virtual seconds of the work."""
    start = now()
    while not condition():
        assert now() < start + within_s, f"not within {within_s} s: {what}"
        await asyncio.sleep(1e-3)
    return now() - start


def virtually(work: Callable[[], Awaitable[T]], seconds: float = 300.0) -> T:
    async def main() -> T:
        return await work()

    return run_virtually(main(), until=seconds)


# Advertised properties and rejections.


@pytest.mark.row("S4-16", "S4-17", "S4-19")
def test_a_prefill_engine_advertises_where_it_listens() -> None:
    async def work() -> None:
        async with legs() as both:
            assert both.prefill_config.disaggregated_endpoint == ("127.0.0.1", 1000)
            assert both.prefill_config.transfer_group == both.decode_config.transfer_group != ""
            assert not both.prefill_config.local_prefill

    virtually(work)


@pytest.mark.row("S4-18")
def test_engines_without_a_bootstrap_handshake_advertise_no_endpoint() -> None:
    async def work() -> None:
        async with legs(mode="completed") as both:
            for config in (both.prefill_config, both.decode_config):
                assert (config.bootstrap_host, config.bootstrap_port) == (None, None)
                assert config.disaggregated_endpoint is None

    virtually(work)


def test_each_role_rejects_legs_of_another() -> None:
    async def work() -> None:
        async with legs(local_prefill=False) as both:
            refusal = await error_of(run(both.prefill, request(PROMPT)))
            assert isinstance(refusal, Unavailable)
            assert refusal.reason == "PREFILL_ONLY"
            refusal = await error_of(run(both.decode, request(PROMPT)))
            assert isinstance(refusal, Unavailable)
            assert refusal.reason == "NO_LOCAL_PREFILL"
            assert not both.decode_config.local_prefill
            left_over = request(PROMPT, prefill_result=PrefillResult({}))
            assert isinstance(await error_of(run(both.prefill, left_over)), Unsupported)

    virtually(work)


def test_a_decode_engine_may_compute_plain_requests_itself() -> None:
    async def work() -> None:
        async with legs() as both:
            tokens, last = await run(both.decode, request(PROMPT, max_tokens=20))
            assert tokens == TOKEN_ORACLE.continue_tokens(PROMPT, 20)
            assert last.disaggregated_params is None
            assert both.decode.counters["rooms_opened"] == 0

    virtually(work)


def test_probes_run_locally_in_every_role() -> None:
    async def work() -> None:
        async with legs(local_prefill=False) as both:
            for engine in (both.prefill, both.decode):
                asked = request([1], max_tokens=1, is_probe=True, **both.bootstrap())
                tokens, last = await run(engine, asked)
                assert (len(tokens), last.finish_reason) == (1, FinishReason.LENGTH)
                assert engine.counters["rooms_opened"] == 0

    virtually(work)


@pytest.mark.parametrize(
    "params",
    [
        None,
        [],
        {},
        {"host": "h", "port": 1},
        {"host": "h", "port": 1, "transfer_id": "xyz"},
        {"host": "h", "port": 70000, "transfer_id": "0" * 16},
        {"host": "", "port": 1, "transfer_id": "0" * 16},
        {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": "1"},
        {"bootstrap_host": "h", "bootstrap_port": True, "bootstrap_room": 1},
    ],
)
def test_params_without_a_transfer_are_rejected_by_name(params: object) -> None:
    async def work() -> None:
        async with legs() as both:
            asked = request(PROMPT, prefill_result=PrefillResult(params))
            refusal = await error_of(run(both.decode, asked))
            assert isinstance(refusal, InvalidRequest)
            assert refusal.field == "prefill_result.disaggregated_params"

    virtually(work)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gb_per_s": 0.0},
        {"timeout_s": -1.0},
        {"chunk_pages": 0},
        {"latency_s": -1.0},
        {"port": 65536},
        {"bytes_per_token": 0},
    ],
)
def test_invalid_handoff_settings_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SimHandoffConfig(**wrong)


# The bootstrap path.


@pytest.mark.row("S2-18", "S2-19", "S2-20")
@pytest.mark.parametrize("lead_s", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_the_legs_of_a_room_meet_in_either_order(first: str, lead_s: float) -> None:
    async def work() -> None:
        async with legs() as both:
            asked = request(PROMPT, max_tokens=20, **both.bootstrap(2**64 - 1))
            engines = [both.prefill, both.decode]
            if first == "decode":
                engines.reverse()
            async with asyncio.TaskGroup() as tasks:
                early = tasks.create_task(run(engines[0], asked))
                await asyncio.sleep(lead_s)
                late = tasks.create_task(run(engines[1], asked))
            one, other = early.result(), late.result()
            prefill, decode = (one, other) if first == "prefill" else (other, one)
            oracle = TOKEN_ORACLE.continue_tokens(PROMPT, 20)
            assert decode[0] == oracle
            assert prefill[0] == oracle[:1]
            assert prefill[1].finish_reason is FinishReason.LENGTH
            assert prefill[1].disaggregated_params == {
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": 1000,
                "bootstrap_room": 2**64 - 1,
            }
            assert both.is_idle()

    virtually(work)


def test_the_duration_of_a_transfer_follows_its_size() -> None:
    async def work() -> None:
        async with legs(latency_s=0.1) as both:
            start = now()
            await both.pair(PROMPT, 1)
            # Prompt 65 ms, latency 100, four pages of 16, and the final messages.
            assert now() - start == pytest.approx(0.065 + 0.1 + 0.064 + 0.002, abs=2e-3)

    virtually(work)


def test_transfers_share_the_link_of_their_prefill_worker() -> None:
    async def work() -> None:
        config = SimConfig(timing=Timing(speedup=1e3))
        async with legs(prefill=config, decode=config, gb_per_s=1e-6) as both:
            start = now()
            async with asyncio.TaskGroup() as tasks:
                for room in range(10):
                    tasks.create_task(both.pair([room + 1] * 64, 1, room))
            assert now() - start == pytest.approx(10 * 64 * 1000 / 1e3 / 1e3, rel=0.1)

    virtually(work)


def test_decode_reports_prefills_cache_hits() -> None:
    async def work() -> None:
        async with legs() as both:
            await both.pair(PROMPT, 4, 1)
            prefill, decode = await both.pair([*PROMPT, 1, 2, 3], 4, 2)
            for _, last in (prefill, decode):
                assert last.completion_usage is not None
                assert last.completion_usage.prompt_tokens_details is not None
                assert last.completion_usage.prompt_tokens_details.cached_tokens == 64
            assert both.decode.counters["cached_tokens"] == 0
            assert both.decode.blocks.cached_blocks > 0

    virtually(work)


def prompt_that_ends_at_once() -> list[int]:
    return next([i] for i in range(10_000) if TOKEN_ORACLE.continue_tokens([i], 1) == [])


def test_output_that_ends_with_its_first_token_ends_on_both_legs() -> None:
    async def work() -> None:
        async with legs() as both:
            prefill, decode = await both.pair(prompt_that_ends_at_once(), 5)
            for tokens, last in (prefill, decode):
                assert (tokens, last.finish_reason) == ([], FinishReason.EOS)
            assert both.is_idle()

    virtually(work)


def test_decode_waits_for_blocks_before_it_pulls() -> None:
    async def work() -> None:
        decode = SimConfig(timing=TIMING, total_kv_blocks=6)
        async with legs(decode=decode) as both:
            async with asyncio.TaskGroup() as tasks:
                done = [tasks.create_task(both.pair([i] * 64, 9, i)) for i in range(1, 5)]
            for i, one in enumerate(done, 1):
                assert one.result()[1][0] == TOKEN_ORACLE.continue_tokens([i] * 64, 9)
            assert both.is_idle()

    virtually(work)


def test_a_preempted_decode_sequence_continues() -> None:
    async def work() -> None:
        decode = SimConfig(timing=TIMING, total_kv_blocks=14, eos_one_in=0)
        async with legs(decode=decode, prefill=replace(decode, total_kv_blocks=100)) as both:
            oracle = TokenOracle(MODEL.word_ids, 2, eos_one_in=0)
            async with asyncio.TaskGroup() as tasks:
                done = [tasks.create_task(both.pair([i] * 64, 60, i)) for i in range(1, 4)]
            for i, one in enumerate(done, 1):
                assert one.result()[1][0] == oracle.continue_tokens([i] * 64, 60)
            assert both.decode.counters["preempted"] > 0
            assert both.is_idle()

    virtually(work)


def test_legs_with_different_prompts_both_end() -> None:
    async def work() -> None:
        async with legs() as both:
            async with asyncio.TaskGroup() as tasks:
                one = tasks.create_task(
                    error_of(run(both.prefill, request(PROMPT, **both.bootstrap())))
                )
                other = tasks.create_task(
                    error_of(run(both.decode, request([1, 2], **both.bootstrap())))
                )
            assert (one.result().reason, other.result().reason) == (MISMATCH, MISMATCH)
            assert both.is_idle()

    virtually(work)


def test_a_first_token_that_does_not_follow_the_prompt_is_counted() -> None:
    async def work() -> None:
        prompt = prompt_that_ends_at_once()
        # It never emits EOS, like a different model.
        async with legs(prefill=SimConfig(timing=TIMING, eos_one_in=0)) as both:
            await both.pair(prompt, 4)
            assert both.decode.counters["corrupt_tokens"] == 1
            assert both.decode.counters["corrupt_pages"] == 0

    virtually(work)


def test_wrong_page_content_is_counted_and_changes_the_output() -> None:
    async def work() -> None:
        async with legs() as both:
            other = [9, *PROMPT[1:]]
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run(both.prefill, request(other, **both.bootstrap())))
                leg = tasks.create_task(
                    run(both.decode, request(PROMPT, max_tokens=20, **both.bootstrap()))
                )
            assert both.decode.counters["corrupt_pages"] == 4
            assert leg.result()[0] != TOKEN_ORACLE.continue_tokens(PROMPT, 20)

    virtually(work)


def test_a_second_leg_of_a_room_is_rejected() -> None:
    async def work() -> None:
        async with legs() as both:
            asked = request(PROMPT, **both.bootstrap())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run(both.prefill, asked))
                await asyncio.sleep(0.01)
                again = await error_of(run(both.prefill, asked))
                tasks.create_task(run(both.decode, asked))
                await asyncio.sleep(0.01)
                other = await error_of(run(both.decode, asked))
            assert isinstance(again, Conflict)
            assert other.reason == ROOM_TAKEN
            assert both.prefill.counters["rejected"] == 1
            late = await error_of(run(both.decode, asked))
            assert late.reason == ROOM_TAKEN
            assert both.is_idle()

    virtually(work)


def test_rooms_above_the_limit_are_rejected() -> None:
    async def work() -> None:
        async with legs(rooms_max=2) as both, asyncio.TaskGroup() as tasks:
            for room in (1, 2):
                tasks.create_task(both.pair(PROMPT, 2, room))
            await asyncio.sleep(0.01)
            for engine in (both.prefill, both.decode):
                refusal = await error_of(run(engine, request(PROMPT, **both.bootstrap(3))))
                assert isinstance(refusal, Overloaded)
                assert engine.counters["overloaded"] == 1

    virtually(work)


def test_an_infinitely_fast_pair_hands_over_too() -> None:
    async def work() -> None:
        at_once = SimConfig(timing=Timing(speedup=0))
        async with legs(prefill=at_once, decode=at_once) as both:
            start = now()
            _, decode = await both.pair(PROMPT, 20)
            assert decode[0] == TOKEN_ORACLE.continue_tokens(PROMPT, 20)
            assert now() - start < 0.02

    virtually(work)


def test_the_kv_of_an_adapter_is_not_that_of_the_base_model() -> None:
    async def work() -> None:
        config = SimConfig(timing=TIMING, loras=frozenset({"a"}))
        async with legs(prefill=config, decode=config) as both:
            with_lora = request(PROMPT, routing=RoutingHints(lora_name="a"), **both.bootstrap())
            base = request(PROMPT, max_tokens=20, **both.bootstrap())
            await asyncio.gather(run(both.prefill, with_lora), run(both.decode, base))
            assert both.decode.counters["corrupt_pages"] == 4

    virtually(work)


def test_a_decode_engine_publishes_received_blocks() -> None:
    async def work() -> None:
        async with legs() as both:
            stored: list[PagesStored | PagesRemoved] = []
            both.decode.kv_event_sink = stored.extend
            await both.pair(PROMPT, 4)
            names = [name for one in stored if isinstance(one, PagesStored) for name in one.hashes]
            assert names == both.decode.blocks.names() == both.prefill.blocks.names()

    virtually(work)


# Legs that end early.


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_leg_without_a_partner_ends_in_time(role: str) -> None:
    async def work() -> None:
        async with legs(timeout_s=3.0) as both:
            engine = both.prefill if role == "prefill" else both.decode
            start = now()
            error = await error_of(run(engine, request(PROMPT, **both.bootstrap())))
            assert isinstance(error, WorkerLost)
            assert (error.retryable, error.reason) == (True, NO_PARTNER)
            assert now() - start == pytest.approx(3.0, abs=0.1)
            await both.rest(within_s=0.1)

    virtually(work)


def test_a_decode_leg_without_blocks_does_not_wait_longer_than_its_partner() -> None:
    async def work() -> None:
        decode = SimConfig(timing=TIMING, total_kv_blocks=8, eos_one_in=0)
        async with legs(decode=decode, timeout_s=0.3) as both:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run(both.decode, request([5] * 60, max_tokens=60)))
                await asyncio.sleep(0.02)
                slow = tasks.create_task(run(both.decode, request([6] * 60, max_tokens=60)))
                await asyncio.sleep(0.01)
                late = tasks.create_task(
                    error_of(run(both.decode, request([7] * 100, **both.bootstrap())))
                )
                both.decode.freeze()
                error = await late
                both.decode.unfreeze()
            assert isinstance(error, Overloaded)
            assert error.reason == NO_BLOCKS
            assert len(slow.result()[0]) == 60
            # Prefill received the Drop: a later leg fails at once.
            late_leg = error_of(run(both.prefill, request([7] * 100, **both.bootstrap())))
            assert (await late_leg).reason == PEER_ABORTED

    virtually(work)


def test_a_refused_connection_ends_a_decode_leg_at_once() -> None:
    async def work() -> None:
        async with legs() as both:
            asked = request(PROMPT, bootstrap_info=BootstrapInfo("h", 9, 1))
            start = now()
            assert (await error_of(run(both.decode, asked))).reason == PEER_LOST
            assert now() - start < 0.1
            assert both.is_idle()

    virtually(work)


def phases(count: int) -> list[float]:
    """Points in the life of a pair: prompt until 65 ms, transfer until 130, 20 ms of decode."""
    return [round(0.16 * i / count, 4) for i in range(count)]


@pytest.mark.parametrize("cause", ["stop", "close"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_leg_that_leaves_at_any_time_ends_the_other_and_frees_everything(
    role: str, cause: str
) -> None:
    async def work(after_s: float) -> None:
        async with legs() as both:
            asked = request(PROMPT, max_tokens=20, **both.bootstrap())
            leaver, other = (
                (both.prefill, both.decode) if role == "prefill" else (both.decode, both.prefill)
            )
            ctx = context()
            leaving = asyncio.ensure_future(collect(leaver, asked, ctx))
            staying = asyncio.ensure_future(collect(other, asked, context("other")))
            await asyncio.sleep(after_s)
            if cause == "stop":
                ctx.stop_generating("test")
            else:
                leaving.cancel()
            start = now()
            await asyncio.wait([leaving])
            assert now() - start < 0.15
            error = await staying
            assert now() - start < 0.2
            if isinstance(error, MeshError):
                assert isinstance(error, WorkerLost)
                assert error.retryable
            await both.rest(within_s=0.1)
            assert both.decode.counters["aborts_forced"] == 0
            _, control = await both.pair(PROMPT, 20, 2)
            assert control[0] == TOKEN_ORACLE.continue_tokens(PROMPT, 20)
            for engine in (leaver, other):
                assert engine.counters["corrupt_pages"] == 0

    for after_s in phases(32):
        virtually(lambda after_s=after_s: work(after_s))  # type: ignore[misc]


async def collect(
    engine: SimEngine, asked: PreprocessedRequest, ctx: GenerateContext
) -> list[LLMEngineOutput] | MeshError:
    """All chunks, or the error."""
    try:
        async with aclosing(engine.generate(asked, ctx)) as outputs:
            return [output async for output in outputs]
    except MeshError as error:
        return error


def reason_of(end: list[LLMEngineOutput] | MeshError) -> FinishReason | None:
    assert isinstance(end, list), f"it failed: {end!r}"
    return end[-1].finish_reason


@pytest.mark.parametrize("cause", ["cut", "cleanup prefill", "cleanup decode"])
def test_a_worker_or_link_lost_at_any_time_ends_both_legs(cause: str) -> None:
    async def work(after_s: float) -> None:
        async with legs() as both:
            asked = request(PROMPT, max_tokens=20, **both.bootstrap())
            tasks = [
                asyncio.ensure_future(collect(engine, asked, context()))
                for engine in (both.prefill, both.decode)
            ]
            await asyncio.sleep(after_s)
            match cause:
                case "cut":
                    both.network.cut()
                case "cleanup prefill":
                    await both.prefill.cleanup()
                case _:
                    await both.decode.cleanup()
            start = now()
            await asyncio.wait(tasks)
            assert now() - start < (10.1 if after_s < 0.01 else 0.2)
            await both.rest(within_s=2.1)

    for after_s in phases(32):
        virtually(lambda after_s=after_s: work(after_s))  # type: ignore[misc]


def test_a_network_that_drops_everything_only_causes_timeouts() -> None:
    async def work(after_s: float) -> None:
        async with legs(timeout_s=3.0) as both:
            asked = request(PROMPT, max_tokens=20, **both.bootstrap())
            tasks = [
                asyncio.ensure_future(collect(engine, asked, context()))
                for engine in (both.prefill, both.decode)
            ]
            await asyncio.sleep(after_s)
            both.network.is_severed = True
            start = now()
            await asyncio.wait(tasks)
            assert now() - start < 3.3
            await both.rest(within_s=6.0)
            assert both.decode.counters["corrupt_pages"] == 0

    for after_s in phases(16):
        virtually(lambda after_s=after_s: work(after_s))  # type: ignore[misc]


def test_pages_of_an_aborted_leg_wait_for_the_peers_confirmation() -> None:
    async def work() -> None:
        network = MemoryNetwork(delay_s=0.3)
        async with legs(network=network, abort_s=2.0) as both:
            asked = request([1] * 1600, max_tokens=4, **both.bootstrap())
            ctx = context()
            prefill = asyncio.ensure_future(collect(both.prefill, asked, context()))
            decode = asyncio.ensure_future(collect(both.decode, asked, ctx))
            await until(lambda: both.decode.counters["pages_received"] > 0, "a page arrives")
            ctx.stop_generating("test")
            start = now()
            assert reason_of(await decode) is FinishReason.CANCELLED
            assert now() - start < 0.01
            load = both.decode.loads()[0]
            assert (load.kv_used_blocks, load.rooms_open, load.waiting) == (100, 1, 0)
            # The Abort and its confirmation.
            took = await until(lambda: both.decode.loads()[0].kv_used_blocks == 0, "pages free")
            assert took == pytest.approx(0.6, abs=0.05)
            assert isinstance(await prefill, WorkerLost)
            await both.rest(within_s=0.5)
            assert both.decode.counters["rooms_aborted"] == 1

    virtually(work)


def test_the_connection_to_a_peer_that_ignores_an_abort_is_closed() -> None:
    async def work() -> None:
        async with legs(abort_s=2.0) as both:
            asked = request([1] * 1600, max_tokens=4, **both.bootstrap())
            ctx = context()
            prefill = asyncio.ensure_future(collect(both.prefill, asked, context()))
            decode = asyncio.ensure_future(collect(both.decode, asked, ctx))
            await until(lambda: both.decode.counters["pages_received"] > 0, "a page arrives")
            both.network.is_severed = True
            ctx.stop_generating("test")
            await decode
            took = await until(lambda: both.decode.loads()[0].kv_used_blocks == 0, "pages free")
            assert took == pytest.approx(2.0, abs=0.1)
            assert both.decode.counters["aborts_forced"] == 1
            await asyncio.wait([prefill])
            await both.rest(within_s=1.0)

    virtually(work)


def test_a_failed_engine_ends_its_rooms() -> None:
    async def work() -> None:
        async with legs() as both:
            asked = request(PROMPT, max_tokens=20, **both.bootstrap())
            prefill = asyncio.ensure_future(error_of(run(both.prefill, asked)))
            decode = asyncio.ensure_future(error_of(run(both.decode, asked)))
            await asyncio.sleep(0.1)
            both.prefill.inject_failure(WorkerLost("the accelerator fell off", retryable=True))
            assert (await prefill).message == "the accelerator fell off"
            assert (await decode).reason == PEER_ABORTED
            await both.rest(within_s=0.1)

    virtually(work)


# The completed path.


@pytest.mark.row("S2-26")
def test_a_completed_prefill_is_fetched_by_its_decode_leg() -> None:
    async def work() -> None:
        async with legs(mode="completed") as both:
            tokens, last = await run(both.prefill, request(PROMPT, max_tokens=1))
            oracle = TOKEN_ORACLE.continue_tokens(PROMPT, 20)
            assert (tokens, last.finish_reason) == (oracle[:1], FinishReason.LENGTH)
            assert both.prefill.loads()[0].rooms_open == 1
            assert both.prefill.loads()[0].kv_used_blocks == 4
            await asyncio.sleep(20)
            result = PrefillResult(last.disaggregated_params)
            tokens, _ = await run(
                both.decode, request(PROMPT, max_tokens=20, prefill_result=result)
            )
            assert tokens == oracle
            await both.rest(within_s=0.1)
            again = request(PROMPT, max_tokens=20, prefill_result=result)
            assert (await error_of(run(both.decode, again))).reason == ROOM_TAKEN

    virtually(work)


def test_a_completed_prefill_without_a_decode_leg_expires() -> None:
    async def work() -> None:
        async with legs(mode="completed", lease_s=5.0) as both:
            _, last = await run(both.prefill, request(PROMPT, max_tokens=1))
            assert await until(both.is_idle, "the lease ends", 6.0) == pytest.approx(5.0, abs=0.1)
            assert both.prefill.counters["leases_expired"] == 1
            asked = request(PROMPT, prefill_result=PrefillResult(last.disaggregated_params))
            error = await error_of(run(both.decode, asked))
            assert isinstance(error, WorkerLost)
            assert (error.retryable, error.reason) == (True, EXPIRED)

    virtually(work)


def test_a_prefill_that_ended_with_its_first_token_leases_no_kv() -> None:
    async def work() -> None:
        async with legs(mode="completed") as both:
            tokens, last = await run(
                both.prefill, request(prompt_that_ends_at_once(), max_tokens=1)
            )
            assert (tokens, last.finish_reason) == ([], FinishReason.EOS)
            assert last.disaggregated_params is None
            assert both.is_idle()

    virtually(work)


def test_a_decode_leg_that_leaves_before_its_pull_ends_the_lease() -> None:
    async def work() -> None:
        decode = SimConfig(timing=TIMING, total_kv_blocks=8)
        async with legs(mode="completed", decode=decode) as both:
            _, last = await run(both.prefill, request(PROMPT, max_tokens=1))
            result = PrefillResult(last.disaggregated_params)
            both.decode.freeze()
            ctx = context()
            asked = request(PROMPT, prefill_result=result)
            leg = asyncio.ensure_future(collect(both.decode, asked, ctx))
            await asyncio.sleep(0.01)
            ctx.stop_generating("test")
            await leg
            assert await until(both.is_idle, "the lease ends") < 0.1

    virtually(work)


def test_a_completed_prefill_is_not_kept_if_its_leg_left() -> None:
    async def work(after_s: float) -> None:
        async with legs(mode="completed") as both:
            ctx = context()
            leg = asyncio.ensure_future(collect(both.prefill, request(PROMPT, max_tokens=1), ctx))
            await asyncio.sleep(after_s)
            ctx.stop_generating("test")
            if reason_of(await leg) is FinishReason.CANCELLED:
                assert both.is_idle()
            else:
                assert both.prefill.loads()[0].rooms_open == 1

    for after_s in (0.0, 0.01, 0.0649, 0.065, 0.0651, 0.1):
        virtually(lambda after_s=after_s: work(after_s))  # type: ignore[misc]


def test_a_completed_prefill_that_cannot_be_leased_fails_and_is_freed() -> None:
    async def work() -> None:
        async with legs(mode="completed", rooms_max=1) as both:
            await run(both.prefill, request(PROMPT, max_tokens=1))
            refusal = await error_of(run(both.prefill, request([5] * 64, max_tokens=1)))
            assert isinstance(refusal, Overloaded)
            assert both.prefill.loads()[0].kv_used_blocks == 4

    virtually(work)


# Drain.


@pytest.mark.row("S4-42")
def test_drain_waits_for_transfers_in_flight() -> None:
    async def work() -> None:
        async with legs() as both:
            pair = asyncio.ensure_future(both.pair(PROMPT, 20))
            await asyncio.sleep(0.1)
            start = now()
            await both.prefill.drain()
            assert 0.02 < now() - start < 0.04
            assert both.prefill.loads()[0].rooms_open == 0
            (_, decode) = await pair
            assert decode[0] == TOKEN_ORACLE.continue_tokens(PROMPT, 20)

    virtually(work)


@pytest.mark.row("S4-40")
def test_drain_of_an_idle_engine_returns_at_once() -> None:
    async def work() -> None:
        async with legs() as both:
            start = now()
            await both.prefill.drain()
            await both.decode.drain()
            assert now() == start

    virtually(work)


def test_drain_waits_for_leases_for_a_limited_time() -> None:
    async def work() -> None:
        async with legs(mode="completed", lease_s=5.0) as both:
            _, last = await run(both.prefill, request(PROMPT, max_tokens=1))
            drain = asyncio.ensure_future(both.prefill.drain())
            await asyncio.sleep(1.0)
            assert not drain.done()
            asked = request(PROMPT, prefill_result=PrefillResult(last.disaggregated_params))
            await run(both.decode, asked)
            await asyncio.sleep(0.01)
            assert drain.done()
            await run(both.prefill, request([5] * 20, max_tokens=1))
            start = now()
            await both.prefill.drain()
            assert now() - start < 5.1

    virtually(work)


def test_drain_does_not_wait_for_a_prompt_without_a_leg() -> None:
    async def work() -> None:
        async with legs(timeout_s=1.0, lease_s=2.0) as both:
            both.prefill.freeze()
            pair = asyncio.ensure_future(both.pair(PROMPT, 4))
            await asyncio.sleep(0.1)
            start = now()
            await both.prefill.drain()
            assert now() - start == pytest.approx(3.0, abs=0.01)
            both.prefill.unfreeze()
            _, decode = await pair
            assert decode[0] == TOKEN_ORACLE.continue_tokens(PROMPT, 4)

    virtually(work)


# Late page writes.


class EagerRoom(DecodeMachine):
    """Releases its pages when the leg leaves, although a transfer may still write to them."""

    def abort(self, now: float) -> list[Action]:
        actions = super().abort(now)
        return [*actions, ReleaseBlocks()] if self.is_aborting else actions


class EagerEngine(SimEngine):
    decode_machine = EagerRoom


class Published:
    """The names an engine has published; each parent is among them."""

    def __init__(self, engine: SimEngine) -> None:
        self.names: set[int] = set()
        self._engine = engine
        engine.kv_event_sink = self.take

    def is_complete(self) -> bool:
        return self.names == set(self._engine.blocks.names())

    def take(self, events: Sequence[PagesStored | PagesRemoved]) -> None:
        for event in events:
            if isinstance(event, PagesStored):
                assert event.parent is None or event.parent in self.names
                assert self.names.isdisjoint(event.hashes)
                self.names |= set(event.hashes)
            else:
                assert self.names >= set(event.hashes)
                self.names -= set(event.hashes)


async def chaos(seed: int, engine: type[SimEngine]) -> Counter[str]:
    """Random requests, departures and aborts on engines with few blocks."""
    rng = Random(seed)
    network = MemoryNetwork(rng, delay_s=0.02)
    few = SimConfig(timing=TIMING, total_kv_blocks=24, eos_one_in=0)
    oracle = TokenOracle(MODEL.word_ids, 2, eos_one_in=0)
    seen: Counter[str] = Counter()

    async def one(both: Legs, room: int) -> None:
        await asyncio.sleep(rng.uniform(0, 1.0))
        prompt = [rng.randrange(3)] * rng.randrange(1, 120)
        n = rng.randrange(1, 40)
        contexts = [context(), context()]
        asked, engines = (
            request(prompt, max_tokens=n, **both.bootstrap(room)),
            (both.prefill, both.decode),
        )
        if rng.random() < 0.3:  # without a handoff
            asked, engines = request(prompt, max_tokens=n), (both.decode, both.decode)
        work = [
            asyncio.ensure_future(collect(leg, asked, ctx))
            for leg, ctx in zip(engines, contexts, strict=True)
        ]
        if rng.random() < 0.6:
            await asyncio.wait(work, timeout=rng.uniform(0, 0.4))
            for ctx in rng.choice([contexts, contexts[:1], contexts[1:]]):
                ctx.stop_generating("chance")
        await asyncio.wait(work)
        outputs = work[1].result()
        if isinstance(outputs, MeshError):
            seen["failed"] += 1
            return
        if outputs[-1].finish_reason is FinishReason.CANCELLED:
            seen["cancelled"] += 1
            return
        tokens = [token for output in outputs for token in output.token_ids]
        seen["right" if tokens == oracle.continue_tokens(prompt, n) else "wrong"] += 1

    async with legs(network=network, prefill=few, decode=few, engine=engine) as both:
        published = [Published(leg) for leg in (both.prefill, both.decode)]
        async with asyncio.TaskGroup() as tasks:
            for room in range(25):
                tasks.create_task(one(both, room))
        await both.rest(within_s=15.0)
        for one_side in published:
            await until(one_side.is_complete, "all events are published", 0.1)
        for leg in (both.prefill, both.decode):
            for name in ("corrupt_pages", "corrupt_tokens", "aborts_forced"):
                seen[name] += leg.counters[name]
    return seen


@pytest.mark.slow
def test_thousands_of_random_aborts_corrupt_no_page() -> None:
    seen: Counter[str] = Counter()
    for seed in range(100):
        seen += virtually(lambda seed=seed: chaos(seed, SimEngine))  # type: ignore[misc]
    assert (seen["corrupt_pages"], seen["corrupt_tokens"], seen["wrong"]) == (0, 0, 0)
    assert min(seen["right"], seen["cancelled"], seen["failed"]) > 200, seen


@pytest.mark.slow
def test_an_engine_without_the_guard_corrupts_pages_and_output() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += virtually(lambda seed=seed: chaos(seed, EagerEngine))  # type: ignore[misc]
    assert seen["corrupt_pages"] > 0, seen
    assert seen["wrong"] > 0, seen


@pytest.mark.parametrize("engine", [SimEngine, EagerEngine])
def test_the_next_owner_of_an_aborted_legs_pages_is_safe_only_with_the_guard(
    engine: type[SimEngine],
) -> None:
    async def work() -> None:
        network = MemoryNetwork(delay_s=0.05)
        quick = replace(TIMING, prefill_token_s=1e-6)
        few = SimConfig(timing=quick, total_kv_blocks=20, eos_one_in=0)
        plenty = SimConfig(timing=TIMING)
        async with legs(network=network, prefill=plenty, decode=few, engine=engine) as both:
            ctx = context()
            asked = request([1] * 300, max_tokens=4, **both.bootstrap())
            prefill = asyncio.ensure_future(collect(both.prefill, asked, context()))
            decode = asyncio.ensure_future(collect(both.decode, asked, ctx))
            await until(lambda: both.decode.counters["pages_received"] > 0, "a page arrives")
            ctx.stop_generating("test")
            victim = [5] * 40
            tokens, _ = await run(both.decode, request(victim, max_tokens=200))
            await asyncio.wait([prefill, decode])

            oracle = TokenOracle(MODEL.word_ids, 2, eos_one_in=0).continue_tokens(victim, 200)
            is_guarded = engine is SimEngine
            assert (tokens == oracle) == is_guarded
            assert (both.decode.counters["corrupt_pages"] == 0) == is_guarded
            await both.rest(within_s=1.0)

    virtually(work)


def test_a_late_write_corrupts_the_present_owner_of_the_page() -> None:
    blocks = BlockManager(4, 16)
    first = blocks.admit((), 32)
    assert first is not None
    blocks.expect_stamps(first, [7, 8])
    late = first.blocks[0].page
    blocks.release(first)
    second = blocks.admit((), 64)
    assert second is not None
    blocks.fill(second, 0, 4)
    assert blocks.is_intact(second, 0, 4)

    blocks.write(late, 7)

    assert {block.page for block in blocks.take_corrupt_blocks()} == {late}
    assert not blocks.is_intact(second, 0, 4)
    assert (blocks.take_corrupt_blocks(), blocks.corrupt_pages) == (set(), 1)


def test_a_page_overwritten_before_its_owner_computes_is_intact() -> None:
    blocks = BlockManager(1, 16)
    block_table = blocks.admit((), 16)
    assert block_table is not None
    blocks.write(0, 7)
    assert blocks.take_corrupt_blocks() == set()
    blocks.fill(block_table, 0, 1)
    assert blocks.is_intact(block_table, 0, 1)


def test_a_page_without_a_write_fails_verification() -> None:
    blocks = BlockManager(2, 16)
    block_table = blocks.admit((), 32)
    assert block_table is not None
    blocks.expect_stamps(block_table, [7, 8])
    blocks.write(block_table.blocks[0].page, 7)
    assert not blocks.verify_received(block_table, 2)
    assert blocks.corrupt_pages == 1


def test_writing_an_unknown_page_raises() -> None:
    for page in (-1, 4):
        with pytest.raises(IndexError):
            BlockManager(4, 16).write(page, 1)


# Malformed peers.


def test_the_connection_of_a_malformed_peer_is_closed() -> None:
    async def work() -> None:
        async with legs(timeout_s=1.0) as both:
            for unexpected in (Signal.RECEIVED, Write([0], [1]), Fail("X")):
                connection = await both.network.dial("h", 1000)
                connection.send(unexpected)
                assert await connection.receive() is None
            silent = await both.network.dial("h", 1000)
            start = now()
            assert await silent.receive() is None
            assert now() - start == pytest.approx(1.0, abs=0.1)
            other = await both.network.dial("h", 1000)
            other.send(Pull(5, 1, 64, 8, [0] * 8))
            assert await other.receive() == Fail(MISMATCH)
            _, decode = await both.pair(PROMPT, 20)
            assert decode[0] == TOKEN_ORACLE.continue_tokens(PROMPT, 20)
            assert both.is_idle()

    virtually(work)


def test_writes_to_unknown_pages_end_the_leg() -> None:
    async def work() -> None:
        async with legs() as both:
            accepted: list[Connection] = []
            await both.network.listen("h", 5000, accepted.append)
            asked = request(PROMPT, bootstrap_info=BootstrapInfo("h", 5000, 1))
            leg = asyncio.ensure_future(error_of(run(both.decode, asked)))
            await until(lambda: len(accepted) == 1, "the leg connects")
            assert isinstance(await accepted[0].receive(), Pull)
            accepted[0].send(Write([10**6], [1]))
            assert (await leg).reason == PEER_LOST
            assert await accepted[0].receive() is None
            assert both.is_idle()

    virtually(work)


def test_a_drop_of_an_unknown_room_is_kept_for_its_leg() -> None:
    async def work() -> None:
        async with legs() as both:
            connection = await both.network.dial("h", 1000)
            connection.send(Drop(1))
            assert await connection.receive() is None
            asked = request(PROMPT, **both.bootstrap(1))
            assert (await error_of(run(both.prefill, asked))).reason == PEER_ABORTED

    virtually(work)
