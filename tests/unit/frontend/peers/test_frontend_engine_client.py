"""Which workers a frontend leaves alone, and for how long it remembers that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from common.errors import MeshError, Unavailable
from common.request.preprocessed import PreprocessedRequest, TokenIds, TokenLogprob
from common.request.token_stream import LegRequest, Terminal
from frontend_svc.peers.attach_transport import Transport
from frontend_svc.peers.engine_client import EngineClient
from tests.sim.loop import run_virtually

WORKER = 5
ORDER = LegRequest("r1", request=PreprocessedRequest(model="m", token_ids=TokenIds.of((1, 2, 3))))


class Unreachable:
    """A Dialer where nobody answers."""

    async def dial(self, address: str) -> Transport:
        raise Unavailable(f"connection to {address} refused")


class Lost:
    """A sink that waits for the loss."""

    def __init__(self) -> None:
        self.came = asyncio.Event()

    def accepted(self) -> None:
        raise AssertionError("nobody is there")

    def rejected(self, error: MeshError) -> None:
        raise AssertionError("nobody is there")

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        raise AssertionError("nobody is there")

    def chunk(self, json: bytes) -> None:
        raise AssertionError("nobody is there")

    def terminal(self, terminal: Terminal) -> None:
        raise AssertionError("nobody is there")

    def lost(self, error: MeshError) -> None:
        self.came.set()


@pytest.mark.parametrize("shown", [True, False])
def test_a_worker_that_discovery_never_shows_is_not_left_alone_for_ever(shown: bool) -> None:
    """A router had told of it, and it was gone before discovery showed it: as no snapshot ever said
    that it left, it was probed, and named among those that get no requests, until the next one.
    """

    async def excluded_workers() -> tuple[set[int], set[int]]:
        async with EngineClient(1, Unreachable()) as engines:
            engines.retain([WORKER] if shown else [])
            sink = Lost()
            engines.submit(WORKER, "worker:1", ORDER, sink)
            await sink.came.wait()
            at_first = set(engines.exclusion_reasons())
            await asyncio.sleep(30.0)
            return at_first, set(engines.exclusion_reasons())

    at_first, later = run_virtually(excluded_workers())
    assert at_first == {WORKER}
    assert later == ({WORKER} if shown else set())
