"""`python -m tests.adapters [PYTEST ARGUMENT]...`: the last line is JSON with the counts.

A test that is skipped counts as a failure of the target: something is not installed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import pytest

COUNTED = ("passed", "failed", "skipped")


class Counts:
    """Counts outcomes, of set-up too."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.found[report.outcome] += 1


def main() -> int:
    counts = Counts()
    arguments = ["tests/adapters", "tests/integration/test_server_adapter.py", *sys.argv[1:]]
    status = pytest.main(arguments, plugins=[counts])
    print(json.dumps({name: counts.found[name] for name in COUNTED}))
    return int(status) or (1 if counts.found["skipped"] or not counts.found["passed"] else 0)


if __name__ == "__main__":
    sys.exit(main())
