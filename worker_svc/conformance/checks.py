"""The checks, in the order in which they run on one engine; the last ones stop it.

A check takes the harness, raises CheckFailed or CheckSkipped, and may return a remark. Its
docstring is the rule.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from common.errors import Conflict, InvalidRequest, MeshError, Unsupported
from worker_svc.conformance.harness import (
    POLL_S,
    WORKER_ID,
    CheckFailed,
    CheckSkipped,
    EngineHarness,
    PageEventChecker,
    StreamResult,
    check_cancelled,
    check_success,
    require,
    run_within,
)
from worker_svc.engines.contract import (
    FinishReason,
    FlushableEngine,
    LLMEngineOutput,
    OutputOptions,
    PagedEngine,
    ProbedEngine,
)
from worker_svc.kv_events.external_events import PagesStored
from worker_svc.serving.probe import probe_request

CONCURRENT = 8
ANSWER_TOKENS = 8

CheckFunction: TypeAlias = Callable[[EngineHarness], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, a sentence about the engine. any_role: whether it applies to every engine role."""

    name: str
    rule: str
    run: CheckFunction
    any_role: bool


async def shape(harness: EngineHarness) -> None:
    """has start, generate, abort, drain, cleanup and loads; its constructor starts nothing"""
    engine = harness.engine
    for name in ("start", "abort", "drain", "cleanup"):
        is_coroutine = inspect.iscoroutinefunction(getattr(engine, name, None))
        require(is_coroutine, f"{name} is not a coroutine function")
    require(
        inspect.isasyncgenfunction(getattr(engine, "generate", None)),
        "generate is not an async generator function, so its streams cannot be closed",
    )
    require(callable(getattr(engine, "loads", None)), "loads() is missing")


async def start(harness: EngineHarness) -> str:
    """start returns an EngineConfig that names the model; sizes are None or above 0"""
    harness.was_started = True
    config = await run_within(
        harness.limits.start_s, harness.engine.start(WORKER_ID), "start did not return"
    )
    require(config.advertised_name, "neither model nor served_model_name is set")
    for name in (
        *("context_length", "kv_cache_block_size", "total_kv_blocks", "max_num_seqs"),
        *("max_num_batched_tokens", "bootstrap_port", "dp_size"),
    ):
        size = getattr(config, name)
        require(size is None or size > 0, f"{name} is {size}; use None for an unknown size")
    require(
        (config.bootstrap_host is None) == (config.bootstrap_port is None),
        "bootstrap_host and bootstrap_port must be set together",
    )
    require(config.kv_index in ("events", "approx", "none"), f"kv_index is {config.kv_index!r}")
    require(
        config.kv_index == "events" or config.kv_index_reason,
        "kv_index_reason is empty although kv_index is not events",
    )
    harness.config, engine = config, harness.engine
    has_kv_events = config.kv_index == "events"
    if has_kv_events and isinstance(engine, PagedEngine) and not engine.kv_events_off_reason:
        harness.page_checker = PageEventChecker(engine.kv_event_format.page_size)
        engine.publish_to(harness.page_checker)
    return f"model {config.advertised_name}"


async def loads(harness: EngineHarness) -> None:
    """loads has one row per rank, no negative count, and takes less than 5 ms"""
    loop = asyncio.get_running_loop()
    elapsed_s = []
    for _ in range(20):
        began = loop.time()
        rows = harness.engine.loads()
        elapsed_s.append(loop.time() - began)
    ranks = sorted(row.dp_rank for row in rows)
    require(ranks == list(range(harness.engine_config.dp_size)), f"the rows have the ranks {ranks}")
    for row in rows:
        counts = (row.running, row.waiting, row.waiting_tokens, row.kv_used_blocks, row.rooms_open)
        require(min(counts) >= 0, f"a count is negative: {row}")
        is_possible = row.kv_total_blocks is None or row.kv_used_blocks <= row.kv_total_blocks
        require(is_possible, f"kv_used_blocks exceeds kv_total_blocks: {row}")
    require(min(elapsed_s) < 0.005, f"it takes {min(elapsed_s) * 1000:.1f} ms; the limit is 5 ms")


