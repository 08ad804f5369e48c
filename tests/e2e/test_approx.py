"""A mesh whose router follows no events: it guesses caches from its own decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.mesh import MODEL, Mesh, wait_for

WORDS = "the quick brown fox jumps over the lazy dog and runs far away from all of them "


def post_completion(mesh: Mesh, client_id: str, prompt: str) -> dict[str, Any]:
    """The log line of an answered request."""
    answer = mesh.http.post(
        f"{mesh.url}/v1/completions",
        json={"model": MODEL, "prompt": prompt, "max_tokens": 4},
        headers={"x-request-id": client_id},
    )
    assert answer.status_code == 200, answer.text

    def log_lines() -> list[dict[str, Any]]:
        events = mesh.frontend.events("request")
        return [line for line in events if line.get("client_request_id") == client_id]

    wait_for(lambda: bool(log_lines()), f"the line of {client_id} is in the log")
    # Else it may weigh on the next one still: what one frame asks is answered before it frees.
    wait_for(lambda: mesh.router.bookings() == 0, "the router has heard that it ended")
    return log_lines()[0]


@pytest.mark.slow
@pytest.mark.row("S1-43")
def test_prompts_find_their_beginnings_without_any_event_as_the_engine_confirms(
    tmp_path: Path,
) -> None:
    flags = ["--kv-events=off", "--recent-miss-weight=0"]
    with Mesh(tmp_path, workers=3, router_flags=flags, worker_flags=["--speedup=20"]) as mesh:
        for topic in range(3):
            beginning = f"topic {topic}: " + WORDS * 20
            first = post_completion(mesh, f"{topic}.0", beginning)
            assert first["predicted_cached_tokens"] < 64, "nothing but perhaps its first words"
            for turn in range(1, 4):
                line = post_completion(mesh, f"{topic}.{turn}", beginning + f" turn {turn}")
                assert line["workers"] == first["workers"], line
                assert line["predicted_cached_tokens"] == line["cached_tokens"] > 200
                assert "prefix hit" in json.dumps(line["routing"])
