"""Three real SGLang engines for the whole session: one in this process, a prefill and a decode
worker in processes of their own, as they are deployed. About 1.5 GiB each, a minute to start.

Run with the interpreter of .venv-sglang (`make test-sglang`); anywhere else the tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.sglang.sglang_workers import WorkerProcess

if TYPE_CHECKING:
    from worker_svc.sglang_engine import SglangEngine

HERE = Path(__file__).parent
# Small enough for a test to see evictions.
POOL_TOKENS = 8192


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = find_spec("sglang")
    missing = found is None or found.origin is None  # this folder has its name too
    for item in items:
        if HERE not in item.path.parents:
            continue
        # SGLang and what it imports warn of many things; the start of three engines takes long.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.timeout(300))
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
        if missing:
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed: make setup-sglang"))


@dataclass(frozen=True, slots=True)
class Trio:
    """The engines."""

    aggregated: SglangEngine
    prefill: WorkerProcess
    decode: WorkerProcess
    registry: Path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def trio(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trio]:
    from worker_svc.make_tiny_model import write_tiny_model
    from worker_svc.sglang_engine import SglangConfig, SglangEngine

    folder = tmp_path_factory.mktemp("sglang")
    model = folder / "tiny"
    write_tiny_model(model)
    pool = {"max_total_tokens": POOL_TOKENS}
    async with contextlib.AsyncExitStack() as ended:
        # The last to end: it kills all children of this process, which the workers are too.
        aggregated = SglangEngine(SglangConfig(model="tiny", model_path=model, engine_args=pool))
        ended.push_async_callback(aggregated.cleanup)
        start = partial(WorkerProcess.started, model=model, folder=folder, engine_args=pool)
        prefill = await ended.enter_async_context(start("prefill"))
        decode = await ended.enter_async_context(start("decode"))
        await asyncio.gather(aggregated.start(1), prefill.ready(), decode.ready())
        yield Trio(aggregated, prefill, decode, folder / "registry")


@pytest.fixture(scope="session")
def engine(trio: Trio) -> SglangEngine:
    """The one in this process."""
    return trio.aggregated
