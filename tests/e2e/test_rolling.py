"""`meshctl restart --wait` on a running mesh under load: no request fails or differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.rolling import CASES, run_case
from tests.kit.versions import MissingCommit

pytestmark = pytest.mark.slow

# Enough for each kind of request twice.
CLIENTS = 16
_BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["workers-old-first", "single"])
async def test_members_are_replaced_without_a_failed_or_different_response(
    name: str, tmp_path: Path
) -> None:
    case = _BY_NAME[name]
    line = await run_case(case, tmp_path, clients=CLIENTS)
    assert (line["errors"], line["inexact"], line["failed"]) == (0, 0, None), line
    assert "refused" not in line
    expected = ["worker-0", "worker-1"] if case.restart else ["indexer-0", "worker-0", "router-0"]
    assert list(line["members"])[:3] == expected


async def test_the_only_frontend_is_replaced_by_one_with_more_processes_on_its_port(
    tmp_path: Path,
) -> None:
    line = await run_case(_BY_NAME["processes"], tmp_path, clients=CLIENTS)
    assert (line["errors"], line["inexact"], line["failed"]) == (0, 0, None), line
    assert list(line["members"]) == ["frontend-0"]
    lines = (tmp_path / ".run/logs/frontend-0.log").read_text().splitlines()
    events = [json.loads(text) for text in lines if text.startswith("{")]
    names = {event["name"] for event in events if event["event"] == "routable"}
    assert names == {"frontend-0-0", "frontend-0-1", "frontend-0-2"}


async def test_frontends_of_an_older_version_are_replaced_old_first_with_a_message(
    tmp_path: Path,
) -> None:
    case = replace(_BY_NAME["older"], restart=["router-0"])
    try:
        line = await run_case(case, tmp_path, clients=CLIENTS)
    except MissingCommit as error:
        pytest.skip(str(error))
    assert (line["errors"], line["inexact"], line["failed"]) == (0, 0, None), line
    assert list(line["members"]) == ["router-0", "frontend-0", "frontend-1"]
    notes = [" ".join(text.split()) for text in line["progress"] if "  note" in text]
    assert notes == [
        f"frontend-{number} note old first: two processes cannot have its http_port"
        for number in range(2)
    ]
