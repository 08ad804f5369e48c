"""Applies each mutant of `mutants.py` to a copy of the repository and runs the tests of its rows.

    python -m tests.mutants [-j JOBS] [WORD ...]

Prints one line for each mutant, and exits 1 if one is missed: a row's tests passed in spite of the
defect. WORD: only mutants with such a row, or a path that contains it. For a row that is proved by
a service, only the tests outside `tests/unit` count.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS
from tests.row_report import read_rows

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "mission-rows.md"
UNIT_TESTS = "tests/unit/"
# In this order; all others follow.
_FOLDERS = ("unit", "contract", "integration")
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Outcome:
    """missed: rows of which no test failed. details: output of pytest if there are some."""

    mutant: Mutant
    missed: tuple[str, ...]
    details: str


class _Collector:
    """A pytest plugin that collects the tests of each row."""

    def __init__(self) -> None:
        self.tests: defaultdict[str, list[str]] = defaultdict(list)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for name, row in item.user_properties:
                if name == "row":
                    self.tests[str(row)].append(item.nodeid)


def tests_by_row() -> dict[str, list[str]]:
    """Returns the ids of the tests that must find defects of each row."""
    collector = _Collector()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = pytest.main(["--collect-only", "-m", "row", str(ROOT / "tests")], [collector])
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"the tests cannot be collected:\n{output.getvalue()}")
    kinds = {row.id: row.kind for row in read_rows(DOCUMENT.read_text())}
    return {
        row: [test for test in tests if kinds[row] == "core" or not test.startswith(UNIT_TESTS)]
        for row, tests in collector.tests.items()
    }


def run_mutant(mutant: Mutant, tests: Mapping[str, Sequence[str]], copy: Path) -> Outcome:
    """Runs the tests of the mutant's rows on a copy of the repository, which has the defect
    meanwhile."""
    selected = sorted({test for row in mutant.rows for test in tests.get(row, ())}, key=_order)
    if not selected:
        return Outcome(mutant, mutant.rows, "no test")
    results = copy / "results.xml"
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--reruns=0", f"--junitxml={results}"]
    command += ["-p", "tests.mutants.early_end", f"--end-after-rows={','.join(mutant.rows)}"]
    file = copy / mutant.path
    text = file.read_text()
    file.write_text(mutated(mutant, text))
    try:
        done = subprocess.run(
            [*command, "--override-ini=junit_family=xunit1", *selected],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": f"{copy / 'protos'}{os.pathsep}{copy}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(mutant, mutant.rows, f"the tests did not end within {TIMEOUT_S} s")
    finally:
        file.write_text(text)
    failed = _failed_rows(results) if results.exists() else set()
    missed = tuple(row for row in mutant.rows if row not in failed)
    return Outcome(mutant, missed, done.stdout + done.stderr if missed else "")


def run_mutants(
    mutants: Iterable[Mutant], tests: Mapping[str, Sequence[str]], jobs: int
) -> Iterator[Outcome]:
    """Yields the outcomes in order. Each job has a copy of the repository of its own and uses it
    again, since most of the time of a run would be the compilation of all modules."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-mutants-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            _copy_repository(Path(folder) / str(number))
            copies.put(Path(folder) / str(number))

        def run(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                return run_mutant(mutant, tests, copy)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(run, mutants)


def _order(test: str) -> tuple[int, str]:
    """Returns the sort key of a test: those of real processes are slower and come last."""
    folder = test.split("/")[1]
    return _FOLDERS.index(folder) if folder in _FOLDERS else len(_FOLDERS), test


def mutated(mutant: Mutant, text: str) -> str:
    """Returns the text with the defect. Raises ValueError unless the old text occurs once."""
    count = text.count(mutant.old)
    if count != 1:
        raise ValueError(f"{mutant.path}: {mutant.old!r} occurs {count} times, not once")
    return text.replace(mutant.old, mutant.new)


def _copy_repository(target: Path) -> None:
    """Copies all files that git would commit."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)


def _failed_rows(results: Path) -> set[str]:
    rows: set[str] = set()
    for case in ElementTree.parse(results).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            rows |= {
                str(one.get("value")) for one in case.iter("property") if one.get("name") == "row"
            }
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("-j", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("words", nargs="*", metavar="WORD", help="a row, or a part of a path")
    options = parser.parse_args(arguments)
    chosen = [one for one in MUTANTS if _matches(one, options.words)]
    tests = tests_by_row()
    n_missed = 0
    for outcome in run_mutants(chosen, tests, options.j):
        rows = " ".join(outcome.missed or outcome.mutant.rows)
        print("MISSED" if outcome.missed else "caught", rows, outcome.mutant.name, flush=True)
        if outcome.missed:
            n_missed += 1
            print("\n".join(outcome.details.splitlines()[-15:]), flush=True)
    print(f"{len(chosen) - n_missed}/{len(chosen)} mutants caught")
    return 1 if n_missed else 0


def _matches(mutant: Mutant, words: Iterable[str]) -> bool:
    words = list(words)
    return not words or any(word in mutant.rows or word in mutant.path for word in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
