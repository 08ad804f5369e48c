"""Mutated bodies to all POST routes and a WebSocket: no 5xx, and errors have their form. A short
version of `make fuzz`, in which the caches of the frontend still fill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import Fuzz
from tests.kit.processes import Mesh

pytestmark = pytest.mark.slow
BODIES = 2_000


async def test_mutated_bodies_get_a_response_or_an_error_with_its_form(tmp_path: Path) -> None:
    with Mesh(tmp_path, workers=1, batches=1, worker_flags=["--speedup=1000"]) as mesh:
        fuzz = Fuzz(mesh, seed=0)
        await fuzz.run(BODIES)
    assert not fuzz.failures, fuzz.failures[0]
    assert fuzz.result()["bodies"] == BODIES
