"""Which workers a frontend excludes, and for how long."""

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
REQUEST = PreprocessedRequest(model="m", token_ids=TokenIds.of((1, 2, 3)))


class Unreachable:
    """A Dialer without a reachable worker."""

    async def dial(self, address: str) -> Transport:
        raise Unavailable(f"connection to {address} refused")


class LossSink:
    """A sink that expects the loss of its worker."""

    def __init__(self) -> None:
        self.received = asyncio.Event()

    def accepted(self) -> None:
        raise AssertionError("the worker is unreachable")

    def rejected(self, error: MeshError) -> None:
        raise AssertionError("the worker is unreachable")

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        raise AssertionError("the worker is unreachable")

    def chunk(self, json: bytes) -> None:
        raise AssertionError("the worker is unreachable")

    def terminal(self, terminal: Terminal) -> None:
        raise AssertionError("the worker is unreachable")

    def lost(self, error: MeshError) -> None:
        self.received.set()


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_worker_that_discovery_never_shows_is_not_excluded_for_ever(is_shown: bool) -> None:
    """A router placed on the worker, which left before discovery showed it. No snapshot reported
    its departure, so it was probed and listed as excluded until the next snapshot.
    """

    async def excluded_workers() -> tuple[set[int], set[int]]:
        async with EngineClient(1, Unreachable()) as engines:
            engines.retain([WORKER] if is_shown else [])
            sink = LossSink()
            engines.submit(WORKER, "worker:1", LegRequest("r1", request=REQUEST), sink)
            await sink.received.wait()
            at_first = set(engines.exclusion_reasons())
            await asyncio.sleep(30.0)
            return at_first, set(engines.exclusion_reasons())

    at_first, later = run_virtually(excluded_workers())
    assert at_first == {WORKER}
    assert later == ({WORKER} if is_shown else set())
