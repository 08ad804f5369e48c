"""The conformance kit: correct engines pass, and for each check an engine exists that fails it."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from common.registry.instances import new_instance_id
from common.registry.registry import MemoryRegistry, MemoryStore
from common.request.preprocessed import (
    PreprocessedRequest,
    PromptTokensDetails,
    StopConditions,
    TokenIds,
)
from common.request.token_stream import LegRequest
from tests.kit.apps import living
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.conformance.__main__ import load_engine_factory, main
from worker_svc.conformance.checks import all_checks
from worker_svc.conformance.harness import TimeLimits
from worker_svc.conformance.report import Result, Verdict, run_checks
from worker_svc.engines.contract import (
    EngineConfig,
    FinishReason,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    Load,
    Unavailable,
    chunk,
    usage,
)
from worker_svc.engines.echo import EchoConfig, EchoEngine
from worker_svc.engines.sim.config import SimConfig, SimHandoffConfig
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.timing import Timing
from worker_svc.kv_events.external_events import (
    DuplicatePolicy,
    ExternalEvent,
    KvEventFormat,
    KvEventSink,
    PagesRemoved,
    PagesStored,
)

SIM_ENGINE = "worker_svc.engines.sim.engine:SimEngine"
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
# Limits for a loaded machine, and for broken engines that never respond.
PATIENT = TimeLimits(start_s=60.0, answer_s=60.0, stop_s=30.0, end_s=30.0)
BRIEF = TimeLimits(start_s=60.0, answer_s=60.0, stop_s=0.2, end_s=0.2)


def blocks() -> list[str]:
    """The Python code blocks of the page."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def loaded(name: str, code: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(code, f"{PAGE.name}:{name}", "exec"), module.__dict__)
    return module


# The documented engine. Any: it has no types, since authors need none.
Counter: Any = loaded("counter", blocks()[0]).Counter


async def verdicts(
    make: Callable[[], LLMEngine], limits: TimeLimits = PATIENT, only: Sequence[str] = ()
) -> dict[str, Result]:
    checks = [one for one in all_checks() if not only or one.name in only]
    return {one.check.name: one async for one in run_checks(make, limits, checks)}


def sim(**settings: Any) -> SimEngine:
    return SimEngine(SimConfig(timing=Timing(speedup=0.0), **settings))


@pytest.mark.row("S4-21", "S4-30", "S4-43", "S4-44", "S4-46")
@pytest.mark.parametrize(
    ("make", "skipped"),
    [
        (sim, set()),
        (lambda: sim(prefix_caching=False), {"kv-events", "flush-cache"}),
        (lambda: sim(handoff=SimHandoffConfig(role="decode")), set()),
        (lambda: EchoEngine(EchoConfig(context_length=2048)), {"kv-events", "flush-cache"}),
        (lambda: Counter(), {"kv-events", "flush-cache"}),
        (lambda: SuppliesProbes(), {"kv-events", "flush-cache"}),
    ],
    ids=[
        *("sim", "sim without a cache", "sim for decode", "echo", "the one of the page"),
        "with its own probes",
    ],
)
async def test_an_engine_that_keeps_the_contract_fails_no_check(
    make: Callable[[], LLMEngine], skipped: set[str]
) -> None:
    found = await verdicts(make)
    assert list(found) == [one.name for one in all_checks()]
    assert [str(one) for one in found.values() if one.verdict is Verdict.FAIL] == []
    assert {name for name, one in found.items() if one.verdict is Verdict.SKIP} == skipped


async def test_checks_that_need_whole_requests_are_skipped_for_a_prefill_or_decode_engine() -> None:
    found = await verdicts(lambda: sim(handoff=SimHandoffConfig(role="prefill")))
    assert [str(one) for one in found.values() if one.verdict is Verdict.FAIL] == []
    assert found["generate"].verdict is Verdict.SKIP
    assert "prefill or decode legs only" in found["generate"].reason
    assert found["probes"].verdict is Verdict.PASS


class NoDrain(Counter):  # type: ignore[misc]
    drain = None


class Nameless(Counter):  # type: ignore[misc]
    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(kv_index_reason="none")


