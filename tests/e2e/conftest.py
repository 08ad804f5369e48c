"""Fixtures of tests of a mesh; prints its logs when a test fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from meshctl.commands.demo import SpanReceiver, run_span_receiver
from tests.kit.logs import logs_on_failure
from tests.kit.oracle import Oracle
from tests.kit.processes import Mesh
from tests.kit.sdk import open_sdk_client


@pytest.fixture(autouse=True)
def _print_logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints the logs of the fixture `mesh` if the test fails."""
    mesh = request.getfixturevalue("mesh") if "mesh" in request.fixturenames else None
    if isinstance(mesh, Mesh):
        with logs_on_failure(mesh, request):
            yield
    else:
        yield


@pytest.fixture(scope="module")
def spans() -> Iterator[tuple[SpanReceiver, str]]:
    """A receiver of spans, and its address."""
    with run_span_receiver() as receiver:
        yield receiver


@pytest.fixture
def start(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., AbstractContextManager[Mesh]]]:
    """Starts a mesh with these arguments; prints its logs if the test fails."""

    @contextmanager
    def start_mesh(**shape: Any) -> Iterator[Mesh]:
        with Mesh(tmp_path, **shape) as mesh:
            meshes.append(mesh)
            yield mesh

    meshes: list[Mesh] = []
    yield start_mesh
    for mesh in meshes:
        with logs_on_failure(mesh, request):
            pass


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """The expected responses of sim workers."""
    return Oracle()


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of the module's mesh."""
    async with open_sdk_client(mesh) as client:
        yield client
