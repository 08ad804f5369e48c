"""Meshes whose logs are shown when their test fails; fixtures know in time whether it has."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.mesh import HAS_FAILED, Mesh, logs_on_failure


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Not `session.testsfailed`: that counts once all fixtures have ended, and no first try."""
    report = yield
    has_failed = call.when != "setup" and item.stash.get(HAS_FAILED, False)
    item.stash[HAS_FAILED] = has_failed or report.failed
    return report


@pytest.fixture
def start(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., AbstractContextManager[Mesh]]]:
    """Starts a mesh of the shape given whose logs are shown when the test fails."""

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