class Negative(Counter):  # type: ignore[misc]
    def loads(self) -> list[Load]:
        return [Load(running=-1)]


class Endless(Counter):  # type: ignore[misc]
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        yield chunk.token(1)


class ContinuesAfterTerminal(Counter):  # type: ignore[misc]
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        yield chunk.token(1)
        yield chunk.stop()
        yield chunk.token(2)


class SendsOneTokenTooMany(Counter):  # type: ignore[misc]
    """One token more than requested."""

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        for one in range((request.stop_conditions.max_tokens or 0) + 1):
            yield chunk.token(one)
        yield chunk.length()


class Miscounting(Counter):  # type: ignore[misc]
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        async for one in super().generate(request, ctx):
            yield one if one.finish_reason is None else one.with_usage(usage(1, 1))


class OneAtATime(Counter):  # type: ignore[misc]
    def check(self, request: PreprocessedRequest) -> Any:
        if self.running:
            raise Unavailable("one is enough")
        return super().check(request)


class Untyped(Counter):  # type: ignore[misc]
    def check(self, request: PreprocessedRequest) -> Any:
        if not request.token_ids:
            raise ValueError("empty")
        return super().check(request)


class AcceptsEverything(Counter):  # type: ignore[misc]
    def check(self, request: PreprocessedRequest) -> Any:
        return 8


class IgnoresStops(Counter):  # type: ignore[misc]
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        # Ends: the kit cancels it.
        while True:
            # Sleep: the pace of an engine that ignores stops.
            await asyncio.sleep(0.001)
            yield chunk.token(1)


class SendsTokenAfterStop(Counter):  # type: ignore[misc]
    """Sends a token before it checks whether it was stopped."""

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        yield chunk.token(1)
        async for one in super().generate(request, ctx):
            yield one


class AbortsOnlyWhatRuns(Counter):  # type: ignore[misc]
    async def abort(self, ctx: GenerateContext) -> None:
        if not self.running:
            raise KeyError(ctx.id)


class Leaky(Counter):  # type: ignore[misc]
    """Frees resources at the end of a request, but not when it is closed."""

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        self.running += 1
        async for one in super().generate(request, ctx):
            yield one
        self.running -= 1


class IgnoresCancellation(Counter):  # type: ignore[misc]
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        yield chunk.token(1)
        # Ends: the pause has passed without another cancellation.
        while True:
            try:
                # Sleep: the engine does not end when it is cancelled.
                await asyncio.sleep(0.5)
                break
            except asyncio.CancelledError:
                continue
        yield chunk.length()


class ProbesAreRequests(Counter):  # type: ignore[misc]
    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if request.is_probe:
            yield chunk.token(1)
        async for one in super().generate(request, ctx):
            yield one


class SuppliesProbes(Counter):  # type: ignore[misc]
    """An engine with probes of its own, of three tokens."""

    max_tokens: int | None = 3

    def probe_request(self) -> PreprocessedRequest:
        stop = StopConditions(max_tokens=self.max_tokens, ignore_eos=True)
        return PreprocessedRequest(token_ids=TokenIds.of([4, 5]), stop_conditions=stop)


class SuppliesUnlimitedProbes(SuppliesProbes):
    max_tokens = None


class OmitsFirstPage(SimEngine):
    """Reports pages below a page that was not reported."""

    def publish_to(self, sink: KvEventSink) -> None:
        class FilteringSink:
            record_loss, reset = sink.record_loss, sink.reset

            def take(self, events: Iterable[ExternalEvent]) -> None:
                sink.take(list(self.cut(events)))

            def cut(self, events: Iterable[ExternalEvent]) -> Iterator[ExternalEvent]:
                for event in events:
                    if isinstance(event, PagesStored) and event.parent is None:
                        size = event.page_size * 4
                        yield PagesStored(
                            event.hashes[1:],
                            event.hashes[0],
                            event.token_ids[size:],
                            event.page_size,
                        )
                    else:
                        yield event

        super().publish_to(FilteringSink())


class RemovesUnstoredPage(SimEngine):
    """Reports the removal of a page that was never stored."""

    def publish_to(self, sink: KvEventSink) -> None:
        super().publish_to(sink)
        sink.take([PagesRemoved([4711])])


