"""Measured latencies of one idle worker, through the HTTP API of a frontend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
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
# Requests with a long context: what reading the cache costs.
CACHED_TOKENS = 2048
CACHED_AT_ONCE = (4, 16)
# Of the cache, for these requests: it has room for all of them.
CACHE_SHARE = 0.8
# Prompts beside a stream, which are one step of most engines.
BESIDE_PROMPTS = (512, 2048)
BESIDE_REPEATS = 3
# Longer than the steps of most engines, so that they divide it; a shorter one if the context ends.
CHUNKED_TOKENS = (12_288, 6_144)
# Of the stream beside it, which the client ends.
BESIDE_TOKENS = 2048
# Ordinary tokens of most vocabularies.
_TOKENS = (300, 4000)
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """Times in seconds.

    prompts: tokens, and seconds to the first token. decodes: requests at once, tokens of each in
    the cache, and seconds between two tokens. pauses: tokens of a prompt, and the longest time
    without a token of a stream beside it.
    """

    prompts: list[tuple[int, float]]
    decodes: list[tuple[int, int, float]]
    pauses: list[tuple[int, float]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Course:
    """Times of one response in seconds. worker: that served it, as text. arrivals: of the pieces of
    its text, by one clock."""

    first_s: float
    last_s: float
    tokens: int
    worker: str
    arrivals: tuple[float, ...] = ()

    @property
    def itl_s(self) -> float | None:
        """Mean seconds of a further token; None without one."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


def prompt_lengths(context_tokens: int | None) -> list[int]:
    """Returns the lengths of prompts to measure. context_tokens: of the model; None: unknown."""
    if context_tokens is None:
        return list(PROMPT_TOKENS)
    room = _room(context_tokens)
    return sorted({min(tokens, room) for tokens in PROMPT_TOKENS})


def itl_at_once(courses: Sequence[Course]) -> float:
    """Returns the seconds between two tokens of responses while all of them run, so that the
    prompts of the others are not in it; else the mean of the whole responses."""
    begin_at = max(one.arrivals[0] for one in courses)
    end_at = min(one.arrivals[-1] for one in courses)
    found: list[float] = []
    for one in courses:
        within = [at for at in one.arrivals if begin_at <= at <= end_at]
        if len(within) > 1 and one.tokens > 1:
            piece_s = (within[-1] - within[0]) / (len(within) - 1)
            found.append(piece_s * (len(one.arrivals) - 1) / (one.tokens - 1))
    return median(found or [(one.last_s - one.first_s) / max(1, one.tokens - 1) for one in courses])


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
        started_at, arrivals = time.perf_counter(), list[float]()
        tokens, worker = 0, ""
        async with aclosing(self.chunks(prompt, max_tokens, nvext)) as events:
            async for chunk in events:
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
                elif chunk.get("choices"):
                    arrivals.append(time.perf_counter())
                worker = _worker_of(chunk) or worker
        if not tokens or not arrivals:
            raise GatewayError("the stream ended without tokens or without usage")
        first_s, last_s = arrivals[0] - started_at, arrivals[-1] - started_at
        return Course(first_s, last_s, tokens, worker, tuple(arrivals))


class _Beside:
    """A stream beside prompts. arrived: times of its tokens so far."""

    def __init__(self) -> None:
        self.arrived: list[float] = []
        self._news = asyncio.Event()
        self._has_ended = False

    def add(self, at: float) -> None:
        self.arrived.append(at)
        self._news.set()

    def end(self) -> None:
        self._has_ended = True
        self._news.set()

    async def next_token(self) -> None:
        """Waits for a token, or for the end."""
        if not self._has_ended:
            self._news.clear()
            await self._news.wait()


