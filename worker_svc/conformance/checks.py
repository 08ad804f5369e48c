"""The checks, in the order in which they run on one engine; the last ones end it.

Each takes the bench, raises Failed or Skipped, and may return a remark. Its docstring is the rule.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from common.errors import InvalidRequest, MeshError, Unsupported
from worker_svc.conformance.bench import (
    POLL_S,
    WORKER_ID,
    Bench,
    Failed,
    Heard,
    Pages,
    Skipped,
    demand,
    must_end_well,
    within,
)
from worker_svc.engines.contract import FinishReason, LLMEngineOutput, PagedEngine
from worker_svc.kv_events.normalizer import PagesStored
from worker_svc.serving.probe import probe

CONCURRENT = 8
ANSWER_TOKENS = 8

Run: TypeAlias = Callable[[Bench], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, a sentence about the engine."""

    name: str
    rule: str
    run: Run


async def shape(bench: Bench) -> None:
    """has start, generate, abort, drain, cleanup and loads, and its constructor starts nothing"""
    for name in ("start", "abort", "drain", "cleanup"):
        demand(
            inspect.iscoroutinefunction(getattr(bench.engine, name, None)),
            f"{name} is no coroutine function",
        )
    demand(
        inspect.isasyncgenfunction(getattr(bench.engine, "generate", None)),
        "generate is no async generator function, so that nothing closes its streams",
    )
    demand(callable(getattr(bench.engine, "loads", None)), "there is no loads()")


async def start(bench: Bench) -> str:
    """start returns an EngineConfig that names the model; sizes are absent or above 0"""
    bench.was_started = True
    config = await within(
        bench.limits.start_s, bench.engine.start(WORKER_ID), "start did not return"
    )
    demand(config.advertised_name, "neither model nor served_model_name is set")
    for name in (
        *("context_length", "kv_cache_block_size", "total_kv_blocks", "max_num_seqs"),
        *("max_num_batched_tokens", "bootstrap_port", "dp_size"),
    ):
        size = getattr(config, name)
        demand(size is None or size > 0, f"{name} is {size}; what is not known is None")
    demand(
        (config.bootstrap_host is None) == (config.bootstrap_port is None),
        "bootstrap_host and bootstrap_port count together only",
    )
    demand(config.kv_index in ("events", "approx", "none"), f"kv_index is {config.kv_index!r}")
    demand(
        config.kv_index == "events" or config.kv_index_reason,
        "kv_index_reason does not say why there are no events",
    )
    bench.config = config
    _publish(bench)
    return f"model {config.advertised_name}"


def _publish(bench: Bench) -> None:
    engine, says_events = bench.engine, bench.started.kv_index == "events"
    if says_events and isinstance(engine, PagedEngine) and not engine.kv_silence:
        bench.pages = Pages(engine.kv_rules.page_size)
        engine.publish_to(bench.pages)


async def loads(bench: Bench) -> None:
    """loads has one row a rank, its counts are not negative, and it costs next to nothing"""
    loop = asyncio.get_running_loop()
    took_s = []
    for _ in range(20):
        began = loop.time()
        rows = bench.loads()
        took_s.append(loop.time() - began)
    ranks = sorted(row.dp_rank for row in rows)
    demand(ranks == list(range(bench.started.dp_size)), f"its rows are of the ranks {ranks}")
    for row in rows:
        counts = (row.running, row.waiting, row.waiting_tokens, row.kv_used_blocks, row.rooms_open)
        demand(min(counts) >= 0, f"a count is negative: {row}")
        total = row.kv_total_blocks
        demand(total is None or row.kv_used_blocks <= total, f"more is used than there is: {row}")
    demand(min(took_s) < 0.005, f"it takes {min(took_s) * 1000:.1f} ms, and is called all the time")


async def generate(bench: Bench) -> str:
    """an answer is chunks with tokens and then exactly one terminal chunk, the last item"""
    bench.needs_whole_answers()
    heard = await bench.answer(bench.request(bench.prompt(24), ANSWER_TOKENS))
    tokens = heard.token_ids
    demand(tokens, "there are no tokens")
    demand(all(0 <= one < 2**32 for one in tokens), f"not all are token ids: {tokens}")
    return f"{len(tokens)} tokens in {len(heard.chunks)} chunks"


