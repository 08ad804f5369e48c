"""The logs of a mesh are printed when its test fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
from tests.kit.logs import logs_on_failure

class Mesh:
    def logs(self): return "the log of the router"

@pytest.fixture
def mesh(request):
    with logs_on_failure(Mesh(), request):
        yield

@pytest.fixture
def fails_to_build(mesh):
    raise OSError

def test_passes(mesh): pass
def test_fails(mesh): assert False
def test_is_not_built(fails_to_build): pass

TRIES = []
def test_passes_the_second_time(mesh):
    TRIES.append(1)
    assert len(TRIES) == 2
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown", "folder"),
    [
        ("test_passes", 0, "e2e"),
        ("test_fails", 1, "e2e"),
        ("test_fails", 1, "sglang"),
        ("test_is_not_built", 1, "e2e"),
        ("test_passes_the_second_time", 1, "e2e"),
    ],
)
def test_logs_are_printed_once_for_each_failed_run(
    tmp_path: Path, name: str, shown: int, folder: str
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    reruns = 1 if "second" in name else 0
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-p",
                f"tests.{folder}.conftest",
                "-p",
                "no:cacheprovider",
            ),
            *("--rootdir", str(tmp_path), "-s", "--reruns", str(reruns), f"test_it.py::{name}"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/protos:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout.count("the log of the router") == shown, done.stdout + done.stderr