class LatencyProbe:
    """Sends prompts of random tokens, so that no cache has them, to one worker.

    - requests_max: most that the worker computes at once; None: unknown.
    - cache_tokens: what its KV cache holds; None: unknown.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        model: str,
        *,
        requests_max: int | None = None,
        cache_tokens: int | None = None,
        seed: int = 1,
    ) -> None:
        self._client = CompletionClient(http, url, model)
        self._model_url = f"{url}/v1/models/{quote(model, safe='')}"
        self._http = http
        self._requests_max = requests_max
        self._cache_tokens = cache_tokens
        self._rng = Random(seed)
        self._pins: dict[str, Any] = {}

    async def measure(self) -> Latencies:
        """Returns the latencies. Raises GatewayError."""
        first = await self._course(PROMPT_TOKENS[0], PROMPT_OUTPUT_TOKENS)
        # All further requests run on the worker of the first one.
        self._pins = {"backend_instance_id": first.worker} if first.worker else {}
        context_tokens = await self._context_tokens()
        prompts: list[tuple[int, float]] = []
        for tokens in prompt_lengths(context_tokens):
            courses = [
                await self._course(tokens, PROMPT_OUTPUT_TOKENS) for _ in range(PROMPT_REPEATS)
            ]
            prompts.append((tokens, median(course.first_s for course in courses)))
        short, cached = PROMPT_TOKENS[0], CACHED_TOKENS
        if context_tokens is not None:
            cached = min(cached, _room(context_tokens) - DECODE_TOKENS)
        decodes = [await self._decode(n, short) for n in self._counts(AT_ONCE, short)]
        if cached >= 2 * short:
            decodes += [await self._decode(n, cached) for n in self._counts(CACHED_AT_ONCE, cached)]
        return Latencies(prompts, decodes, await self._pauses(context_tokens))

    def _counts(self, counts: Sequence[int], prompt_tokens: int) -> list[int]:
        """Returns numbers of requests that the worker computes at once."""
        most = self._requests_max or max(counts)
        if self._cache_tokens is not None:
            held = int(self._cache_tokens * CACHE_SHARE) // (prompt_tokens + DECODE_TOKENS)
            most = min(most, max(1, held))
        return sorted({min(count, most) for count in counts})

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

    async def _decode(self, count: int, prompt_tokens: int) -> tuple[int, int, float]:
        """Returns the number of requests, what each has in the cache on average, and the seconds
        between two tokens.

        Their prompts are cached before, so that they begin together. They have nothing in common:
        an engine that reads one prompt for all of them is faster than with requests of clients.
        """
        prompts = [self._prompt(prompt_tokens) for _ in range(count)]
        for prompt in prompts:
            await self._client.course(prompt, 1, self._pins)
        courses = await asyncio.gather(
            *(self._client.course(prompt, DECODE_TOKENS, self._pins) for prompt in prompts)
        )
        return count, prompt_tokens + DECODE_TOKENS // 2, itl_at_once(courses)

    async def _pauses(self, context_tokens: int | None) -> list[tuple[int, float]]:
        """Returns the pauses beside prompts, as far as the model accepts these; the last one is
        that of a prompt which most engines divide."""
        beside = BESIDE_TOKENS
        if context_tokens is not None:
            beside = max(2, min(beside, _room(context_tokens) - PROMPT_TOKENS[0]))
        found: list[tuple[int, float]] = []
        for tokens in filter(partial(self._fits, beside), BESIDE_PROMPTS):
            with suppress(GatewayError):
                found.append((tokens, await self._pause_s(tokens, BESIDE_REPEATS, beside)))
        for tokens in filter(partial(self._fits, beside), CHUNKED_TOKENS):
            with suppress(GatewayError):
                return [*found, (tokens, await self._pause_s(tokens, 1, beside))]
        return found

    def _fits(self, beside_tokens: int, tokens: int) -> bool:
        """Returns whether the cache has room for a prompt and a stream: else the prompt would wait
        for the end of the stream, which then has no pause."""
        held = PROMPT_TOKENS[0] + beside_tokens + tokens + PROMPT_OUTPUT_TOKENS
        return self._cache_tokens is None or held <= self._cache_tokens

    async def _pause_s(self, tokens: int, repeats: int, beside_tokens: int) -> float:
        """Returns the longest time without a token of a stream while a prompt is computed, as the
        median of some prompts."""
        pauses: list[float] = []
        async with self._stream(beside_tokens) as beside:
            for _ in range(repeats):
                begun_at = time.perf_counter()
                await self._course(tokens, PROMPT_OUTPUT_TOKENS)
                ended_at = time.perf_counter()
                # It ends the last pause, which may be the only one.
                await beside.next_token()
                arrived = pairwise(beside.arrived)
                gaps = [b - a for a, b in arrived if b > begun_at and a < ended_at]
                if not gaps:
                    raise GatewayError("a stream beside a prompt had no token meanwhile")
                pauses.append(max(gaps))
        return median(pauses)

    @asynccontextmanager
    async def _stream(self, tokens: int) -> AsyncIterator[_Beside]:
        """Yields a stream after its first token."""
        beside = _Beside()

        async def stream() -> None:
            prompt = self._prompt(PROMPT_TOKENS[0])
            events = self._client.chunks(prompt, tokens, self._pins)
            try:
                async with aclosing(events):
                    async for _ in events:
                        beside.add(time.perf_counter())
            finally:
                beside.end()

        reading = asyncio.create_task(stream())
        try:
            # Ends: the stream has a time limit.
            await beside.next_token()
            yield beside
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(*_TOKENS) for _ in range(tokens)]

    async def _course(self, prompt_tokens: int, max_tokens: int) -> Course:
        return await self._client.course(self._prompt(prompt_tokens), max_tokens, self._pins)


def _room(context_tokens: int) -> int:
    """Returns the longest prompt that the context has room for."""
    return max(1, context_tokens - RESERVED_TOKENS)


def _worker_of(chunk: dict[str, Any]) -> str:
    found = (chunk.get("nvext") or {}).get("worker_id") or {}
    return str(found.get("decode_worker_id") or "")