async def max_tokens(bench: Bench) -> None:
    """max_tokens is kept, and an answer that it ends has finish reason length"""
    bench.needs_whole_answers()
    for most in (1, 3):
        heard = await bench.answer(bench.request(bench.prompt(24), most))
        got = len(heard.token_ids)
        demand(got == most, f"max_tokens {most} gave {got} tokens")
        demand(
            heard.finish_reason is FinishReason.LENGTH,
            f"the finish reason is {heard.finish_reason}",
        )


async def usage(bench: Bench) -> None:
    """the counts of the terminal chunk, where there are any, are those of prompt and answer"""
    bench.needs_whole_answers()
    prompt = bench.prompt(37)
    heard = await bench.answer(bench.request(prompt, ANSWER_TOKENS))
    counted = heard.chunks[-1].completion_usage
    if counted is None:
        raise Skipped("the engine does not count")
    demand(
        (counted.prompt_tokens, counted.completion_tokens) == (len(prompt), len(heard.token_ids)),
        f"it counted {counted.prompt_tokens} + {counted.completion_tokens},"
        f" not {len(prompt)} + {len(heard.token_ids)}",
    )
    demand(
        counted.total_tokens == counted.prompt_tokens + counted.completion_tokens,
        f"its total is {counted.total_tokens}",
    )


async def concurrent(bench: Bench) -> None:
    """requests run at once, each with its own stream and end"""
    bench.needs_whole_answers()
    requests = [
        bench.request(bench.prompt(16 + at, seed=at), 1 + at % ANSWER_TOKENS)
        for at in range(CONCURRENT)
    ]
    heard = await asyncio.gather(*(bench.answer(one) for one in requests))
    for request, one in zip(requests, heard, strict=True):
        most = request.stop_conditions.max_tokens
        demand(len(one.token_ids) == most, f"{len(one.token_ids)} tokens came, not {most}")


async def refuses_empty_prompt(bench: Bench) -> None:
    """a request that makes no sense is refused with InvalidRequest, before any chunk"""
    error = await bench.refusal(bench.request([], 1))
    demand(isinstance(error, InvalidRequest), f"it raised {type(error).__name__}")
    demand(error.field, "the error does not name the field")


async def refuses_long_prompt(bench: Bench) -> None:
    """a prompt above context_length is refused with InvalidRequest or PromptTooLong"""
    bench.needs_whole_answers()
    longest = bench.started.context_length
    if longest is None or longest > 1 << 20:
        raise Skipped("context_length is not known, or beyond what is tried here")
    error = await bench.refusal(bench.request(bench.prompt(longest + 1), 1))
    demand(isinstance(error, InvalidRequest), f"it raised {type(error).__name__}")


async def refuses_unknown(bench: Bench) -> None:
    """what it cannot honour it refuses by name, with Unsupported"""
    bench.needs_whole_answers()
    request = bench.request(bench.prompt(8), 1, extra_args={"no_engine_knows_this": 1})
    error = await bench.refusal(request)
    demand(isinstance(error, Unsupported), f"it raised {type(error).__name__}")
    demand((error.field or "").startswith("extra_args"), f"it named {error.field}, not extra_args")


async def stop_in_answer(bench: Bench) -> str:
    """a stop between chunks ends the stream with a cancelled chunk, in time"""
    bench.needs_whole_answers()
    ctx = bench.ctx()
    loop = asyncio.get_running_loop()
    stopped_at: list[float] = []

    async def stop(output: LLMEngineOutput) -> None:
        if output.token_ids and output.finish_reason is None and not stopped_at:
            stopped_at.append(loop.time())
            ctx.inner_arc().stop_generating("conformance")
        if stopped_at:
            demand(
                loop.time() - stopped_at[0] < bench.limits.stop_s, "it goes on long after the stop"
            )

    heard = await bench.hear(bench.long_request(), ctx, on_chunk=stop)
    if not stopped_at:
        raise Skipped("the answer was over before it could be stopped")
    took_s = loop.time() - stopped_at[0]
    must_end_well(heard)
    demand(heard.finish_reason is FinishReason.CANCELLED, f"it ended with {heard.finish_reason}")
    demand(took_s < bench.limits.stop_s, f"it took {took_s:.1f} s")
    await bench.at_rest()
    return f"{took_s * 1000:.0f} ms"


async def stop_before_answer(bench: Bench) -> None:
    """a request that is stopped before its first token says nothing but cancelled"""
    bench.needs_whole_answers()
    ctx = bench.ctx()
    ctx.inner_arc().stop_generating("conformance")
    heard = await within(
        bench.limits.stop_s, bench.hear(bench.long_request(), ctx), "the stop was not observed"
    )
    must_end_well(heard)
    demand(heard.finish_reason is FinishReason.CANCELLED, f"it ended with {heard.finish_reason}")
    demand(not heard.token_ids, "tokens came after the stop")
    await bench.at_rest()


