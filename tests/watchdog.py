"""Ends the process of a test that its time limit cannot end.

The time limit (pytest-timeout) raises an exception in the main thread. A thread that loops without
end survives that, and the end of an event loop or of the interpreter waits for its threads. Also,
the limit no longer counts after the first failure of a test, so neither for its teardown nor for
its next runs. The watchdog gives each of these phases a limit of its own. Above it, the test, the
phase and the stacks of all threads are written, and the process exits.

pytest-xdist reports the test as failed and starts another process, which would run the test again.
The watchdog of that process finds its name in a file and skips it.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

# Beyond the time limit of the test, for its exception to end the phase.
GRACE_S = 60.0
EXIT_STATUS = 70
# Set by pytest-xdist: the same in all processes of a run.
RUN_VARIABLE = "PYTEST_XDIST_TESTRUNUID"
# Set by pytest-xdist in each process that runs tests.
WORKER_VARIABLE = "PYTEST_XDIST_WORKER"


class Watchdog:
    """A plugin of pytest."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._changed = threading.Condition()
        self._test = self._phase = ""
        self._limit_s: float | None = None
        self._thread: threading.Thread | None = None
        # While a test runs, pytest redirects the descriptor itself.
        self._out = os.fdopen(os.dup(2), "w")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        path = ended_tests()
        ended = path.read_text().splitlines() if path is not None and path.exists() else []
        for item in items:
            if item.nodeid in ended:
                item.add_marker(pytest.mark.skip("the watchdog has ended its process"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        yield from self._watch(item, "setup")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        yield from self._watch(item, "call")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        yield from self._watch(item, "teardown")

    def pytest_enter_pdb(self) -> None:
        self._begin("", "", None)

    def pytest_unconfigure(self) -> None:
        # A process of pytest-xdist waits for the others before it ends, for any time.
        if WORKER_VARIABLE not in os.environ:
            self._begin("", "the end of the process", self._grace_s)

    def _watch(self, item: pytest.Item, phase: str) -> Generator[None]:
        self._begin(item.nodeid, phase, limit_of(item) + self._grace_s)
        try:
            return (yield)
        finally:
            self._begin("", "", None)

    def _begin(self, test: str, phase: str, limit_s: float | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()
        with self._changed:
            self._test, self._phase, self._limit_s = test, phase, limit_s
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while self._changed.wait(self._limit_s):
                pass
            phase = f"{self._test}: {self._phase}" if self._test else self._phase
            self._out.write(f"\nwatchdog: not within {self._limit_s:g} s: {phase}\n")
            self._out.flush()
            if self._test and (ended := ended_tests()) is not None:
                with ended.open("a") as names:
                    names.write(f"{self._test}\n")
            faulthandler.dump_traceback(self._out, all_threads=True)
            os._exit(EXIT_STATUS)


def ended_tests() -> Path | None:
    """Returns the file with the tests of this run whose processes were ended; None without
    pytest-xdist."""
    run = os.environ.get(RUN_VARIABLE)
    return None if run is None else Path(tempfile.gettempdir()) / f"kvmesh-ended-tests-{run}"


def limit_of(item: pytest.Item) -> float:
    """Returns the time limit of a test in seconds; 0 without one."""
    mark = item.get_closest_marker("timeout")
    if mark is not None:
        return float(mark.args[0] if mark.args else mark.kwargs["timeout"])
    option: float | None = item.config.getoption("timeout", None)
    return float(option if option is not None else item.config.getini("timeout") or 0)
