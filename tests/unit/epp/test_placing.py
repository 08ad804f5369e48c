"""What a picker requests of a router, and what it frees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from common.errors import MeshError, Overloaded, Unavailable
from common.registry.instances import SERVER_META_KEY, SERVER_MODEL_META_KEY, Instance
from common.request.placement import Decision, Placement
from epp_svc.core.hints import Hints
from epp_svc.placing import Placing
from epp_svc.prompts import ReadBody
from frontend_svc.request.placement_request import PlacementKey, PlacementRequest
from tests.kit import instances

Reply = Callable[[Decision | MeshError], None]


class Router:
    """Responds with a decision, an error, or not at all."""

    def __init__(self, reply: Decision | MeshError | None) -> None:
        self.reply = reply
        self.placed: dict[PlacementKey, PlacementRequest] = {}
        self.freed: list[PlacementKey] = []

    def place(self, key: PlacementKey, request: PlacementRequest, reply: Reply) -> None:
        self.placed[key] = request
        if self.reply is not None:
            asyncio.get_running_loop().call_soon(reply, self.reply)

    def free(self, key: PlacementKey) -> None:
        self.freed.append(key)


class Models:
    """One model whose server has another name for it."""

    weighted_aliases: Mapping[str, object] = {}

    def __init__(self, *workers: Instance) -> None:
        self._workers = workers

    def names(self) -> frozenset[str]:
        return frozenset({"m"})

    def resolve(self, name: str) -> str:
        return name

    def served_as(self, name: str) -> str:
        return name

    def workers(self, name: str) -> tuple[Instance, ...]:
        return self._workers


class Engines:
    """All workers respond; those that failed are listed."""

    def __init__(self) -> None:
        self.lost: list[int] = []

    def excluded_workers(self, pool: object) -> frozenset[int]:
        return frozenset()

    def connect(self, worker_id: int, address: str) -> str:
        return ""

    def failed(self, worker_id: int, reason: str, cause: object) -> None:
        self.lost.append(worker_id)


def worker(number: int) -> Instance:
    meta = {SERVER_META_KEY: f"10.0.0.{number}:1", SERVER_MODEL_META_KEY: "server-name"}
    return instances.worker(number, meta=meta)


# Any: parts that a test replaces.
def placing_of(router: Router, given: Engines | None = None) -> Placing:
    engines: Any = Engines() if given is None else given
    models: Any = Models(worker(1), worker(2))
    router_client: Any = router
    return Placing(router_client, models, engines, fallbacks=1, rng=Random(1))


async def place(placing: Placing, limit_s: float = 10.0) -> Any:
    body = ReadBody("m", {"model": "m", "x": 1}, unread="NO_PROMPT")
    return await placing.place("r", body, Hints(), None, limit_s)


async def test_the_body_gets_the_name_that_the_server_has_for_the_model() -> None:
    booked = await place(placing_of(Router(Decision(Placement(2)))))
    assert booked.pick.endpoints == ("10.0.0.2:1", "10.0.0.1:1")
    assert booked.pick.new_body == b'{"model":"server-name","x":1}'


async def test_a_booking_of_a_worker_that_is_not_known_yet_is_freed() -> None:
    router = Router(Decision(Placement(3)))
    with pytest.raises(Unavailable, match="not known yet"):
        await place(placing_of(router))
    assert router.freed == [("r", 0)]


async def test_a_request_that_is_not_placed_in_time_is_shed_and_leaves_no_booking() -> None:
    router = Router(None)
    with pytest.raises(Overloaded):
        await place(placing_of(router), limit_s=0.01)
    assert router.freed == [("r", 0)]


async def test_a_cancelled_request_leaves_no_booking() -> None:
    router = Router(None)
    task = asyncio.ensure_future(place(placing_of(router)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert router.freed == [("r", 0)]


async def test_an_error_of_the_router_is_raised() -> None:
    with pytest.raises(Unavailable, match="busy"):
        await place(placing_of(Router(Unavailable("busy"))))


async def test_a_moved_booking_is_pinned_to_its_new_server() -> None:
    router, engines = Router(Decision(Placement(2))), Engines()
    placing = placing_of(router, engines)
    booked = await place(placing)
    assert placing.open_picks == {2: 1}
    placing.move(booked, "10.0.0.1:1")
    assert engines.lost == [2]
    assert router.freed == [("r", 0)]
    pinned = router.placed["r", 1].query.routing
    assert pinned is not None
    assert pinned.backend_instance_id == 1
    assert placing.open_picks == {1: 1}
    placing.free(booked)
    assert router.freed == [("r", 0), ("r", 1)]
    assert not placing.open_picks
