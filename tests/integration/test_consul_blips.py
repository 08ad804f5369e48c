"""The Consul registry on an agent with breaking connections: each call fails once.

A fake agent lets a test choose which request or response is lost.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from structlog.testing import capture_logs

import common.registry.consul.client
import common.registry.consul.registry
from common.registry.card import ModelCard
from common.registry.consul.registry import DEPARTURE_KEPT_S, ConsulRegistry
from common.registry.instances import Instance

NS = "blips"
CARD = ModelCard(name="m")
ONE = Instance(7, NS, "worker", "", "127.0.0.1:1", model="m", card_checksum=CARD.checksum)
OTHER = Instance(8, NS, "worker", "", "127.0.0.1:2")
# Just below the time limit of a test.
WAIT_S = 50.0
OLD_NOTE = f"kvmesh/{NS}/left/{1:016x}"


@pytest.fixture(autouse=True)
def no_call_times_out_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.registry.consul.client, "CALL_TIMEOUT_S", WAIT_S)
    monkeypatch.setattr(common.registry.consul.client, "CONNECT_TIMEOUT_S", WAIT_S)


@dataclass
class BreakingAgent:
    """An agent that breaks the connections of `breaks` calls, starting with number `first`.

    drops_requests: broken calls are not executed either. calls: methods and paths of all calls.
    """

    first: int = -1
    breaks: int = 1
    drops_requests: bool = True
    url: str = ""
    calls: list[str] = field(default_factory=list)
    services: dict[str, dict[str, Any]] = field(default_factory=dict)
    keys: dict[str, tuple[bytes, int, int]] = field(default_factory=dict)
    index: int = 1
    connections: set[asyncio.Task[None] | None] = field(default_factory=set)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[ConsulRegistry]:
        """A registry on this agent, without periodic calls."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        registry = ConsulRegistry(
            self.url, reconcile_interval_s=1e3, unreachable_timeout_s=WAIT_S, rng=Random(1)
        )
        try:
            yield registry
        finally:
            await registry.close()
            server.close()
            await server.wait_closed()
            await asyncio.gather(*filter(None, self.connections))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(asyncio.current_task())
        try:
            # Ends: the peer closes.
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                number = len(self.calls)
                self.calls.append(f"{method} {target}")
                broken = self.first <= number < self.first + self.breaks
                if broken and self.drops_requests:
                    break
                url = urlsplit(target)
                query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
                status, response = self.respond(method, unquote(url.path), query, body)
                if broken:
                    break
                heading = f"HTTP/1.1 {status} -\r\nX-Consul-Index: {self.index}\r\n"
                writer.write(
                    f"{heading}Content-Length: {len(response)}\r\n\r\n".encode() + response
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass  # The client has disconnected.
        finally:
            writer.close()

    def respond(
        self, method: str, path: str, query: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes]:
        """Status and body."""
        self.index += method != "GET"
        if path.startswith("/v1/kv/"):
            return self._key(method, path.removeprefix("/v1/kv/"), query, body)
        if path.startswith("/v1/health/service/"):
            listed = [{"Service": service, "Checks": []} for service in self.services.values()]
            return 200, json.dumps(listed).encode()
        if path.startswith("/v1/agent/service/deregister/"):
            self.services.pop(path.rpartition("/")[2], None)
            return 200, b""
        assert path == "/v1/agent/service/register", path
        service = json.loads(body)
        created = self.services.get(service["id"], {}).get("CreateIndex", self.index)
        self.services[service["id"]] = {
            "ID": service["id"],
            "Meta": service["meta"],
            "CreateIndex": created,
        }
        return 200, b""

    def _key(
        self, method: str, key: str, query: Mapping[str, str], body: bytes
    ) -> tuple[int, bytes]:
        if method == "PUT":
            self.keys[key] = (body, self.index, int(query.get("flags", 0)))
            return 200, b"true"
        if method == "DELETE":
            self.keys.pop(key, None)
            return 200, b"true"
        found = [k for k in self.keys if k == key or ("recurse" in query and k.startswith(key))]
        shown = [
            {"Key": k, "Value": base64.b64encode(value).decode(), "ModifyIndex": n, "Flags": flags}
            for k, (value, n, flags) in self.keys.items()
            if k in found
        ]
        return (200, json.dumps(shown).encode()) if shown else (404, b"")

    def note_old_departure(self) -> None:
        """Write the departure note of an instance that left long ago."""
        self.keys[OLD_NOTE] = (b"", 1, int(time.time() - 2 * DEPARTURE_KEPT_S))


async def start_a_worker(agent: BreakingAgent) -> None:
    """Make the calls of a worker's start and check their results."""
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(agent.served())
        await registry.put_card(CARD)
        await registry.register(ONE)
        agent.first = -1
        assert (await registry.snapshot(NS)).instances == {ONE.id: ONE}, agent.calls
        assert await registry.get_card(CARD.checksum) == CARD


async def calls_of_a_start() -> int:
    agent = BreakingAgent()
    agent.note_old_departure()
    async with agent.served() as registry:
        await registry.put_card(CARD)
        await registry.register(ONE)
        assert OLD_NOTE not in agent.keys
        return len(agent.calls)


@pytest.mark.slow
@pytest.mark.parametrize("drops_requests", [True, False], ids=["request lost", "response lost"])
@pytest.mark.parametrize("breaks", [1, 3])
async def test_a_worker_start_survives_a_broken_connection_at_each_of_its_calls(
    monkeypatch: pytest.MonkeyPatch, drops_requests: bool, breaks: int
) -> None:
    # Without this, the wait for the listing would hide broken calls.
    monkeypatch.setattr(common.registry.consul.registry, "LISTED_WITHIN_S", 0.0)
    calls = await calls_of_a_start()
    assert calls >= 8
    agents = [BreakingAgent(first, breaks, drops_requests) for first in range(calls)]
    for agent in agents:
        agent.note_old_departure()
    await asyncio.gather(*(start_a_worker(agent) for agent in agents))


async def test_a_registration_that_the_agent_accepted_and_lost_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(common.registry.consul.registry, "LISTED_WITHIN_S", 0.0)

    class Forgetful(BreakingAgent):
        def respond(
            self, method: str, path: str, query: Mapping[str, str], body: bytes
        ) -> tuple[int, bytes]:
            response = super().respond(method, path, query, body)
            if sum("service/register" in call for call in self.calls) == 1:
                self.services.clear()
            return response

    agent = Forgetful()
    async with agent.served() as registry:
        await registry.register(OTHER)
        assert (await registry.snapshot(NS)).instances == {OTHER.id: OTHER}


async def test_departure_notes_that_could_not_be_swept_are_swept_by_the_next_registration() -> None:
    agent = BreakingAgent()
    agent.note_old_departure()
    async with agent.served() as registry:
        agent.first = 1  # the first call is the listing
        with capture_logs() as logs:
            await registry.register(ONE)
        assert "left/" in agent.calls[1]
        assert [line["event"] for line in logs] == ["departures_not_swept"]
        assert OLD_NOTE in agent.keys
        await registry.register(OTHER)
        assert OLD_NOTE not in agent.keys
