"""Routers without KV events predict cache hits from their decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from tests.kit.processes import Mesh, Service
from tests.kit.waiting import WAIT_S, wait_for

WORDS = "the quick brown fox jumps over the lazy dog and runs far away from all of them "


def post_completion(mesh: Mesh, client_id: str, prompt: str) -> dict[str, Any]:
    """Returns the log line of a successful request."""
    response = mesh.post_completion(client_id, prompt, max_tokens=4)
    assert response.status_code == 200, response.text
    line = mesh.request_line(client_id)
    # Its booking could still count against the next one: a router answers the queries of a frame
    # before it frees the bookings of that frame.
    wait_for(
        lambda: not any(router.bookings() for router in mesh.running("router")),
        "the routers have freed the booking",
    )
    return line


@pytest.mark.slow
@pytest.mark.row("S1-43", "S4-34")
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


def has_decided(router: Service, request_id: str) -> bool:
    stub = router_pb2_grpc.RouterServiceStub(router.channel)
    try:
        stub.Explain(router_pb2.ExplainRequest(request_id=request_id), timeout=WAIT_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return False
        raise
    return True


@pytest.mark.slow
def test_a_prompt_that_one_router_placed_is_a_hit_at_another(tmp_path: Path) -> None:
    flags = ["--kv-events=off", "--recent-miss-weight=0"]
    sizes: dict[str, Any] = {"workers": 4, "routers": 2, "worker_flags": ["--speedup=20"]}
    with Mesh(tmp_path, router_flags=flags, **sizes) as mesh:
        routers = mesh.running("router")
        topics = [f"topic {n}: " + WORDS * 20 for n in range(6)]
        firsts = [post_completion(mesh, f"{n}.0", topic) for n, topic in enumerate(topics)]
        deciders = {
            router.name for router in routers if has_decided(router, firsts[0]["request_id"])
        }
        assert len(deciders) == 1, "one router placed the request"
        next(router for router in routers if router.name in deciders).kill()
        for number, first in enumerate(firsts):
            line = post_completion(mesh, f"{number}.1", topics[number] + " again")
            assert line["workers"] == first["workers"], line
            assert line["predicted_cached_tokens"] == line["cached_tokens"] > 200