async def generate(harness: EngineHarness) -> str:
    """a stream is chunks with tokens, then exactly one terminal chunk, the last item"""
    stream_result = await harness.expect_success(harness.request(harness.prompt(24), ANSWER_TOKENS))
    tokens = stream_result.token_ids
    require(tokens, "the stream has no tokens")
    require(all(0 <= token < 2**32 for token in tokens), f"not all are token ids: {tokens}")
    return f"{len(tokens)} tokens in {len(stream_result.chunks)} chunks"


async def max_tokens(harness: EngineHarness) -> None:
    """max_tokens is obeyed, and a stream that it ends has finish reason length"""
    for limit in (1, 3):
        stream_result = await harness.expect_success(harness.request(harness.prompt(24), limit))
        got = len(stream_result.token_ids)
        require(got == limit, f"max_tokens {limit} returned {got} tokens")
        reason = stream_result.finish_reason
        require(reason is FinishReason.LENGTH, f"the finish reason is {reason}")


async def usage(harness: EngineHarness) -> None:
    """the counts of the terminal chunk, if any, match prompt and output"""
    prompt = harness.prompt(37)
    stream_result = await harness.expect_success(harness.request(prompt, ANSWER_TOKENS))
    reported = stream_result.chunks[-1].completion_usage
    if reported is None:
        raise CheckSkipped("the engine reports no usage")
    require(
        (reported.prompt_tokens, reported.completion_tokens)
        == (len(prompt), len(stream_result.token_ids)),
        f"it reported {reported.prompt_tokens} + {reported.completion_tokens},"
        f" not {len(prompt)} + {len(stream_result.token_ids)}",
    )
    require(
        reported.total_tokens == reported.prompt_tokens + reported.completion_tokens,
        f"its total is {reported.total_tokens}",
    )


async def concurrent(harness: EngineHarness) -> None:
    """requests run concurrently, each with its own stream and end"""
    requests = [
        harness.request(harness.prompt(16 + at, seed=at), 1 + at % ANSWER_TOKENS)
        for at in range(CONCURRENT)
    ]
    stream_results = await asyncio.gather(
        *(harness.expect_success(request) for request in requests)
    )
    for request, stream_result in zip(requests, stream_results, strict=True):
        limit = request.stop_conditions.max_tokens
        require(
            len(stream_result.token_ids) == limit,
            f"{len(stream_result.token_ids)} tokens, expected {limit}",
        )


async def refuses_empty_prompt(harness: EngineHarness) -> None:
    """an invalid request is rejected with InvalidRequest before any chunk"""
    error = await harness.expect_refusal(harness.request([], 1))
    require(isinstance(error, InvalidRequest), f"it raised {type(error).__name__}")
    require(error.field, "the error does not name the field")


async def refuses_long_prompt(harness: EngineHarness) -> None:
    """a prompt above context_length is rejected with InvalidRequest or PromptTooLong"""
    longest = harness.engine_config.context_length
    if longest is None or longest > 1 << 20:
        raise CheckSkipped("context_length is unknown or above 1048576")
    error = await harness.expect_refusal(harness.request(harness.prompt(longest + 1), 1))
    require(isinstance(error, InvalidRequest), f"it raised {type(error).__name__}")


async def refuses_unknown(harness: EngineHarness) -> None:
    """an unsupported field is rejected with Unsupported, by name"""
    fields: dict[str, object] = {
        "extra_args": {"no_engine_knows_this": 1},
        "output_options": OutputOptions(formatted_prompt=True),
    }
    for name, value in fields.items():
        error = await harness.expect_refusal(harness.request(harness.prompt(8), 1, **{name: value}))
        require(isinstance(error, Unsupported), f"{name}: it raised {type(error).__name__}")
        names_field = (error.field or "").startswith(name)
        require(names_field, f"it named {error.field}, expected {name}")


