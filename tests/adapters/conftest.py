"""Servers of `make test-adapters`: two SGLang servers (1.5 GiB each), two llama-servers.

Without SGLang, or without a llama-server (LLAMA_SERVER), their tests are skipped in `make test`;
`python -m tests.adapters` fails then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from common.runtime.free_ports import free_ports
from tests.adapters.servers_mesh import ServersMesh
from tests.adapters.stock_server import SglangServer
from tests.adapters.text_servers import LlamaServer, MeshServer, TextServer
from tests.adapters.tiny_gguf import write_tiny_gguf

HERE = Path(__file__).parent
# Requests that the second SGLang server computes at once.
FEW_SLOTS = 4


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
        elif _kind_of(item) == "llama" and not os.environ.get("LLAMA_SERVER"):
            reason = "LLAMA_SERVER names no llama-server: make test-adapters"
            item.add_marker(pytest.mark.skip(reason=reason))


def _kind_of(item: pytest.Item) -> str:
    return str(item.callspec.params.get("kind", "")) if hasattr(item, "callspec") else ""


@pytest.fixture(scope="session", params=["llama", "openai"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of servers without token ids; a column of the table."""
    return str(request.param)


@pytest.fixture(scope="session")
def text_servers(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TextServer]]:
    """Two servers of a kind."""
    port = free_ports(2)
    with ExitStack() as ended:
        servers: list[TextServer] = []
        for at in range(2):
            folder = tmp_path_factory.mktemp(f"{kind}-{at}")
            if kind == "llama":
                write_tiny_gguf(folder / "tiny.gguf")
                program = os.environ["LLAMA_SERVER"]
                llama = LlamaServer(program, folder / "tiny.gguf", folder, port + at)
                ended.callback(llama.kill)
                servers.append(llama.wait_ready())
            else:
                mesh = MeshServer(folder, port + at)
                ended.callback(mesh.close)
                servers.append(mesh)
        yield servers


@pytest.fixture(scope="session")
def text_mesh(
    text_servers: list[TextServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServersMesh]:
    with ServersMesh(tmp_path_factory.mktemp("mesh"), text_servers) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    from worker_svc.engines.sglang.make_model import write_tiny_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def sglang_servers(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[SglangServer]]:
    """Two servers: with blocks told apart by salt and chunks of what is new, and with priorities
    and few slots."""
    folder = tmp_path_factory.mktemp("servers")
    port = free_ports(6)
    # Random weights do not end whitespace.
    json_flag = "--constrained-json-disable-any-whitespace"
    few = (json_flag, "--enable-priority-scheduling", "--max-running-requests", str(FEW_SLOTS))
    many = (json_flag, "--incremental-streaming-output", "--max-running-requests", "16")
    started = [
        SglangServer(tiny, folder, port, *many, events_format="dynamo"),
        SglangServer(tiny, folder, port + 3, *few),
    ]
    try:
        yield [one.wait_ready() for one in started]
    finally:
        for one in started:
            one.kill()


@pytest.fixture(scope="session")
def sglang_mesh(
    sglang_servers: list[SglangServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServersMesh]:
    folder = tmp_path_factory.mktemp("mesh")
    with ServersMesh(folder, sglang_servers, "--tool-call-parser=hermes", indexers=1) as mesh:
        yield mesh
