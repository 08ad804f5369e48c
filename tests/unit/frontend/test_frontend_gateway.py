"""Placement without a router, and when a silent engine's requests go elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from random import Random

import pytest

from common.attach import HelloAck, Order, Terminal, ToFrontend, ToWorker
from common.errors import MeshError, Unavailable
from common.instances import Instance, Snapshot
from common.load import Load
from common.preprocessed import PreprocessedRequest, TokenIds, TokenLogprob
from frontend_svc.core.request import Placed
from frontend_svc.engine_client import EngineClient
from frontend_svc.gateway import place_alone
from frontend_svc.router_client import Query
from tests.sim.loop import run_virtually

MODEL = "model"
WORKER = 7


def worker(number: int, role: str, *, local_prefill: bool = True) -> Instance:
    return Instance(
        id=number,
        namespace="default",
        service="worker",
        stable_name="",
        address=f"127.0.0.1:{number}",
        model=MODEL,
        role=role,  # type: ignore[arg-type]  # a literal in every call
        local_prefill=local_prefill,
    )


def placed_alone(workers: Iterable[Instance], excluded: Iterable[int] = ()) -> Placed | MeshError:
    snapshot = Snapshot(instances={one.id: one for one in workers})
    query = Query(MODEL, 10, 0.0, excluded=frozenset(excluded))
    return place_alone(snapshot, {}, query, Random(1))


def test_without_a_router_decode_workers_that_prefill_take_whole_requests() -> None:
    pairs = [worker(1, "prefill"), worker(2, "decode", local_prefill=False), worker(3, "decode")]
    found = placed_alone(pairs)
    assert isinstance(found, Placed)
    assert (found.worker_id, found.prefill, found.bootstrap) == (3, None, None)


def test_without_a_router_aggregated_workers_go_before_decode_workers() -> None:
    for _ in range(10):
        found = placed_alone([worker(1, "aggregated"), worker(2, "decode"), worker(3, "decode")])
        assert isinstance(found, Placed)
        assert found.worker_id == 1


@pytest.mark.parametrize("excluded", [(), (3,)], ids=["pairs only", "the last one failed it"])
def test_without_a_router_pairs_that_need_each_other_are_not_chosen(
    excluded: tuple[int, ...],
) -> None:
    pairs = [worker(1, "prefill"), worker(2, "decode", local_prefill=False)]
    found = placed_alone(pairs + [worker(3, "decode")] * len(excluded), excluded)
    assert isinstance(found, Unavailable)
    assert found.reason == "NO_ROUTER"


class Frozen:
    """A transport to a worker whose engine stands still: heartbeats come, nothing else does.

    late_s: how much later than it was sent the first heartbeat is read.
    """

    def __init__(self, late_s: float) -> None:
        beat = ToFrontend(heartbeat=[Load(engine_step=1, running=1)])
        self._script = [
            (0.0, ToFrontend(hello_ack=HelloAck(WORKER), accepted=[1])),
            (1.0 + late_s, beat),
            *((float(second), beat) for second in range(2, 9)),
        ]

    async def read(self) -> ToFrontend | None:
        at, frame = self._script.pop(0)
        await asyncio.sleep(max(0.0, at - asyncio.get_running_loop().time()))
        return frame

    async def write(self, frame: ToWorker) -> None:
        pass

    async def close(self) -> None:
        pass

    async def dial(self, address: str) -> Frozen:
        return self


class Sink:
    """Notes when its leg was lost."""

    def __init__(self) -> None:
        self.lost_at = 0.0
        self.over = asyncio.Event()

    def accepted(self) -> None: ...

    def rejected(self, error: MeshError) -> None: ...

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None: ...

    def chunk(self, json: bytes) -> None: ...

    def terminal(self, terminal: Terminal) -> None: ...

    def lost(self, error: MeshError) -> None:
        assert error.reason == "HUNG"
        self.lost_at = asyncio.get_running_loop().time()
        self.over.set()


@pytest.mark.parametrize("late_s", [0.0, 0.1])
def test_two_seconds_of_standing_still_are_enough_also_when_the_first_heartbeat_came_late(
    late_s: float,
) -> None:
    async def main() -> float:
        sink = Sink()
        request = PreprocessedRequest(model=MODEL, token_ids=TokenIds.of([1, 2, 3]))
        async with EngineClient(1, Frozen(late_s), Random(1)) as engines:
            engines.submit(WORKER, "127.0.0.1:1", Order("r", request=request), sink)
            await asyncio.wait_for(sink.over.wait(), 8.0)
        return sink.lost_at

    assert run_virtually(main()) == pytest.approx(3.0, abs=0.05)
