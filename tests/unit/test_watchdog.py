"""A run of pytest ends with a verdict although a thread of a test does not end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.watchdog import EXIT_STATUS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIMIT_S = 0.5
CONFTEST = f"""
from tests.watchdog import Watchdog

def pytest_configure(config):
    config.pluginmanager.register(Watchdog(grace_s={LIMIT_S}))
"""
ENDLESS = """
import asyncio, threading, time

import pytest

def loop_without_end():
    while True:
        time.sleep(0.01)

"""
HANGS = {
    "call": """
def test_hangs():
    asyncio.run(asyncio.to_thread(loop_without_end))
""",
    "teardown": """
@pytest.fixture
def endless():
    yield
    loop_without_end()

def test_hangs(endless):
    raise RuntimeError("this failure ends the time limit")
""",
    "next run": """
runs = []

@pytest.mark.flaky(reruns=2)
def test_hangs():
    runs.append(1)
    if len(runs) == 2:
        loop_without_end()
    raise RuntimeError("this failure ends the time limit")
""",
}


PASSES = """
def test_passes():
    pass
"""


def run(folder: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on a file with the test and one that passes."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(ENDLESS + test + PASSES)
    own = [f"--rootdir={folder}", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}", *options]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-c", os.devnull, *own, str(folder)],
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )


@pytest.mark.parametrize("where", HANGS)
def test_a_hang_that_no_exception_ends_is_reported_with_its_test_and_stacks(
    where: str, tmp_path: Path
) -> None:
    done = run(tmp_path, HANGS[where], "-n", "0")
    assert done.returncode == EXIT_STATUS, done.stdout + done.stderr
    phase = "call" if where == "next run" else where
    assert f"watchdog: not within 1 s: test_it.py::test_hangs: {phase}" in done.stderr
    assert "in loop_without_end" in done.stderr


def test_with_several_processes_the_other_tests_run_and_the_test_that_hung_has_failed(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, HANGS["call"], "-n", "1", "--dist", "loadfile")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running" in done.stdout
    assert "test_it.py::test_hangs" in done.stdout
    assert "1 failed, 1 passed, 1 skipped" in done.stdout, "it is not run again"


def test_a_thread_that_outlives_all_tests_does_not_keep_the_process(tmp_path: Path) -> None:
    test = "def test_starts():\n    threading.Thread(target=loop_without_end).start()\n"
    done = run(tmp_path, test, "-n", "0")
    assert done.returncode == EXIT_STATUS, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert "watchdog: not within 0.5 s: the end of the process" in done.stderr


def test_a_process_of_several_may_wait_for_a_longer_one(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(
        "import time\n\nimport pytest\n\n"
        "@pytest.mark.timeout(20)\ndef test_long():\n    time.sleep(3)\n"
    )
    done = run(tmp_path, "", "-n", "2", "--dist", "loadfile")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "watchdog:" not in done.stderr
    assert "2 passed" in done.stdout
