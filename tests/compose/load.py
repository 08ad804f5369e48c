"""A small load from the host: clients that use the frontends that are ready, as a balancer does."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.chaos.client import Reply, fetch
from tests.kit.oracle import Oracle

CLIENTS = 4
OUTPUT_TOKENS = (16, 64, 32, 128)
READY_POLL_S = 0.1
CONNECT_S = 1.0
# A request that finds no frontend within this time has failed.
NO_FRONTEND_S = 30.0
JOIN_S = 120.0


class Load:
    """Streams completions while the block runs; then `replies` has all of them."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.replies: list[Reply] = []
        self._ready = dict.fromkeys(urls, False)
        self._numbers = itertools.count()
        self._ended = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(JOIN_S)

    async def _run(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=CONNECT_S) as http:
            watches = [asyncio.create_task(self._watch(http, url)) for url in self._ready]
            await asyncio.gather(*(self._client(number) for number in range(CLIENTS)))
            for watch in watches:
                watch.cancel()

    async def _watch(self, http: httpx.AsyncClient, url: str) -> None:
        """Follows whether a frontend is ready."""
        while not self._ended.is_set():
            try:
                self._ready[url] = (await http.get(f"{url}/ready")).status_code == 200
            except httpx.HTTPError:
                self._ready[url] = False
            await asyncio.sleep(READY_POLL_S)

    async def _client(self, number: int) -> None:
        while not self._ended.is_set():
            request = next(self._numbers)
            tokens = OUTPUT_TOKENS[request % len(OUTPUT_TOKENS)]
            reply = Reply(f"request {request} of client {number}", tokens)
            self.replies.append(reply)
            if (url := await self._connectable(request)) is None:
                reply.error = "no frontend accepts connections"
            else:
                await fetch(url, reply)

    async def _connectable(self, request: int) -> str | None:
        """Returns a frontend that is ready and accepts a connection, in turns; None without one."""
        deadline = time.monotonic() + NO_FRONTEND_S
        while time.monotonic() < deadline:
            urls = [url for url, is_ready in self._ready.items() if is_ready]
            for url in (*urls[request % 2 :], *urls[: request % 2]):
                host = urlsplit(url)
                with suppress(OSError):
                    async with asyncio.timeout(CONNECT_S):
                        _, writer = await asyncio.open_connection(host.hostname, host.port)
                    writer.close()
                    return url
            await asyncio.sleep(READY_POLL_S)
        return None


# Any: figures by name.
def figures(replies: Sequence[Reply]) -> dict[str, Any]:
    """Returns requests, errors, responses that differ from the model's, and the longest pause."""
    oracle = Oracle()
    failed = [reply for reply in replies if reply.error]
    found: dict[str, Any] = {
        "requests": len(replies),
        "errors": len(failed),
        "inexact": sum(
            reply.text != oracle.completion(reply.prompt, reply.tokens, ignore_eos=True).text
            for reply in replies
            if not reply.error
        ),
        "longest_pause_s": round(max((_pause_s(r) for r in replies if not r.error), default=0), 2),
    }
    if failed:
        found["why"] = sorted({reply.error[:150] for reply in failed})[:3]
    return found


def _pause_s(reply: Reply) -> float:
    first_s = (reply.first_at or reply.ended_at) - reply.begun_at
    return max(first_s, reply.pause_s, reply.ended_at - reply.last_at if reply.last_at else 0.0)
