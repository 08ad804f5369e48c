"""A router without KV events predicts cache hits from its own decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.mesh import Mesh, wait_for

WORDS = "the quick brown fox jumps over the lazy dog and runs far away from all of them "


def post_completion(mesh: Mesh, client_id: str, prompt: str) -> dict[str, Any]:
    """Returns the log line of a successful request."""
    response = mesh.post_completion(client_id, prompt, max_tokens=4)
    assert response.status_code == 200, response.text
    line = mesh.request_line(client_id)
    # Its booking could still count against the next one: a router answers the queries of a frame
    # before it frees the bookings of that frame.
    wait_for(lambda: mesh.router.bookings() == 0, "the router has freed the booking")
    return line


@pytest.mark.slow
@pytest.mark.row("S1-43")
def test_without_kv_events_prefix_hits_are_predicted_as_the_engine_reports_them(
    tmp_path: Path,
) -> None:
    flags = ["--kv-events=off", "--recent-miss-weight=0"]
    with Mesh(tmp_path, workers=3, router_flags=flags, worker_flags=["--speedup=20"]) as mesh:
        for topic in range(3):
            beginning = f"topic {topic}: " + WORDS * 20
            first = post_completion(mesh, f"{topic}.0", beginning)
            assert first["predicted_cached_tokens"] < 64, "at most the first words are cached"
            for turn in range(1, 4):
                line = post_completion(mesh, f"{topic}.{turn}", beginning + f" turn {turn}")
                assert line["workers"] == first["workers"], line
                assert line["predicted_cached_tokens"] == line["cached_tokens"] > 200
                assert "prefix hit" in json.dumps(line["routing"])