class KeepsItsCache(SimEngine):
    """Does not drop its cache."""

    async def flush_cache(self) -> int:
        return 0


class AdvertisesWithoutEvents(Counter):  # type: ignore[misc]
    """Advertises events without an interface to publish them."""

    async def start(self, worker_id: int) -> EngineConfig:
        await super().start(worker_id)
        return EngineConfig("counter", kv_cache_block_size=16, kv_index="events")


class Paging(Counter):  # type: ignore[misc]
    """Keeps every prompt forever, page by page, in routing blocks of 16 tokens."""

    kv_events_off_reason = ""

    def __init__(
        self, page_size: int, *, reported_page_size: int = 0, whole_blocks_only: bool = False
    ) -> None:
        super().__init__()
        self.kv_event_format = KvEventFormat(
            16, reported_page_size or page_size, DuplicatePolicy.IDEMPOTENT
        )
        self.page_size = page_size
        self.reused = 16 if whole_blocks_only else page_size
        self.held: dict[tuple[int, ...], int] = {}

    async def start(self, worker_id: int) -> EngineConfig:
        await super().start(worker_id)
        return EngineConfig(
            "paging", context_length=4096, kv_cache_block_size=16, kv_index="events"
        )

    def publish_to(self, sink: KvEventSink) -> None:
        self.sink = sink

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        prompt = tuple(request.token_ids.tolist())
        details = PromptTokensDetails(cached_tokens=self.cached(prompt))
        async for one in super().generate(request, ctx):
            counted = one.completion_usage
            if counted is not None:
                one = one.with_usage(replace(counted, prompt_tokens_details=details))
            yield one
        self.keep(prompt)

    def cached(self, prompt: tuple[int, ...]) -> int:
        """Cached tokens in whole pages or blocks; one token is always computed."""
        end = (len(prompt) - 1) // self.reused * self.reused
        while end and prompt[:end] not in self.held:
            end -= self.reused
        return end

    def keep(self, prompt: tuple[int, ...]) -> None:
        parent = None
        for end in range(self.page_size, len(prompt) + 1, self.page_size):
            page = prompt[end - self.page_size : end]
            if prompt[:end] not in self.held:
                name = self.held[prompt[:end]] = len(self.held)
                self.sink.take(
                    [PagesStored([name], parent, TokenIds.of(page).little_endian, self.page_size)]
                )
            parent = self.held[prompt[:end]]


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
async def test_cached_tokens_of_a_repeated_prompt_are_checked_in_pages_of_the_engine(
    page_size: int,
) -> None:
    found = await verdicts(lambda: Paging(page_size), only=["start", "kv-events"])
    assert found["kv-events"].verdict is Verdict.PASS, str(found["kv-events"])


class FailsStart(Counter):  # type: ignore[misc]
    """Fails during its start after it created a task."""

    async def start(self, worker_id: int) -> Any:
        self.task = asyncio.create_task(asyncio.Event().wait(), name="left-behind")
        raise Unavailable("no GPU is free")

    async def cleanup(self) -> None:
        if hasattr(self, "task"):
            self.task.cancel()
            await asyncio.wait([self.task])


@pytest.mark.parametrize("only", [["start"], []], ids=["start alone", "all checks"])
async def test_an_engine_with_a_half_finished_start_is_cleaned_up(only: Sequence[str]) -> None:
    found = await verdicts(FailsStart, only=only)
    assert found["start"].verdict is Verdict.FAIL
    assert "no GPU is free" in found["start"].reason
    assert not [one for one in asyncio.all_tasks() if one.get_name() == "left-behind"]
    assert only or found["cleanup"].verdict is Verdict.PASS, "its rule holds then, too"


class FailsStartAndCleanup(FailsStart):
    async def cleanup(self) -> None:
        self.engine.shutdown()


def test_the_default_stop_limit_equals_the_documented_one() -> None:
    (promised_ms,) = re.findall(r"has to be free within (\d+) ms", PAGE.read_text())
    assert TimeLimits().stop_s * 1000 == int(promised_ms)