async def abort(bench: Bench) -> None:
    """abort of a running, an ended and an unknown request returns, also twice"""
    bench.needs_whole_answers()
    ctx = bench.ctx()

    async def twice(output: LLMEngineOutput) -> None:
        if not ctx.is_stopped:
            ctx.inner_arc().stop_generating("conformance")
            for _ in range(2):
                await within(bench.limits.stop_s, bench.engine.abort(ctx), "abort did not return")

    heard = await bench.hear(bench.long_request(), ctx, on_chunk=twice)
    must_end_well(heard)
    for gone in (ctx, bench.ctx()):
        await within(
            bench.limits.stop_s, bench.engine.abort(gone), "abort of what is over did not return"
        )
    await bench.at_rest()


async def closes_early(bench: Bench) -> None:
    """closing the generator frees all at once, without abort, and the next request is served"""
    bench.needs_whole_answers()
    for after in (1, 0):
        stream = bench.engine.generate(bench.long_request(), bench.ctx())
        if after:
            await within(bench.limits.answer_s, anext(stream), "the first chunk did not come")
        await within(bench.limits.stop_s, stream.aclose(), "aclose did not return")
        await bench.at_rest()
    await bench.answer(bench.request(bench.prompt(8), 1))


async def cancelled_task(bench: Bench) -> None:
    """a cancellation of the task that reads the stream passes through it, and frees all"""
    bench.needs_whole_answers()
    has_begun = asyncio.Event()

    async def begun(_: LLMEngineOutput) -> None:
        has_begun.set()
        await asyncio.sleep(0)

    reader = asyncio.create_task(bench.hear(bench.request(bench.prompt(64), None), on_chunk=begun))
    began = asyncio.create_task(has_begun.wait())
    await asyncio.wait([reader, began], return_when=asyncio.FIRST_COMPLETED)
    began.cancel()
    reader.cancel()
    done, _ = await asyncio.wait([reader], timeout=bench.limits.stop_s)
    demand(done, f"the task still runs {bench.limits.stop_s:g} s after its cancellation")
    if not reader.cancelled():
        reader.result()
        raise Skipped("the answer was over before it could be cancelled")
    await bench.at_rest()


async def probes(bench: Bench) -> None:
    """a probe gets one token, in any role and without a partner"""
    bench.needs_start()
    heard = await bench.answer(probe())
    demand(len(heard.token_ids) == 1, f"it got {len(heard.token_ids)} tokens")
    await bench.at_rest()


