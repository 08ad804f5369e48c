"""A load of conversations with several turns, and what its servers had in their caches."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
TIMEOUT_S = 120.0
OUTPUT_TOKENS = 24

# Any, here and below: JSON.
Json = dict[str, Any]


@dataclass
class Conversation:
    """The messages of a client so far, and what it writes in the turns to come."""

    messages: list[Json]
    turns: list[str]


@dataclass
class Outcome:
    """What became of the requests of a load."""

    responses: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    servers: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_s: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that the servers had."""
        return round(self.cached_tokens / self.prompt_tokens, 4) if self.prompt_tokens else 0.0


def conversations(count: int, turns: int, seed: int) -> list[Conversation]:
    """Returns conversations; each four have a system prompt in common."""
    rng = Random(seed)
    words = [f"w{number}" for number in range(900)]

    def text(length: int) -> str:
        return " ".join(rng.choices(words, k=length))

    systems = [text(90) for _ in range(-(-count // 4))]
    return [
        Conversation(
            [{"role": "system", "content": systems[number // 4]}],
            [text(60 if turn == 0 else 20) for turn in range(turns)],
        )
        for number in range(count)
    ]


async def run(
    url: str, model: str, load: Sequence[Conversation], *, turns: int, parallel: int, seed: int = 0
) -> Outcome:
    """Runs the next `turns` of each conversation, in a random order that is the same for a seed;
    `parallel` at a time."""
    outcome, rng = Outcome(), Random(seed)
    limits = httpx.Limits(max_connections=parallel)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, limits=limits) as http:
        for _ in range(turns):
            order = list(load)
            rng.shuffle(order)
            waiting = iter(order)

            async def work(waiting: Any = waiting) -> None:
                for conversation in waiting:
                    await _turn(http, url, model, conversation, outcome)

            await asyncio.gather(*(work() for _ in range(parallel)))
    return outcome


async def _turn(
    http: httpx.AsyncClient, url: str, model: str, conversation: Conversation, outcome: Outcome
) -> None:
    message = {"role": "user", "content": conversation.turns.pop(0)}
    conversation.messages.append(message)
    body = chat_body(model, conversation.messages, OUTPUT_TOKENS)
    texts: list[str] = []
    began_at = time.monotonic()
    try:
        async with http.stream("POST", url + CHAT, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                outcome.errors[f"{response.status_code} {response.text[:160]}"] += 1
                conversation.messages.pop()
                return
            has_ended = False
            async for line in response.aiter_lines():
                if not texts and line.startswith("data: {"):
                    outcome.first_s.append(time.monotonic() - began_at)
                has_ended = _read_line(line, texts, outcome) or has_ended
    except httpx.HTTPError as error:
        outcome.errors[type(error).__name__] += 1
        conversation.messages.pop()
        return
    if not has_ended:
        outcome.errors["incomplete"] += 1
    outcome.responses += 1
    conversation.messages.append({"role": "assistant", "content": "".join(texts)})


def _read_line(line: str, texts: list[str], outcome: Outcome) -> bool:
    """Adds what a line of a stream states; returns whether it is the last one."""
    if line == "data: [DONE]":
        return True
    if not line.startswith("data: "):
        return False
    event = json.loads(line[6:])
    deltas = (choice.get("delta", {}) for choice in event.get("choices", ()))
    texts += [delta.get("content") or "" for delta in deltas]
    if usage := event.get("usage"):
        outcome.prompt_tokens += usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        outcome.cached_tokens += details.get("cached_tokens") or 0
        outcome.servers[event.get("served_by", "")] += 1
    return False


def chat_body(model: str, messages: Sequence[Json], max_tokens: int) -> Json:
    return {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def added_ms(picked: str, plain: str, model: str, pairs: int) -> dict[str, float]:
    """Returns how much later the first byte of a response comes with a picker: the difference of
    the medians and of the 99th percentiles, in ms. The requests take turns."""
    times: dict[str, list[float]] = {picked: [], plain: []}
    rng = Random(7)
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as http:
        for pair in range(pairs):
            for url in (picked, plain) if pair % 2 else (plain, picked):
                text = " ".join(f"w{rng.randrange(900)}" for _ in range(150))
                body = chat_body(model, [{"role": "user", "content": text}], 1)
                began_at = time.monotonic()
                with http.stream("POST", url + CHAT, json=body) as response:
                    chunks = response.iter_bytes()
                    next(chunks)
                    times[url].append(time.monotonic() - began_at)
                    for _ in chunks:
                        pass
    result = {}
    for name, at in (("p50", 49), ("p99", 98)):
        values = {url: statistics.quantiles(found, n=100)[at] for url, found in times.items()}
        result[name] = round((values[picked] - values[plain]) * 1000, 2)
        result[f"plain_{name}"] = round(values[plain] * 1000, 2)
    return result
