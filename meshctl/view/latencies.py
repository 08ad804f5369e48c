"""Measured latencies of one idle worker, through the HTTP API of a frontend."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any
from urllib.parse import quote

import httpx

from common.inspection.gateway import GatewayError, stream_events

# At most what the context of the model has room for.
PROMPT_TOKENS = (64, 512, 2048, 4096)
PROMPT_REPEATS = 5
PROMPT_OUTPUT_TOKENS = 2
# Of the context; engines keep some tokens of it for themselves.
RESERVED_TOKENS = 64
AT_ONCE = (1, 4, 16, 32)
DECODE_TOKENS = 96
# Longer than the steps of most engines, so that they divide it; a shorter one if the context ends.
CHUNKED_TOKENS = (12_288, 6_144)
# Of the stream beside it, which the client ends.
BESIDE_TOKENS = 2048
# Ordinary tokens of most vocabularies.
_TOKENS = (300, 4000)
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """prompts: tokens and seconds to the first token. decodes: requests at once and seconds between
    two tokens. pauses: tokens of a prompt, and the longest time without a token of a stream beside
    it."""

    prompts: list[tuple[int, float]]
    decodes: list[tuple[int, float]]
    pauses: list[tuple[int, float]]

    def to_json(self) -> str:
        return json.dumps({"prompts": self.prompts, "decodes": self.decodes, "pauses": self.pauses})


@dataclass(frozen=True, slots=True)
class Course:
    """Times of one response in seconds. worker: that served it, as text."""

    first_s: float
    last_s: float
    tokens: int
    worker: str

    @property
    def itl_s(self) -> float | None:
        """Mean seconds of a further token; None without one."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


def prompt_lengths(context_tokens: int | None) -> list[int]:
    """Returns the lengths of prompts to measure. context_tokens: of the model; None: unknown."""
    if context_tokens is None:
        return list(PROMPT_TOKENS)
    room = max(1, context_tokens - RESERVED_TOKENS)
    return sorted({min(tokens, room) for tokens in PROMPT_TOKENS})


class CompletionClient:
    """Sends prompts of token ids as streamed completions."""

    def __init__(self, http: httpx.AsyncClient, url: str, model: str) -> None:
        self._http = http
        self._url = f"{url}/v1/completions"
        self._model = model

    def chunks(
        self, prompt: Sequence[int], max_tokens: int, nvext: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the events of a response. Raises GatewayError."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "nvext": {"extra_fields": ["worker_id"], **nvext},
        }
        return stream_events(self._http, self._url, body, _TIMEOUT_S, kind="completion")

    async def course(self, prompt: Sequence[int], max_tokens: int, nvext: dict[str, Any]) -> Course:
        """Returns the course of a request. Raises GatewayError."""
        started_at, first_s, last_s = time.perf_counter(), 0.0, 0.0
        tokens, worker = 0, ""
        async with aclosing(self.chunks(prompt, max_tokens, nvext)) as events:
            async for chunk in events:
                now_s = time.perf_counter() - started_at
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
                elif chunk.get("choices"):
                    first_s, last_s = first_s or now_s, now_s
                worker = _worker_of(chunk) or worker
        if not tokens:
            raise GatewayError("the stream ended without usage")
        return Course(first_s, last_s, tokens, worker)


class LatencyProbe:
    """Sends prompts of random tokens, so that no cache has them, to one worker."""

    def __init__(self, http: httpx.AsyncClient, url: str, model: str, seed: int = 1) -> None:
        self._client = CompletionClient(http, url, model)
        self._model_url = f"{url}/v1/models/{quote(model, safe='')}"
        self._http = http
        self._rng = Random(seed)
        self._pins: dict[str, Any] = {}

    async def measure(self) -> Latencies:
        """Returns the latencies. Raises GatewayError."""
        first = await self._course(PROMPT_TOKENS[0], PROMPT_OUTPUT_TOKENS)
        # All further requests run on the worker of the first one.
        self._pins = {"backend_instance_id": first.worker} if first.worker else {}
        prompts: list[tuple[int, float]] = []
        for tokens in prompt_lengths(await self._context_tokens()):
            courses = [
                await self._course(tokens, PROMPT_OUTPUT_TOKENS) for _ in range(PROMPT_REPEATS)
            ]
            prompts.append((tokens, median(course.first_s for course in courses)))
        decodes = [(count, await self._itl_s(count)) for count in AT_ONCE]
        return Latencies(prompts, decodes, await self._pauses())

    async def _context_tokens(self) -> int | None:
        """Returns the tokens of the model's context; None: its card states none. Raises
        GatewayError."""
        try:
            response = await self._http.get(self._model_url)
            response.raise_for_status()
            found = response.json().get("max_model_len")
            return None if found is None else int(found)
        except (httpx.HTTPError, ValueError, AttributeError, TypeError) as error:
            raise GatewayError(f"{self._model_url} is not a model: {error!r}") from error

    async def _itl_s(self, count: int) -> float:
        courses = await asyncio.gather(
            *(self._course(PROMPT_TOKENS[0], DECODE_TOKENS) for _ in range(count))
        )
        return median((one.last_s - one.first_s) / max(1, one.tokens - 1) for one in courses)

    async def _pauses(self) -> list[tuple[int, float]]:
        """Returns the pause beside the longest prompt that the model accepts; none if it accepts
        none of them."""
        for tokens in CHUNKED_TOKENS:
            with suppress(GatewayError):
                return [(tokens, await self._pause_s(tokens))]
        return []

    async def _pause_s(self, tokens: int) -> float:
        """Returns the longest time without a token of a stream while a prompt is computed."""
        arrived: list[float] = []
        began = asyncio.Event()

        async def stream() -> None:
            prompt = self._prompt(PROMPT_TOKENS[0])
            events = self._client.chunks(prompt, BESIDE_TOKENS, self._pins)
            try:
                async with aclosing(events):
                    async for _ in events:
                        arrived.append(time.perf_counter())
                        began.set()
            finally:
                began.set()

        beside = asyncio.create_task(stream())
        try:
            # Ends: the stream has a time limit.
            await began.wait()
            await self._course(tokens, PROMPT_OUTPUT_TOKENS)
        finally:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
        if len(arrived) < 2:
            raise GatewayError("a stream beside a prompt had one token only")
        return max(later - earlier for earlier, later in pairwise(arrived))

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(*_TOKENS) for _ in range(tokens)]

    async def _course(self, prompt_tokens: int, max_tokens: int) -> Course:
        return await self._client.course(self._prompt(prompt_tokens), max_tokens, self._pins)


def _worker_of(chunk: dict[str, Any]) -> str:
    found = (chunk.get("nvext") or {}).get("worker_id") or {}
    return str(found.get("decode_worker_id") or "")
