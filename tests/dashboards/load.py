"""Clients of a mesh: tenants, adapters, bad requests, disconnects, sampled traces."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

# Any: JSON.
from typing import Any

import httpx

from tests.kit.processes import MODEL

ADAPTER = "french"
# Prompts of a client begin alike, so that later ones find blocks in a cache.
PREFIX_TOKENS, PROMPT_TOKENS = 256, 320
OUTPUT_TOKENS = 24
# Every so many requests of a client: a bad body, a disconnect, a request of an adapter.
BAD_EVERY, LEAVES_EVERY, ADAPTER_EVERY = 11, 13, 4
TIMEOUT_S = 60.0


@dataclass(slots=True)
class Load:
    """Sends requests from several clients of each tenant for a while. keys: by tenant."""

    url: str
    keys: Mapping[str, str]
    clients: int
    seconds: float
    statuses: Counter[int] = field(default_factory=Counter)
    """Responses by HTTP status; 0: the connection broke."""

    trace_ids: set[str] = field(default_factory=set)
    """Of the sampled requests."""

    async def run(self) -> None:
        end = time.monotonic() + self.seconds
        async with (
            httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, trust_env=False) as http,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self.clients):
                for tenant, key in self.keys.items():
                    rng = Random(f"{tenant} {number}")
                    group.create_task(self._client(http, key, rng, end))
            group.create_task(self._strangers(http, end))

    async def _client(self, http: httpx.AsyncClient, key: str, rng: Random, end: float) -> None:
        prefix = _tokens(rng, PREFIX_TOKENS)
        number = 0
        while time.monotonic() < end:
            number += 1
            trace_id = f"{rng.getrandbits(128) or 1:032x}"
            self.trace_ids.add(trace_id)
            headers = {
                "authorization": f"Bearer {key}",
                "traceparent": f"00-{trace_id}-{rng.getrandbits(64) or 1:016x}-01",
                "x-kvmesh-session-id": f"s{rng.randrange(8)}",
            }
            body: dict[str, Any] = {
                "model": ADAPTER if number % ADAPTER_EVERY == 0 else MODEL,
                "prompt": prefix + _tokens(rng, PROMPT_TOKENS - PREFIX_TOKENS),
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            if number % BAD_EVERY == 0:
                body["max_tokens"] = -1
            await self._send(http, body, headers, leaves=number % LEAVES_EVERY == 0)

    async def _send(
        self,
        http: httpx.AsyncClient,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        leaves: bool,
    ) -> None:
        try:
            async with http.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as response:
                self.statuses[response.status_code] += 1
                async for _ in response.aiter_lines():
                    if leaves:
                        break
        except httpx.TransportError:
            self.statuses[0] += 1
        # Sleep: the pace of a client, also of one that is refused.
        await asyncio.sleep(0.02)

    async def _strangers(self, http: httpx.AsyncClient, end: float) -> None:
        """Sends requests without a valid key, and of a model that does not exist."""
        known = next(iter(self.keys.values()))
        while time.monotonic() < end:
            for key, model in (("wrong", MODEL), (known, "absent")):
                headers = {"authorization": f"Bearer {key}"}
                body = {"model": model, "prompt": "Hi", "max_tokens": 1}
                response = await http.post("/v1/completions", json=body, headers=headers)
                self.statuses[response.status_code] += 1
            # Sleep: the pace of these clients.
            await asyncio.sleep(0.5)


def _tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(300, 2300) for _ in range(count)]
