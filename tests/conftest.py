"""Options of all tests: the row report, time limits, and reruns."""

from __future__ import annotations

import re
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.failed import HAS_FAILED
from tests.known_reruns import without_cause
from tests.module_order import longest_first
from tests.row_report import RowReport
from tests.service_traffic import ServiceTraffic
from tests.watchdog import Watchdog

# Asserts of the kit show their values, as those of test files.
pytest.register_assert_rewrite("tests.kit")
ROW = re.compile(r"\bS[0-4]-\d{2,3}\b")
ROWS_A_TEST_MAX = 5
# Tests of real processes and sockets depend on a shared machine. One that fails runs up to
# twice more with new fixtures (`--reruns 0`: it does not), and the summary names it
# (`tests/known_reruns.py`). All other tests must pass at once.
RERUN_FOLDERS = {"contract", "integration", "e2e", "chaos", "sglang"}
# Long tests take many times longer on a busy machine; up to 48 s were measured.
LONG_TIMEOUT_S = 240
TRAFFIC = ServiceTraffic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rows",
        type=Path,
        default=None,
        help="after the run, print how the rows of this document are proved",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        key = longest_first([item.nodeid for item in items])
        items.sort(key=lambda item: key(item.nodeid))
    # The mark would override the option.
    has_reruns_option = config.getoption("reruns", None) is not None
    for item in items:
        rows = [row for mark in item.iter_markers("row") for row in mark.args]
        if len(rows) > ROWS_A_TEST_MAX:
            raise pytest.UsageError(f"{item.nodeid} names {len(rows)} rows; 5 is the most")
        for row in rows:
            if not ROW.fullmatch(row):
                raise pytest.UsageError(f"{item.nodeid}: {row!r} is not a row id")
        item.user_properties += [("row", row) for row in rows]
        is_real = item.path.parent.name in RERUN_FOLDERS
        if is_real and not has_reruns_option:
            item.add_marker(pytest.mark.flaky(reruns=2))
        is_long = is_real or item.get_closest_marker("slow") is not None
        if is_long and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Records whether a test that proves rows goes through a running service."""
    TRAFFIC.begin()
    try:
        yield
    finally:
        if TRAFFIC.is_through_service:
            item.user_properties.append(("service", True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Records a failure before the fixtures end.

    `session.testsfailed` counts only after that, and does not count a test that is run again.
    """
    report = yield
    has_failed = call.when != "setup" and item.stash.get(HAS_FAILED, False)
    item.stash[HAS_FAILED] = has_failed or report.failed
    return report


# Inside what captures the output, and before pytest-rerunfailures puts the module's fixtures aside
# for a rerun.
@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Ends the module's fixtures too after a failure of a test that may run again: it may have
    ended services that a rerun or the next test needs."""
    module = item.getparent(pytest.Module)
    may_rerun = module is not None and item.path.parent.name in RERUN_FOLDERS
    if may_rerun and item.stash.get(HAS_FAILED, False):
        # There is no public way; pytest-rerunfailures uses this one as well.
        item.session._setupstate.teardown_exact(module.parent)  # type: ignore[union-attr,arg-type]
    yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the reruns without a noted cause."""
    reruns = [report.nodeid for report in terminalreporter.stats.get("rerun", ())]
    for test in without_cause(reruns):
        terminalreporter.write_line(
            f"rerun without a noted cause: {test}; mend it, or note its cause in "
            "tests/known_reruns.py"
        )


def pytest_configure(config: pytest.Config) -> None:
    # A collection runs no tests, and the process that asked for it goes on (tests/mutants).
    if not config.getoption("usepdb") and not config.getoption("collectonly"):
        config.pluginmanager.register(Watchdog(), "watchdog")
    if config.getoption("--rows") is not None:
        TRAFFIC.install()
    if find_spec("hypothesis"):  # the environment of SGLang has none
        from hypothesis import settings

        # The time of an example depends on the machine, so there is no deadline. The examples are
        # always the same; `--hypothesis-profile=search` draws others.
        settings.register_profile("search", deadline=None)
        settings.register_profile("same", deadline=None, derandomize=True)
        settings.load_profile("same")
    document = config.getoption("--rows")
    if document is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RowReport(document), "rows")
