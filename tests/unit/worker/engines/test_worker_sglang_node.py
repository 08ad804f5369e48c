"""A further node of an SGLang engine, with a process in place of SGLang."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.errors import InvalidRequest, Unavailable
from common.service.health import HealthReporter
from common.service.lifecycle import Lifecycle
from tests.kit.waiting import WAIT_S, until
from worker_svc.config import WorkerConfig
from worker_svc.engines.sglang.config import SglangConfig
from worker_svc.engines.sglang.node import NodeApp
from worker_svc.servers import build_worker

CONFIG = SglangConfig(model_path=Path("."), engine_args={"nnodes": 2, "node_rank": 1})


# Any: SGLang's engine.
def launch(started: list[Any], config: SglangConfig) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    started.append(process)


async def test_a_node_drains_the_process_when_its_schedulers_end() -> None:
    started: list[Any] = []
    app, lifecycle = NodeApp(CONFIG, partial(launch, started)), Lifecycle(HealthReporter())
    try:
        info = await app.start(lifecycle)
        await app.register()
        assert info.addresses == {}, "it serves nothing"
        assert not lifecycle.is_draining
        started[0].kill()
        await until(lambda: lifecycle.failed, "the process ends with an error")
        async with asyncio.timeout(WAIT_S):
            assert await app.drain(10 * WAIT_S) == (), "nothing is left to wait for"
    finally:
        await app.close()
        await lifecycle.cancel_tasks(1.0)


async def test_the_end_of_a_node_kills_its_schedulers() -> None:
    started: list[Any] = []
    app, lifecycle = NodeApp(CONFIG, partial(launch, started)), Lifecycle(HealthReporter())
    await app.start(lifecycle)
    assert await app.drain(0.0) == ()
    await app.close()
    await lifecycle.cancel_tasks(1.0)
    assert not started[0].is_alive()


@pytest.mark.parametrize(
    ("raised", "error"), [(ValueError, InvalidRequest), (OSError, Unavailable)]
)
async def test_a_start_that_fails_has_a_typed_error(
    raised: type[Exception], error: type[Exception]
) -> None:
    def fail(config: SglangConfig) -> Any:
        raise raised("no")

    app = NodeApp(CONFIG, fail)
    with pytest.raises(error, match="no"):
        await app.start(Lifecycle(HealthReporter()))
    await app.close()


def test_a_worker_process_with_a_node_rank_is_a_node(tmp_path: Path) -> None:
    arguments = json.dumps({"nnodes": 2, "node_rank": 1})
    config = WorkerConfig(engine="sglang", engine_args=arguments, registry_path=tmp_path)
    assert isinstance(build_worker(config, instance_id=1, member_key=None), NodeApp)
