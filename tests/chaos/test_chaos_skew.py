"""Services of a supported version serve beside those of this one; `make skew` runs all cases."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.skew import (
    MIXED,
    MIXED_PAIRS,
    Outcome,
    SkewCase,
    all_cases,
    main,
    reference_contents,
    run_case,
    trees_of,
)
from tests.kit.processes import ROOT
from tests.kit.versions import MissingCommit, newest_version, old_version_tree

OLD = Path("old")


@pytest.fixture(scope="module")
def old() -> Iterator[Path]:
    """The sources of the version before."""
    try:
        with old_version_tree() as tree:
            yield tree
    except MissingCommit as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, int], Any]:
    return asyncio.run(reference_contents(1))


@pytest.mark.slow
@pytest.mark.parametrize("case", [MIXED, MIXED_PAIRS], ids=lambda case: case.name)
def test_two_versions_serve_requests_of_all_kinds_in_one_mesh(
    case: SkewCase, old: Path, expected: dict[tuple[str, int], Any]
) -> None:
    line = run_case(replace(case, has_token=True, rounds=1), old, expected)
    assert line["failed"] == [], line
    assert line["requests"] > 40


def test_each_kind_of_process_has_the_other_version_in_turn_and_in_both_directions() -> None:
    cases = {case.name: trees_of(case, OLD) for case in all_cases()}
    for kind in ("frontend", "router", "indexer", "worker", "prefill", "decode"):
        old, new = cases[f"old-{kind}"], cases[f"new-{kind}"]
        assert [other for other, trees in old.items() if trees == [OLD]] == [kind]
        assert [other for other, trees in new.items() if trees == [ROOT]] == [kind]
        assert cases["mixed/agg"][kind] == [OLD, ROOT]
        assert cases["upgrade/agg"][kind] == [OLD]


def test_errors_other_contents_and_unused_processes_fail_a_case() -> None:
    outcome = Outcome(requests=9)
    assert outcome.line(MIXED, 1.0)["failed"] == []
    outcome.errors["completions: 500"] += 2
    outcome.inexact["text: a, expected b"] += 1
    outcome.unused.append("worker-1 has served no request")
    line = outcome.line(MIXED, 1.0)
    assert line["failed"] == ["errors", "inexact", "unused"]
    assert (line["errors"], line["inexact"]) == (2, 1)
    assert Outcome(requests=20, retries=11).line(MIXED, 1.0)["failed"] == ["retries"]
    assert Outcome(requests=20, retries=10).line(MIXED, 1.0)["failed"] == []


def test_a_checkout_without_history_is_named_with_the_command_that_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit = newest_version().commit
    with (
        pytest.raises(MissingCommit, match=f"git fetch --unshallow.*git fetch origin {commit}"),
        old_version_tree(root=tmp_path),
    ):
        pass
    of_folder = partial(old_version_tree, root=tmp_path)
    monkeypatch.setattr("tests.chaos.skew.old_version_tree", of_folder)
    assert main(["mixed/"]) == 1
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert "git fetch --unshallow" in first["failed"][0]
    counts = {name: last[name] for name in ("passed", "failed", "skipped")}
    assert counts == {"passed": 0, "failed": 5, "skipped": 0}
