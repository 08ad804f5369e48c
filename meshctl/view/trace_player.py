"""Plays requests of a trace on a running mesh, through the HTTP API of a frontend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import httpx

from common.inspection.gateway import GatewayError
from meshctl.view.latencies import CompletionClient, Course

# Ordinary tokens of most vocabularies.
_TOKENS = (300, 4000)
# Seeds of blocks that no other prompt has.
_PRIVATE = 1 << 48


@dataclass(frozen=True, slots=True)
class PlayedRequest:
    """A request of a trace. at_s: from the start. names: of its full blocks that others may
    share."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    names: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Played:
    """courses: of the requests in their order; None: it failed. error: of the first that failed."""

    courses: list[Course | None]
    error: str = ""


def prompt_of(request: PlayedRequest, number: int, block_size: int) -> list[int]:
    """Returns tokens that repeat where the names of the blocks do."""
    names = request.names[: request.prompt_tokens // block_size]
    tokens: list[int] = []
    for name in names:
        tokens += Random(name).choices(range(*_TOKENS), k=block_size)
    rest = request.prompt_tokens - len(tokens)
    return tokens + Random(_PRIVATE + number).choices(range(*_TOKENS), k=rest)


async def play(
    http: httpx.AsyncClient,
    url: str,
    model: str,
    requests: Sequence[PlayedRequest],
    block_size: int,
) -> Played:
    """Sends the requests at their times and waits for all of them."""
    client, began_at = CompletionClient(http, url, model), time.perf_counter()
    errors: list[str] = []

    async def send(prompt: list[int], output_tokens: int) -> Course | None:
        try:
            return await client.course(prompt, output_tokens, {})
        except GatewayError as error:
            errors.append(str(error))
            return None

    tasks: list[asyncio.Task[Course | None]] = []
    async with asyncio.TaskGroup() as group:
        for number, request in enumerate(requests):
            prompt = prompt_of(request, number, block_size)
            await asyncio.sleep(max(0.0, began_at + request.at_s - time.perf_counter()))
            tasks.append(group.create_task(send(prompt, request.output_tokens)))
    return Played([task.result() for task in tasks], errors[0] if errors else "")
