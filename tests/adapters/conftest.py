"""Two stock SGLang servers and a mesh with one adapter process for both (`make test-adapters`).

About 1.5 GiB for each server. Without SGLang the tests are skipped in `make test`; `python -m
tests.adapters` fails then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from common.runtime.free_ports import free_ports
from tests.adapters.stock_server import StockServer
from tests.kit.processes import Mesh

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = find_spec("sglang")
    is_missing = found is None or found.origin is None
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.timeout(600))
        item.add_marker(pytest.mark.slow)
        if is_missing:
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed: make setup-sglang"))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[StockServer]]:
    from worker_svc.engines.sglang.make_model import write_tiny_model

    folder = tmp_path_factory.mktemp("servers")
    write_tiny_model(folder / "tiny")
    port = free_ports(6)
    started = [StockServer(folder / "tiny", folder, port + 3 * at) for at in range(2)]
    try:
        yield [one.wait_ready() for one in started]
    finally:
        for one in started:
            one.kill()


class ServersMesh(Mesh):
    """A mesh with one worker process for two servers."""

    def is_complete(self) -> bool:
        """Whether the frontend is ready and has a worker for each server."""
        is_ready = self.http.get(f"{self.url}/ready").json()["ready"]
        return bool(is_ready) and len(self.known_instance_ids("worker")) == 2


@pytest.fixture(scope="session")
def mesh(servers: list[StockServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    urls = ",".join(one.url for one in servers)
    flags = ["--engine=openai", f"--server-urls={urls}", "--canary-idle-s=2"]
    folder = tmp_path_factory.mktemp("mesh")
    with ServersMesh(folder, workers=1, indexers=1, worker_flags=flags) as mesh, closing(mesh.http):
        yield mesh