class NeverIdle(Counter):  # type: ignore[misc]
    def loads(self) -> list[Load]:
        return [Load(rooms_open=1)]


class NeverDrained(Counter):  # type: ignore[misc]
    async def drain(self) -> None:
        await asyncio.Event().wait()


class NeverEndsStreams(Counter):  # type: ignore[misc]
    """Streams that are open at cleanup never end."""

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        yield chunk.token(1)
        await asyncio.Event().wait()


class CleansUpOnce(Counter):  # type: ignore[misc]
    async def cleanup(self) -> None:
        if not self.is_open:
            raise RuntimeError("it is closed")
        await super().cleanup()


class ServesAfterCleanup(Counter):  # type: ignore[misc]
    async def cleanup(self) -> None: ...


class NeedsAStart(Counter):  # type: ignore[misc]
    async def start(self, worker_id: int) -> Any:
        self.thread = object()
        return await super().start(worker_id)

    async def cleanup(self) -> None:
        del self.thread


class LeavesATask(Counter):  # type: ignore[misc]
    async def start(self, worker_id: int) -> Any:
        # Sleep: a task that the engine leaves behind.
        self.task = asyncio.create_task(asyncio.sleep(3600), name="left-behind")
        await asyncio.sleep(0)
        return await super().start(worker_id)

    async def cleanup(self) -> None:
        if self.is_open:
            self.task.cancel()
        await super().cleanup()


def faulty_sim(engine: type[SimEngine]) -> SimEngine:
    return engine(SimConfig(timing=Timing(speedup=0.0)))


# Check, a broken engine, expected part of the reason.
BROKEN: Sequence[tuple[str, Callable[[], LLMEngine], str]] = [
    ("shape", NoDrain, "drain is not a coroutine function"),
    ("start", Nameless, "neither model nor served_model_name"),
    ("loads", Negative, "negative"),
    ("generate", Endless, "without a terminal chunk"),
    ("generate", ContinuesAfterTerminal, "a chunk arrived after the terminal chunk"),
    ("max-tokens", SendsOneTokenTooMany, "max_tokens 1 returned 2 tokens"),
    ("usage", Miscounting, "it reported 1 + 1, not 37 + 8"),
    ("concurrent", OneAtATime, "one is enough"),
    ("refuses-empty-prompt", Untyped, "ValueError, not a MeshError"),
    ("refuses-long-prompt", AcceptsEverything, "it was not rejected"),
    ("refuses-unknown", AcceptsEverything, "it was not rejected"),
    ("stop-in-answer", IgnoresStops, "s after the stop"),
    ("stop-before-answer", SendsTokenAfterStop, "tokens came after the stop"),
    ("abort", AbortsOnlyWhatRuns, "KeyError"),
    ("closes-early", Leaky, "not idle"),
    ("cancelled-task", IgnoresCancellation, "still runs"),
    ("probes", ProbesAreRequests, "it got 2 tokens"),
    ("probes", SuppliesUnlimitedProbes, "its own probe has no max_tokens"),
    ("kv-events", lambda: faulty_sim(OmitsFirstPage), "which is not held"),
    (
        "kv-events",
        lambda: faulty_sim(RemovesUnstoredPage),
        "page 4711 was removed, which is not held",
    ),
    ("flush-cache", lambda: faulty_sim(KeepsItsCache), "pages are left after a flush"),
    ("kv-events", AdvertisesWithoutEvents, "is not a PagedEngine"),
    (
        "kv-events",
        lambda: Paging(4, whole_blocks_only=True),
        "had 64 cached tokens, events reported 68",
    ),
    (
        "kv-events",
        lambda: Paging(4, reported_page_size=8),
        "a page of 4 tokens was stored, the format has 8",
    ),
    ("rest", NeverIdle, "not idle"),
    ("drain", NeverDrained, "drain did not return within"),
    ("cleanup", NeverEndsStreams, "never ended"),
    ("cleanup", FailsStartAndCleanup, "AttributeError"),
    ("cleanup-twice", CleansUpOnce, "it is closed"),
    ("after-cleanup", ServesAfterCleanup, "it was not rejected"),
    ("cleanup-without-start", NeedsAStart, "AttributeError"),
    ("cleanup-after-cut-start", LeavesATask, "left-behind"),
]


