"""Measured latencies of one idle worker, through the HTTP API of a frontend."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

import httpx

from common.inspection.gateway import GatewayError, stream_events

PROMPT_TOKENS = (64, 512, 2048, 4096)
PROMPT_REPEATS = 5
AT_ONCE = (1, 4, 16, 32)
DECODE_TOKENS = 96
# Ordinary tokens of most vocabularies.
_TOKENS = (300, 4000)
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Latencies:
    """prompts: tokens and seconds to the first token. decodes: requests at once and seconds between
    two tokens."""

    prompts: list[tuple[int, float]]
    decodes: list[tuple[int, float]]

    def to_json(self) -> str:
        return json.dumps({"prompts": self.prompts, "decodes": self.decodes})


@dataclass(frozen=True, slots=True)
class _Course:
    """Times of one response in seconds. worker: that served it, as text."""

    first_s: float
    last_s: float
    tokens: int
    worker: str


class LatencyProbe:
    """Sends prompts of random tokens, so that no cache has them, to one worker."""

    def __init__(self, http: httpx.AsyncClient, url: str, model: str, seed: int = 1) -> None:
        self._http = http
        self._url = url
        self._model = model
        self._rng = Random(seed)
        self._pins: dict[str, Any] = {}

    async def measure(self) -> Latencies:
        """Returns the latencies. Raises GatewayError."""
        first = await self._course(PROMPT_TOKENS[0], 2)
        # All further requests run on the worker of the first one.
        self._pins = {"backend_instance_id": first.worker} if first.worker else {}
        prompts: list[tuple[int, float]] = []
        for tokens in PROMPT_TOKENS:
            courses = [await self._course(tokens, 2) for _ in range(PROMPT_REPEATS)]
            prompts.append((tokens, median(course.first_s for course in courses)))
        decodes = [(count, await self._itl_s(count)) for count in AT_ONCE]
        return Latencies(prompts, decodes)

    async def _itl_s(self, count: int) -> float:
        courses = await asyncio.gather(
            *(self._course(PROMPT_TOKENS[0], DECODE_TOKENS) for _ in range(count))
        )
        return median((one.last_s - one.first_s) / max(1, one.tokens - 1) for one in courses)

    async def _course(self, prompt_tokens: int, max_tokens: int) -> _Course:
        body = {
            "model": self._model,
            "prompt": [self._rng.randrange(*_TOKENS) for _ in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "nvext": {"extra_fields": ["worker_id"], **self._pins},
        }
        started_at, first_s, last_s = time.perf_counter(), 0.0, 0.0
        tokens, worker = 0, ""
        url = f"{self._url}/v1/completions"
        events = stream_events(self._http, url, body, _TIMEOUT_S, kind="completion")
        async with aclosing(events):
            async for chunk in events:
                now_s = time.perf_counter() - started_at
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
                elif chunk.get("choices"):
                    first_s, last_s = first_s or now_s, now_s
                worker = _worker_of(chunk) or worker
        if not tokens:
            raise GatewayError("the stream ended without usage")
        return _Course(first_s, last_s, tokens, worker)


def _worker_of(chunk: dict[str, Any]) -> str:
    found = (chunk.get("nvext") or {}).get("worker_id") or {}
    return str(found.get("decode_worker_id") or "")
