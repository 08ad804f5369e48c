"""How long a process waits for what it needs itself, and how often it calls its peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from common.registry.instances import Instance, Service
from common.registry.registry import MemoryRegistry
from common.rpc import channel as rpc
from common.service.routable import watch
from common.service.routable.watch import REFUSED_PAUSE_MAX_S, RoutableWatch
from common.streams.silence import ACKNOWLEDGE
from tests.kit.instances import worker
from tests.sim.loop import run_virtually

LIMIT_S = 10.0


class StubHealth:
    """The health of a process, of which no status is read."""

    def await_routable(self) -> None:
        pass

    async def set_routable(self, is_routable: bool) -> None:
        pass


class StubLifecycle:
    """Owns the tasks of a process."""

    def __init__(self) -> None:
        self.health = StubHealth()
        self.tasks: list[asyncio.Task[Any]] = []

    def spawn(self, work: Coroutine[Any, Any, Any], **_: object) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]


async def join(
    service: Service,
    peer: Instance,
    *,
    own_need: Callable[[Instance], str] = lambda _: "",
    is_in_progress: Callable[[Instance], bool] = lambda _: False,
) -> RoutableWatch:
    """Returns the watch of a member that has joined beside one peer."""
    registry = MemoryRegistry()
    member = replace(worker(1, model=""), service=service)
    for instance in (member, peer):
        await registry.register(instance)
    lifecycle: Any = StubLifecycle()
    clock = asyncio.get_running_loop().time
    joined = RoutableWatch(
        registry,
        None,  # type: ignore[arg-type]  # The channels of the test have none.
        own_need,
        is_in_progress,
        lifecycle,
        limit_s=LIMIT_S,
        clock=clock,
    )
    await joined.join(member)
    return joined


def is_routable(joined: RoutableWatch) -> bool:
    return joined.state.is_routable


def test_an_own_need_is_given_up_for_the_limit_after_its_last_progress_only() -> None:
    async def main() -> None:
        is_loading = True

        def own_need(peer: Instance) -> str:
            reason = "its card is loading" if is_loading else "its card is refused"
            return reason if peer.service == "worker" else ""

        joined = await join(
            "frontend", worker(2), own_need=own_need, is_in_progress=lambda _: is_loading
        )
        await asyncio.sleep(12 * LIMIT_S)
        assert not is_routable(joined)
        assert [peer.reason for peer in joined.state.missing] == ["its card is loading"]
        is_loading = False
        await asyncio.sleep(LIMIT_S - 1.0)
        assert not is_routable(joined)
        await asyncio.sleep(2.0)
        assert is_routable(joined)
        assert [peer.reason for peer in joined.state.given_up] == ["its card is refused"]

    run_virtually(main())


def test_a_peer_that_refuses_is_called_less_often_and_stays_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called_at: list[float] = []

    @asynccontextmanager
    async def channel(*_: object, **__: object) -> AsyncIterator[None]:
        yield

    async def read_reason(*_: object, **__: object) -> str:
        called_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(ACKNOWLEDGE.heartbeat_s)
        return "its card is refused"

    async def main() -> None:
        joined = await join("worker", replace(worker(2, model=""), service="frontend"))
        await asyncio.sleep(1200.0)
        assert not is_routable(joined)
        assert [peer.reason for peer in joined.state.missing] == ["its card is refused"]

    monkeypatch.setattr(rpc, "channel", channel)
    monkeypatch.setattr(watch, "read_reason", read_reason)
    run_virtually(main())
    pauses = [later - at - ACKNOWLEDGE.heartbeat_s for at, later in pairwise(called_at)]
    assert pauses[0] <= 0.1, "an acknowledgement soon after the start is noticed soon"
    assert max(pauses) <= REFUSED_PAUSE_MAX_S
    # Of each 120 s, in which a peer keeps 65,536 nonces: 1,000 members may wait.
    assert len(called_at) / 10 < 65.5