@pytest.mark.parametrize(
    ("name", "make", "reason"), BROKEN, ids=[f"{name}-{at}" for at, (name, *_) in enumerate(BROKEN)]
)
async def test_an_engine_that_breaks_a_rule_fails_its_check(
    name: str, make: Callable[[], LLMEngine], reason: str
) -> None:
    before = {"start", "cleanup"} if name in ("cleanup-twice", "after-cleanup") else {"start"}
    # Short limits suffice for engines that respond; the others run into the limit.
    found = await verdicts(make, BRIEF, [*before, name])
    assert found[name].verdict is Verdict.FAIL, str(found[name])
    assert reason in found[name].reason
    leaked = [one for one in asyncio.all_tasks() if one.get_name() == "left-behind"]
    for task in leaked:
        task.cancel()
    await asyncio.gather(*leaked, return_exceptions=True)


def test_every_check_can_fail() -> None:
    assert {name for name, *_ in BROKEN} == {one.name for one in all_checks()}
    assert all(one.rule for one in all_checks())


def test_the_command_prints_one_line_per_check_and_exits_1_if_one_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "kvmesh_engine_of_the_page"
    (tmp_path / f"{name}.py").write_text(
        blocks()[0] + "\n\nclass IgnoresStops(Counter):\n    drain = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    limits = ["--answer-s=60", "--stop-s=30", "--end-s=30"]
    assert main([f"{name}:Counter", "--arg", "context_length=512", *limits]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]].count("PASS") == len(all_checks()) - 2
    assert lines[-1] == f"{len(all_checks()) - 2} pass, 0 fail, 2 skip"
    assert main([f"{name}:IgnoresStops", *limits]) == 1
    assert "FAIL shape: drain is not a coroutine function; rule: " in capsys.readouterr().out
    sys.modules.pop(name)


@pytest.mark.parametrize(
    ("target", "arguments", "reason"),
    [
        ("nothing", [], "is not MODULE:ENGINE"),
        ("no.such.module:Engine", [], "No module named"),
        ("worker_svc.engines.sim.engine:NoSuchEngine", [], "NoSuchEngine"),
        ("worker_svc.engines.sim.config:SIM_MODEL_DIR", [], "cannot be called"),
        (SIM_ENGINE, ["--arg=block_size=big"], "block_size"),
        (SIM_ENGINE, ["--arg=no_such=1"], "has no no_such"),
        (SIM_ENGINE, ['--arg=timing={"fast": 1}'], "has no timing.fast"),
    ],
)
def test_an_engine_that_cannot_be_constructed_is_reported_with_its_reason(
    target: str, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([target, *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_arguments_become_the_fields_of_a_configuration() -> None:
    make = load_engine_factory(
        SIM_ENGINE, {"block_size": 8, "timing": {"speedup": 0.0}, "handoff": {"role": "decode"}}
    )
    engine = make()
    assert isinstance(engine, SimEngine)
    assert (engine.config.block_size, engine.config.timing.speedup) == (8, 0.0)
    assert engine.config.handoff.role == "decode"


async def test_the_documented_engine_serves_as_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counter_of_the_page.py").write_text("\n\n".join(blocks()))
    monkeypatch.syspath_prepend(tmp_path)
    config = WorkerConfig(registry="memory", engine="counter_of_the_page:make", context_length=8)
    app = WorkerApp(
        config,
        instance_id=new_instance_id(Random(1)),
        registry=MemoryRegistry(MemoryStore()),
    )
    async with living(app, registered=False):
        request = PreprocessedRequest(
            token_ids=TokenIds.of([5, 6, 7]), stop_conditions=StopConditions(max_tokens=3)
        )
        tokens: list[int] = []
        key = app.runner.admit(LegRequest("r", request=request))
        terminal = await app.runner.run(key, lambda one: tokens.extend(one.token_ids))
        assert tokens == [8, 9, 10]
        assert terminal.finish_reason is FinishReason.LENGTH
    sys.modules.pop("counter_of_the_page")
