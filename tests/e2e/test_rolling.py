"""`meshctl restart --wait` on a running mesh under load: no request fails or differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.rolling import CASES, run_case

pytestmark = pytest.mark.slow

# Enough for each kind of request twice.
CLIENTS = 16


@pytest.mark.parametrize("name", ["workers-old-first", "single"])
async def test_members_are_replaced_without_a_failed_or_different_response(
    name: str, tmp_path: Path
) -> None:
    (case,) = (case for case in CASES if case.name == name)
    line = await run_case(case, tmp_path, clients=CLIENTS)
    assert (line["errors"], line["inexact"], line["failed"]) == (0, 0, None), line
    assert "refused" not in line
    expected = ["worker-0", "worker-1"] if case.restart else ["indexer-0", "worker-0", "router-0"]
    assert list(line["members"])[:3] == expected
