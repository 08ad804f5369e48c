"""Two vLLM servers on the CPU and a mesh with an adapter for each (`make test-vllm`).

About 1.5 GiB for each server. Without vLLM the tests are skipped in `make test`; `python -m
tests.vllm` fails then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from common.runtime.free_ports import free_ports
from tests.kit.processes import Mesh, Service
from tests.vllm.vllm_server import INSTALL, VllmServer, is_installed, write_model_files

HERE = Path(__file__).parent
ADMIN_TOKEN = "operators-only"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_missing = not is_installed()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(1200))
        item.add_marker(pytest.mark.slow)
        if is_missing:
            item.add_marker(pytest.mark.skip(reason=INSTALL))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model `tiny`, its adapter `pirate`, and the logs of the servers."""
    folder = tmp_path_factory.mktemp("servers")
    write_model_files(folder)
    return folder


@pytest.fixture(scope="session")
def servers(folder: Path) -> Iterator[list[VllmServer]]:
    port = free_ports(6)
    started = [VllmServer(folder / "tiny", folder, port + 3 * at) for at in range(2)]
    try:
        yield [one.wait_ready() for one in started]
    finally:
        for one in started:
            one.kill()


class ServersMesh(Mesh):
    """A mesh with one worker for each set of flags."""

    def __init__(self, folder: Path, flags: Sequence[Sequence[str]], **settings: object) -> None:
        self._unused_flags = list(flags)
        super().__init__(folder, workers=len(flags), **settings)  # type: ignore[arg-type]

    def spawn(self, kind: str, *flags: str, tree: Path | None = None) -> Service:
        own = self._unused_flags.pop(0) if kind == "worker" and self._unused_flags else ()
        return super().spawn(kind, *own, *flags, tree=tree)


@pytest.fixture(scope="session")
def mesh(servers: list[VllmServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    more = ["--canary-idle-s=2", "--tool-call-parser=hermes", f"--admin-token={ADMIN_TOKEN}"]
    flags = [[*one.worker_flags, *more] for one in servers]
    folder = tmp_path_factory.mktemp("mesh")
    with ServersMesh(folder, flags, indexers=1) as mesh, closing(mesh.http):
        yield mesh
