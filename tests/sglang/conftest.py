"""Three real SGLang engines for the whole session: an aggregated worker in this process, a prefill
and a decode worker in their own processes as deployed, and a mesh in front of them.

About 1.5 GiB per engine, one minute to start. Run with the interpreter of .venv-sglang (`make
test-sglang`); otherwise the tests are skipped. Of its two processes one runs all tests of the three
engines, the other one the modules that start engines of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from common.service.health import HealthReporter
from common.service.lifecycle import Lifecycle
from tests.sglang.sglang_mesh import HttpMesh
from tests.sglang.sglang_workers import WAIT_S, WorkerProcess
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig

if TYPE_CHECKING:
    from worker_svc.engines.sglang.engine import SglangEngine

HERE = Path(__file__).parent
# Modules whose tests use the three engines.
WITH_TRIO = {"engine", "events", "guided", "http", "own_server", "pair", "scheduler_death"}
# Small enough for tests to cause evictions.
POOL_TOKENS = 8192


# xdist's groups of tests (`--dist loadgroup`) have no effect with pytest 9.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns what distributes modules to processes: those of the three engines to one. Any: of
    xdist, which is not typed and may not be installed."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class ByEngines(LoadFileScheduling):  # type: ignore[misc]  # not typed
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.partition("::")[0]).stem.removeprefix("test_sglang_")
            return "trio" if name in WITH_TRIO else name

    return ByEngines(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Marks the tests before tests/conftest.py does, and puts the last one last after it."""
    found = find_spec("sglang")
    missing = found is None or found.origin is None  # this folder's name contains it too
    for item in items:
        if HERE not in item.path.parents:
            continue
        name = item.path.stem.removeprefix("test_sglang_")
        if "trio" in getattr(item, "fixturenames", ()) and name not in WITH_TRIO:
            raise pytest.UsageError(f"{item.nodeid} uses the three engines: add it to WITH_TRIO")
        # SGLang and its imports emit many warnings; the start of three engines is slow.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.timeout(900))
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
        if missing:
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed: make setup-sglang"))
    yield
    # The scheduler's death ends the decode worker.
    items.sort(key=lambda item: item.path.stem == "test_sglang_scheduler_death")


@dataclass(frozen=True, slots=True)
class Trio:
    """The engines. app: the aggregated worker; registry: where all three are registered."""

    app: WorkerApp
    aggregated: SglangEngine
    prefill: WorkerProcess
    decode: WorkerProcess
    registry: Path


@contextlib.asynccontextmanager
async def worker_here(config: WorkerConfig, lifecycle: Lifecycle) -> AsyncIterator[WorkerApp]:
    """A worker in this process, not yet started; stopped and deregistered on exit."""
    app = WorkerApp(config)
    try:
        yield app
    finally:
        lifecycle.drain("the tests are over")
        await app.deregister()
        await lifecycle.cancel_tasks(WAIT_S)
        await app.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def trio(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trio]:
    from worker_svc.engines.sglang.engine import SglangEngine
    from worker_svc.engines.sglang.make_model import write_tiny_model

    folder = tmp_path_factory.mktemp("sglang")
    model, registry = folder / "tiny", folder / "registry"
    write_tiny_model(model)
    pool = {"max_total_tokens": POOL_TOKENS}
    config = WorkerConfig(
        engine="sglang",
        model_name="tiny",
        model_path=model,
        tool_call_parser="hermes",
        registry_path=registry,
        engine_args=json.dumps(pool),
    )
    lifecycle = Lifecycle(HealthReporter())
    async with contextlib.AsyncExitStack() as ended:
        # Ends last: it kills all child processes of this one, including the workers.
        app = await ended.enter_async_context(worker_here(config, lifecycle))
        start = partial(WorkerProcess.started, model=model, folder=folder, engine_args=pool)
        prefill = await ended.enter_async_context(start("prefill"))
        decode = await ended.enter_async_context(start("decode"))
        await asyncio.gather(app.start(lifecycle), prefill.ready(), decode.ready())
        await app.register()
        assert isinstance(app.engine, SglangEngine)
        yield Trio(app, app.engine, prefill, decode, registry)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mesh(trio: Trio, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpMesh]:
    """Frontend, router and indexer in front of the engines."""
    workers = {trio.app.instance_id, trio.prefill.instance_id, trio.decode.instance_id}
    folder = tmp_path_factory.mktemp("mesh")
    async with HttpMesh.started(folder, trio.registry, workers) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def engine(trio: Trio) -> SglangEngine:
    """The engine in this process."""
    return trio.aggregated