async def stop_in_answer(harness: EngineHarness) -> str:
    """a stop between chunks ends the stream with a cancelled chunk, in time"""
    ctx = harness.ctx()
    loop = asyncio.get_running_loop()
    stopped_at: list[float] = []

    async def stop(output: LLMEngineOutput) -> None:
        if output.token_ids and output.finish_reason is None and not stopped_at:
            stopped_at.append(loop.time())
            ctx.stop_generating("conformance")
        if stopped_at:
            require(
                loop.time() - stopped_at[0] < harness.limits.stop_s,
                f"chunks arrive {harness.limits.stop_s:g} s after the stop",
            )

    stream_result = await harness.run_request(harness.long_request(), ctx, on_chunk=stop)
    if not stopped_at:
        raise CheckSkipped("the stream ended before it could be stopped")
    elapsed_s = loop.time() - stopped_at[0]
    check_cancelled(stream_result)
    limit_s = harness.limits.stop_s
    require(elapsed_s < limit_s, f"it took {elapsed_s:.1f} s; the limit is {limit_s:g} s")
    await harness.wait_until_idle()
    return f"{elapsed_s * 1000:.0f} ms"


async def stop_before_answer(harness: EngineHarness) -> None:
    """a request that is stopped before its first token yields only a cancelled chunk"""
    ctx = harness.ctx()
    ctx.stop_generating("conformance")
    stream_result = await run_within(
        harness.limits.stop_s,
        harness.run_request(harness.long_request(), ctx),
        "the stop was not observed",
    )
    check_cancelled(stream_result)
    require(not stream_result.token_ids, "tokens came after the stop")
    await harness.wait_until_idle()


async def abort(harness: EngineHarness) -> None:
    """abort of a running, an ended and an unknown request returns, also twice"""
    ctx = harness.ctx()

    async def abort_twice(output: LLMEngineOutput) -> None:
        if not ctx.is_stopped:
            ctx.stop_generating("conformance")
            for _ in range(2):
                aborting = harness.engine.abort(ctx)
                await run_within(harness.limits.stop_s, aborting, "abort did not return")

    stream_result = await harness.run_request(harness.long_request(), ctx, on_chunk=abort_twice)
    check_success(stream_result)
    for ended_ctx in (ctx, harness.ctx()):
        await run_within(
            harness.limits.stop_s,
            harness.engine.abort(ended_ctx),
            "abort of an ended request did not return",
        )
    await harness.wait_until_idle()


async def closes_early(harness: EngineHarness) -> None:
    """closing the generator frees all resources without abort, and the next request is served"""
    for after in (1, 0):
        stream = harness.engine.generate(harness.long_request(), harness.ctx())
        if after:
            await run_within(harness.limits.answer_s, anext(stream), "the first chunk did not come")
        await run_within(harness.limits.stop_s, stream.aclose(), "aclose did not return")
        await harness.wait_until_idle()
    await harness.expect_success(harness.request(harness.prompt(8), 1))


async def cancelled_task(harness: EngineHarness) -> None:
    """a cancellation of the task that reads the stream passes through, and frees all resources"""
    has_started = asyncio.Event()

    async def on_first_chunk(_: LLMEngineOutput) -> None:
        has_started.set()
        await asyncio.sleep(0)

    reader = asyncio.create_task(
        harness.run_request(harness.request(harness.prompt(64), None), on_chunk=on_first_chunk)
    )
    began = asyncio.create_task(has_started.wait())
    await asyncio.wait([reader, began], return_when=asyncio.FIRST_COMPLETED)
    began.cancel()
    reader.cancel()
    done, _ = await asyncio.wait([reader], timeout=harness.limits.stop_s)
    require(done, f"the task still runs {harness.limits.stop_s:g} s after its cancellation")
    if not reader.cancelled():
        reader.result()
        raise CheckSkipped("the stream ended before it could be cancelled")
    await harness.wait_until_idle()


async def probes(harness: EngineHarness) -> None:
    """a probe gets one token (its own probe: tokens), in any role and without a partner"""
    harness.require_started()
    request = probe_request(harness.engine)
    stream_result = await harness.expect_success(request)
    tokens = len(stream_result.token_ids)
    if isinstance(harness.engine, ProbedEngine):
        limit = request.stop_conditions.max_tokens
        require(limit is not None, "its own probe has no max_tokens")
        assert limit is not None
        require(0 < tokens <= limit, f"it got {tokens} tokens, its own probe permits {limit}")
    else:
        require(tokens == 1, f"it got {tokens} tokens")
    await harness.wait_until_idle()


