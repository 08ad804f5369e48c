"""What follows the failure of a test of real processes: printed logs, and new fixtures."""

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


MODULE_TESTS = """
import pytest

BUILT = []

@pytest.fixture(scope="module")
def mesh():
    BUILT.append(1)
    yield len(BUILT)

def test_passes_with_another_mesh(mesh): assert mesh == 2
def test_follows(mesh): assert mesh == 2
"""


def run(folder: Path, tests: str, *flags: str) -> str:
    """Returns what pytest prints about tests of real processes."""
    tests_folder = folder / "e2e"
    tests_folder.mkdir()
    (tests_folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "-s", *flags],
        cwd=tests_folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/protos:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("test_passes", 0),
        ("test_fails", 1),
        ("test_is_not_built", 1),
        ("test_passes_the_second_time", 1),
    ],
)
def test_logs_are_printed_once_for_each_failed_run(tmp_path: Path, name: str, shown: int) -> None:
    reruns = "1" if "second" in name else "0"
    printed = run(tmp_path, TESTS, "--reruns", reruns, f"test_it.py::{name}")
    assert printed.count("the log of the router") == shown, printed


@pytest.mark.slow
def test_a_rerun_has_new_fixtures_of_its_module(tmp_path: Path) -> None:
    printed = run(tmp_path, MODULE_TESTS, "--reruns", "1", "test_it.py")
    assert "2 passed, 1 rerun" in printed, printed
