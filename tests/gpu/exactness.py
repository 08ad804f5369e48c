"""Greedy responses of a prefill/decode pair, and of a response that continues on another worker,
compared with those of one aggregated worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from tests.sglang.sglang_mesh import HttpMesh, Response
from tests.sglang.sglang_workers import WAIT_S, WorkerProcess, until

LENGTHS: Final = (5, 15, 16, 17, 33, 64, 129, 200, 480, 700)
OUTPUT_TOKENS: Final = 32
MIGRATED_TOKENS: Final = 384
# Of the response when its worker is killed.
TOKENS_BEFORE_KILL: Final = 48
# Ids that every tokenizer here decodes to text of its own.
_FIRST_ID, _LAST_ID = 300, 4000


def make_prompt(rng: Random, tokens: int) -> list[int]:
    """Returns random token ids."""
    return [rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(tokens)]


# Any: figures as JSON.
async def compare_pair(aggregated: HttpMesh, pair: HttpMesh) -> dict[str, Any]:
    """Compares responses to prompts of LENGTHS: one at a time, so that both compute in batches of
    the same shape, then all at once."""
    rng = Random(11)
    prompts = [make_prompt(rng, length) for length in LENGTHS]
    expected, equal, differences = [], 0, []
    for prompt in prompts:
        one = await aggregated.complete(prompt, OUTPUT_TOKENS, stream=True)
        other, line = await pair.complete_with_log(prompt, max_tokens=OUTPUT_TOKENS, stream=True)
        assert len(line["workers"]) == 2, f"not served by a pair: {line['workers']}"
        expected.append(one.content)
        equal += other.content == one.content
        differences += first_difference(one.text, other.text)
    async with asyncio.timeout(WAIT_S):
        together = await asyncio.gather(
            *(pair.complete(prompt, OUTPUT_TOKENS, stream=True) for prompt in prompts)
        )
    return {
        "prompts": len(prompts),
        "prompt_tokens": list(LENGTHS),
        "output_tokens": OUTPUT_TOKENS,
        "equal": equal,
        "equal_at_once": sum(
            one.content == other for one, other in zip(together, expected, strict=True)
        ),
        "complete_at_once": sum(
            one.content[1:] == other[1:] for one, other in zip(together, expected, strict=True)
        ),
        "different_from_char": differences,
    }


async def migrate(mesh: HttpMesh, workers: Sequence[WorkerProcess]) -> dict[str, Any]:
    """Kills the worker of a response in the middle; the response continues on the other one, and
    is compared with that of a worker that lived."""
    prompt = make_prompt(Random(12), 100)
    expected = await mesh.complete(prompt, MIGRATED_TOKENS, stream=True)
    stream = Response()
    running = asyncio.create_task(
        mesh.complete_with_log(prompt, max_tokens=MIGRATED_TOKENS, stream=True, into=stream)
    )
    await until(lambda: stream.events >= TOKENS_BEFORE_KILL, "the response is half done")
    victim = await _find_running(workers)
    chars_before = len(stream.text)
    victim.process.kill()
    began = time.perf_counter()
    events = stream.events
    await until(lambda: stream.events > events + 2, "the response continues")
    pause_s = time.perf_counter() - began
    response, line = await running
    assert len(line["workers"]) > 1, f"not migrated: {line}"
    return {
        "output_tokens": response.usage["completion_tokens"],
        "complete": response.content[1:] == expected.content[1:],
        "equal": response.content == expected.content,
        "equal_before_kill": response.text[:chars_before] == expected.text[:chars_before],
        "different_from_char": first_difference(expected.text, response.text),
        "chars_before_kill": chars_before,
        "pause_s": round(pause_s, 3),
    }


async def _find_running(workers: Sequence[WorkerProcess]) -> WorkerProcess:
    """Returns the worker that computes a request."""
    from common.rpc import channel as rpc
    from kvmesh.engine.v1 import engine_pb2 as pb

    for worker in workers:
        load = await rpc.unary(worker.stub.GetLoad, pb.GetLoadRequest(), timeout_s=WAIT_S)
        if any(one.running for one in load.loads):
            return worker
    raise AssertionError("no worker computes the request")


def first_difference(one: str, other: str) -> list[int]:
    """Returns the offset of the first character that differs, or nothing for equal texts."""
    if one == other:
        return []
    for offset, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return [offset]
    return [min(len(one), len(other))]
