"""Comparison of a benchmark's figures in two source trees."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import against
from bench.measure import flatten, medians, spread

# Counts its runs in a file, so that the figures depend on the order of the runs.
BENCH = """
import json, pathlib, sys
log = pathlib.Path(sys.argv[1])
log.write_text(log.read_text() + "{name}\\n")
print("not the report")
print(json.dumps({{"bench": "fake", "settings": {{"seconds": 1}}, "figures": {{"us": {us}}},
                   "errors": 0, "is_met": True, {more}}}))
sys.exit(1)
"""


def tree(folder: Path, name: str, us: float, more: str = "") -> Path:
    path = folder / name
    path.mkdir()
    (path / "fake.py").write_text(BENCH.format(name=name, us=us, more=more))
    return path


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the trees in the order of their runs: 3 us in `ours`, 2 us in `other`."""
    other = tree(tmp_path, "other", 2.0)

    @contextlib.contextmanager
    def commit_tree(commit: str, *, compiled: bool) -> Iterator[Path]:
        assert (commit, compiled) == ("abc", False)
        yield other

    monkeypatch.setattr(against, "commit_tree", commit_tree)
    monkeypatch.setattr(against, "ROOT", tree(tmp_path, "ours", 3.0, '"new": 1'))
    monkeypatch.setenv("BENCH_LOCK", str(tmp_path / "lock"))
    path = tmp_path / "log"
    path.touch()
    return path


@pytest.mark.slow
def test_pairs_are_interleaved_and_their_ratios_reported(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["fake", "--against", "abc", "--pairs", "2", "--self", str(log)]
    monkeypatch.setattr(sys, "argv", ["against", *flags])
    against.main()
    assert log.read_text().split() == ["ours", "other", "other", "other", "other", "ours"]
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["medians"]["this tree"] == {"figures.us": 3.0, "errors": 0, "new": 1}
    assert report["ratios"] == {
        "this tree": {"figures.us": {"median": 1.5, "min": 1.5, "max": 1.5}},
        "abc again": {"figures.us": {"median": 1.0, "min": 1.0, "max": 1.0}},
    }


def test_a_benchmark_without_a_report_ends_the_comparison(log: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"missing of .* printed no report; it ended with status 1"
    ):
        against.measure(log.parent / "ours", "missing", [])


def test_figures_of_lists_and_tables_have_paths() -> None:
    report = {"rows": [{"s": 1.5, "name": "x"}, {"s": 2}], "is_met": True}
    assert dict(flatten(report)) == {"rows.0.s": 1.5, "rows.1.s": 2}
    assert medians([{"s": 1.0}, {"s": 2.0, "us": 5.0}]) == {"s": 1.5, "us": 5.0}
    assert spread([1.0, 1.1, 4.0]) == {"median": 1.1, "min": 1.0, "max": 4.0}