async def kv_events(harness: EngineHarness) -> str:
    """events report every page of a prompt, parents first, and only pages that are held"""
    config = harness.engine_config
    if config.kv_index != "events":
        raise CheckSkipped(f"kv_index is {config.kv_index!r}: {config.kv_index_reason}")
    if harness.page_checker is None:
        off_reason = getattr(harness.engine, "kv_events_off_reason", None)
        require(off_reason is not None, "kv_index is 'events', but the engine is not a PagedEngine")
        require(off_reason, "kv_events_off_reason is empty, but no events are published")
        raise CheckSkipped(str(off_reason))
    harness.require_aggregated()
    block = config.kv_cache_block_size
    require(block, "kv_cache_block_size is not set")
    assert block is not None
    page = harness.page_checker.page_size
    # Whole blocks and half a block more, which may be some pages or none.
    prompt = harness.prompt(4 * max(block, page) + max(block, page) // 2, seed=3)
    await harness.expect_success(harness.request(prompt, 2))
    page_count = await _wait_for_pages(harness, prompt[: len(prompt) // page * page])
    repeated = await harness.expect_success(harness.request(prompt, 2))
    require(not harness.page_checker.violations, "; ".join(harness.page_checker.violations[:3]))
    # At least one token is always computed, and with it its page.
    _check_cached(repeated, (len(prompt) - 1) // page * page)
    return f"{page_count} pages reported"


async def flush_cache(harness: EngineHarness) -> None:
    """a flush without requests removes every page, and the next prompt is computed again"""
    engine = harness.engine
    if not isinstance(engine, FlushableEngine) or harness.page_checker is None:
        raise CheckSkipped("the engine has no flush_cache or reports no pages")
    harness.require_aggregated()
    page_checker, prompt = harness.page_checker, harness.prompt(256, seed=4)
    await harness.expect_success(harness.request(prompt, 1))
    page = page_checker.page_size
    await _wait_for_pages(harness, prompt[: len(prompt) // page * page])
    deadline = asyncio.get_running_loop().time() + harness.limits.end_s
    while page_checker.held:
        with suppress(Conflict):  # its scheduler may still hold the last request
            await run_within(harness.limits.answer_s, engine.flush_cache(), "no flush")
        late = asyncio.get_running_loop().time() > deadline
        require(not late, f"{len(page_checker.held)} pages are left after a flush")
        await asyncio.sleep(POLL_S)
    _check_cached(await harness.expect_success(harness.request(prompt, 1)), 0)


async def _wait_for_pages(harness: EngineHarness, prompt: list[int]) -> int:
    """Waits until the prompt's pages are reported. Returns the number of held pages."""
    assert harness.page_checker is not None
    prompt_bytes = b"".join(token.to_bytes(4, "little") for token in prompt)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + harness.limits.answer_s
    while not _covers_prompt(harness.page_checker, prompt_bytes):
        require(not harness.page_checker.violations, "; ".join(harness.page_checker.violations[:3]))
        require(loop.time() < deadline, "the pages of a prompt were not reported")
        await asyncio.sleep(POLL_S)
    return len(harness.page_checker.held)


def _covers_prompt(page_checker: PageEventChecker, prompt_bytes: bytes) -> bool:
    """Whether the stored pages contain the prompt from its start."""
    content: dict[int | None, list[tuple[int, bytes]]] = {}
    for event in page_checker.events:
        if isinstance(event, PagesStored):
            parent, size = event.parent, event.page_size * 4
            for at, page in enumerate(event.hashes):
                content.setdefault(parent, []).append(
                    (page, event.token_ids[at * size : (at + 1) * size])
                )
                parent = page
    ends: set[int | None] = {None}
    rest: dict[int | None, bytes] = {None: prompt_bytes}
    while ends:
        end = ends.pop()
        for page, part in content.get(end, ()):
            left = rest[end]
            if left.startswith(part):
                if len(left) == len(part):
                    return True
                if page not in rest:
                    rest[page] = left[len(part) :]
                    ends.add(page)
    return False


def _check_cached(repeated: StreamResult, tokens: int) -> None:
    reported = repeated.chunks[-1].completion_usage
    details = reported.prompt_tokens_details if reported is not None else None
    if details is None or details.cached_tokens is None:
        return
    require(
        details.cached_tokens == tokens,
        f"a repeated prompt had {details.cached_tokens} cached tokens, events reported {tokens}",
    )


async def rest(harness: EngineHarness) -> None:
    """after the other checks no request runs, waits or is handed over"""
    harness.require_started()
    await harness.wait_until_idle()


async def drain(harness: EngineHarness) -> None:
    """drain of an idle engine returns"""
    harness.require_started()
    await run_within(harness.limits.end_s, harness.engine.drain(), "drain did not return")


async def cleanup(harness: EngineHarness) -> None:
    """cleanup stops the engine and its open streams, also after a failed start"""
    if not harness.was_started:
        raise CheckSkipped("start was not called")
    stream = None
    if harness.config is not None and harness.config.local_prefill:
        stream = asyncio.create_task(harness.run_request(harness.long_request()))
        await asyncio.sleep(POLL_S)
    try:
        await run_within(harness.limits.end_s, harness.engine.cleanup(), "cleanup did not return")
        if stream is not None:
            done, _ = await asyncio.wait([stream], timeout=harness.limits.end_s)
            require(done, "a stream that was open at cleanup never ended")
            error = stream.result().error
            require(
                error is None or isinstance(error, MeshError),
                f"a stream that was open at cleanup ended with {error!r}, not a MeshError",
            )
    finally:
        if stream is not None:
            stream.cancel()
            with suppress(asyncio.CancelledError, CheckFailed):
                await stream


async def cleanup_twice(harness: EngineHarness) -> None:
    """a second cleanup returns at once without effect"""
    harness.require_started()
    await run_within(
        harness.limits.stop_s, harness.engine.cleanup(), "the second cleanup did not return"
    )


async def after_cleanup(harness: EngineHarness) -> None:
    """a request after cleanup is rejected with a MeshError"""
    await harness.expect_refusal(harness.request(harness.prompt(8), 1))


async def cleanup_without_start(harness: EngineHarness) -> None:
    """cleanup of an engine that was never started returns"""
    await run_within(
        harness.limits.end_s, harness.make_engine().cleanup(), "cleanup did not return"
    )


async def cleanup_after_cut_start(harness: EngineHarness) -> None:
    """cleanup after a cancelled start returns and leaves no task running"""
    engine = harness.make_engine()
    before = asyncio.all_tasks()
    starting = asyncio.create_task(engine.start(WORKER_ID + 1))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting], timeout=harness.limits.end_s)
    await run_within(harness.limits.end_s, engine.cleanup(), "cleanup did not return")
    await asyncio.sleep(POLL_S)
    left = [task.get_name() for task in asyncio.all_tasks() - before if not task.done()]
    require(not left, f"tasks still run: {left}")


_CHECKS: tuple[CheckFunction, ...] = (
    *(shape, start, loads, generate, max_tokens, usage, concurrent),
    *(refuses_empty_prompt, refuses_long_prompt, refuses_unknown),
    *(stop_in_answer, stop_before_answer, abort, closes_early, cancelled_task),
    *(probes, kv_events, flush_cache, rest, drain, cleanup, cleanup_twice, after_cleanup),
    *(cleanup_without_start, cleanup_after_cut_start),
)
# Checks that apply to engines for prefill or decode legs, too.
_ANY_ROLE = (
    *(shape, start, loads, refuses_empty_prompt, probes, kv_events, rest, drain, cleanup),
    *(cleanup_twice, cleanup_without_start, cleanup_after_cut_start),
)


def all_checks() -> tuple[Check, ...]:
    return tuple(
        Check(run.__name__.replace("_", "-"), inspect.getdoc(run) or "", run, run in _ANY_ROLE)
        for run in _CHECKS
    )
