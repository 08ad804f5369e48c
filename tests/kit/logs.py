"""Prints the logs of a mesh when its test fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import pytest

from tests.failed import HAS_FAILED


class HasLogs(Protocol):
    """A mesh with logs."""

    def logs(self) -> str:
        """Returns the last lines of each service."""


@contextmanager
def logs_on_failure(mesh: HasLogs, request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints the logs of a mesh if the test of `request` has failed."""
    yield
    if request.node.stash.get(HAS_FAILED, False):
        print(mesh.logs())