async def kv_events(bench: Bench) -> str:
    """events tell every page of a prompt, parents first, and say nothing that is not so"""
    config = bench.started
    if config.kv_index != "events":
        raise Skipped(f"kv_index is {config.kv_index!r}: {config.kv_index_reason}")
    if bench.pages is None:
        silence = getattr(bench.engine, "kv_silence", None)
        demand(silence is not None, "kv_index is 'events', but the engine is no PagedEngine")
        demand(silence, "kv_silence is not set, and nothing is published")
        raise Skipped(str(silence))
    bench.needs_whole_answers()
    block = config.kv_cache_block_size
    demand(block, "kv_cache_block_size is not set")
    assert block is not None
    page = bench.pages.page_size
    # Whole blocks and half a one more, which is some pages or none.
    prompt = bench.prompt(4 * max(block, page) + max(block, page) // 2, seed=3)
    await bench.answer(bench.request(prompt, 2))
    told = await _told(bench, prompt[: len(prompt) // page * page])
    again = await bench.answer(bench.request(prompt, 2))
    demand(not bench.pages.faults, "; ".join(bench.pages.faults[:3]))
    # One token at least is always computed, and with it its page.
    _check_cached(again, (len(prompt) - 1) // page * page)
    return f"{told} pages told"


async def _told(bench: Bench, prompt: list[int]) -> int:
    """Waits until the prompt's pages are told of; how many events' pages there are in all."""
    assert bench.pages is not None
    wanted = b"".join(token.to_bytes(4, "little") for token in prompt)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + bench.limits.answer_s
    while not _chain_holds(bench.pages, wanted):
        demand(not bench.pages.faults, "; ".join(bench.pages.faults[:3]))
        demand(loop.time() < deadline, "the pages of a prompt were not told of")
        await asyncio.sleep(POLL_S)
    return len(bench.pages.held)


def _chain_holds(pages: Pages, wanted: bytes) -> bool:
    """Whether the stored pages, from the start of a prompt on, spell the bytes."""
    content: dict[int | None, list[tuple[int, bytes]]] = {}
    for event in pages.events:
        if isinstance(event, PagesStored):
            parent, size = event.parent, event.page_size * 4
            for at, one in enumerate(event.hashes):
                content.setdefault(parent, []).append(
                    (one, event.token_ids[at * size : (at + 1) * size])
                )
                parent = one
    ends: set[int | None] = {None}
    rest: dict[int | None, bytes] = {None: wanted}
    while ends:
        end = ends.pop()
        for one, part in content.get(end, ()):
            left = rest[end]
            if left.startswith(part):
                if len(left) == len(part):
                    return True
                if one not in rest:
                    rest[one] = left[len(part) :]
                    ends.add(one)
    return False


def _check_cached(again: Heard, tokens: int) -> None:
    counted = again.chunks[-1].completion_usage
    details = counted.prompt_tokens_details if counted is not None else None
    if details is None or details.cached_tokens is None:
        return
    demand(
        details.cached_tokens == tokens,
        f"a repeated prompt had {details.cached_tokens} tokens cached, events told of {tokens}",
    )


async def rest(bench: Bench) -> None:
    """after all that, nothing runs, waits or is handed over"""
    bench.needs_start()
    await bench.at_rest()


async def drain(bench: Bench) -> None:
    """drain of an engine at rest returns"""
    bench.needs_start()
    await within(bench.limits.end_s, bench.engine.drain(), "drain did not return")


async def cleanup(bench: Bench) -> None:
    """cleanup ends the engine, also after a start that failed; a stream that is open ends too"""
    if not bench.was_started:
        raise Skipped("start was not tried")
    stream = None
    if bench.config is not None and bench.config.local_prefill:
        stream = asyncio.create_task(bench.hear(bench.long_request()))
        await asyncio.sleep(POLL_S)
    try:
        await within(bench.limits.end_s, bench.engine.cleanup(), "cleanup did not return")
        if stream is not None:
            done, _ = await asyncio.wait([stream], timeout=bench.limits.end_s)
            demand(done, "a stream that was open at cleanup never ended")
            error = stream.result().error
            demand(
                error is None or isinstance(error, MeshError),
                f"a stream that was open at cleanup ended with {error!r}, no MeshError",
            )
    finally:
        if stream is not None:
            stream.cancel()
            with suppress(asyncio.CancelledError, Failed):
                await stream


async def cleanup_twice(bench: Bench) -> None:
    """a second cleanup returns at once and does nothing"""
    bench.needs_start()
    await within(bench.limits.stop_s, bench.engine.cleanup(), "the second cleanup did not return")


async def after_cleanup(bench: Bench) -> None:
    """a request after cleanup is refused with a MeshError"""
    bench.needs_whole_answers()
    await bench.refusal(bench.request(bench.prompt(8), 1))


async def cleanup_without_start(bench: Bench) -> None:
    """cleanup of an engine that was never started returns"""
    await within(bench.limits.end_s, bench.make().cleanup(), "cleanup did not return")


async def cleanup_after_cut_start(bench: Bench) -> None:
    """cleanup after a start that was cut short returns, and leaves nothing behind"""
    engine = bench.make()
    before = asyncio.all_tasks()
    starting = asyncio.create_task(engine.start(WORKER_ID + 1))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting], timeout=bench.limits.end_s)
    await within(bench.limits.end_s, engine.cleanup(), "cleanup did not return")
    await asyncio.sleep(POLL_S)
    left = [task.get_name() for task in asyncio.all_tasks() - before if not task.done()]
    demand(not left, f"tasks are left running: {left}")


_IN_ORDER: tuple[Run, ...] = (
    *(shape, start, loads, generate, max_tokens, usage, concurrent),
    *(refuses_empty_prompt, refuses_long_prompt, refuses_unknown),
    *(stop_in_answer, stop_before_answer, abort, closes_early, cancelled_task),
    *(probes, kv_events, rest, drain, cleanup, cleanup_twice, after_cleanup),
    *(cleanup_without_start, cleanup_after_cut_start),
)


def all_checks() -> tuple[Check, ...]:
    """The checks in order."""
    return tuple(
        Check(run.__name__.replace("_", "-"), inspect.getdoc(run) or "", run) for run in _IN_ORDER
    )
