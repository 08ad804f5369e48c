"""Streams of users: each sends one chat after the other and measures the time to its first
token."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

import httpx

from tests.kit.processes import MODEL

TIMEOUT_S = 60.0
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """One response. Times are seconds of the monotonic clock."""

    started_at: float
    ttft_s: float
    tokens: int


class Streams:
    """words: of a prompt, each about one token. url: of a frontend, asked for each chat. seed: of
    the prompts."""

    def __init__(
        self, url: Callable[[], str], *, count: int, words: int, tokens: int, seed: int = 0
    ) -> None:
        self._url = url
        self._count = count
        self._words = words
        self._tokens = tokens
        self._seed = seed
        self.samples: list[Sample] = []
        self.errors = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the streams for the duration of the block."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, limits=limits) as http:
            tasks = [
                asyncio.create_task(self._stream(http, Random(f"{self._seed} {n}")))
                for n in range(self._count)
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def between(self, start: float, end: float) -> list[float]:
        """Returns the times to the first token of the chats that began in an interval."""
        return [one.ttft_s for one in self.samples if start <= one.started_at < end]

    async def _stream(self, http: httpx.AsyncClient, chance: Random) -> None:
        # Sleep: the streams are spread over the time of a response.
        await asyncio.sleep(chance.random() * 2.0)
        # Ends: the task is cancelled.
        while True:
            try:
                await self._chat(http, chance)
            except httpx.HTTPError:
                self.errors += 1
                # Sleep: a frontend that was killed starts again.
                await asyncio.sleep(RETRY_S)

    async def _chat(self, http: httpx.AsyncClient, chance: Random) -> None:
        text = " ".join(str(chance.randrange(10)) for _ in range(self._words))
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._tokens,
            "ignore_eos": True,
            "stream": True,
        }
        started_at = time.monotonic()
        first_at = 0.0
        url = f"{self._url()}/v1/chat/completions"
        async with http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                self.errors += 1
                # Sleep: a mesh that lost a service recovers.
                await asyncio.sleep(RETRY_S)
                return
            async for line in response.aiter_lines():
                if not first_at and '"content":"' in line and '"content":""' not in line:
                    first_at = time.monotonic()
        if first_at:
            self.samples.append(Sample(started_at, first_at - started_at, self._tokens))


async def saturate(
    url: str,
    bodies: list[dict[str, object]],
    concurrency: int,
    warm_up_s: float,
    seconds: float,
) -> float:
    """Sends bodies as ordinary requests; returns the output tokens per second after the warm-up."""
    tokens, begins_at = 0, time.monotonic() + warm_up_s
    ends_at = begins_at + seconds
    limits = httpx.Limits(max_connections=None)
    left = iter(bodies * 100)

    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, limits=limits) as http:

        async def send() -> None:
            nonlocal tokens
            # Ends: by the clock.
            while time.monotonic() < ends_at:
                response = await http.post(f"{url}/v1/completions", json=next(left))
                response.raise_for_status()
                if begins_at <= time.monotonic() < ends_at:
                    tokens += response.json()["usage"]["completion_tokens"]

        with contextlib.suppress(StopIteration):
            await asyncio.gather(*(send() for _ in range(concurrency)))
    return tokens / seconds
