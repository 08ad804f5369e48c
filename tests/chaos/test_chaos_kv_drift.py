"""Predicted and actual cached tokens on real processes: equal under load, else a warning."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from frontend_svc.metrics.hit_drift import REQUESTS_MIN
from tests.chaos.client import Reply, fetch
from tests.kit.processes import Mesh
from tests.kit.waiting import wait_for

CLIENTS = 32
TURNS = 6
SYSTEMS = 8
# This long after the first client of a system prompt, its blocks are cached: see
# `metrics/hit_drift.py`.
CLIENT_INTERVAL_S = 0.4
# Shortest time in which a person reads a response and writes.
TURN_PAUSE_S = 0.1
DRIFT_MAX = 0.02
WORDS = ["able", "about", "above", "accept", "across", "act", "action", "active"]


def words(rng: Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def system(number: int) -> str:
    return f"System {number}: {words(Random(number), 300)}"


async def converse(url: str, client: int) -> None:
    """Runs the turns of a chat; each prompt contains all earlier turns."""
    rng, history = Random(client), f"{system(client % SYSTEMS)} Client {client}: "
    # Sleep: the clients start one after the other.
    await asyncio.sleep(client / SYSTEMS * CLIENT_INTERVAL_S)
    for _ in range(TURNS):
        history += words(rng, 60)
        reply = await fetch(url, Reply(history, 16))
        assert not reply.error, reply.error
        history += reply.text
        # Sleep: a pause between the turns of a chat.
        await asyncio.sleep(TURN_PAUSE_S)


async def load(url: str) -> None:
    for number in range(SYSTEMS):  # a mesh that has run for a while has them cached
        reply = await fetch(url, Reply(system(number), 4))
        assert not reply.error, reply.error
    async with asyncio.TaskGroup() as tasks:
        for client in range(CLIENTS):
            tasks.create_task(converse(url, client))


def metrics(mesh: Mesh) -> dict[str, float]:
    """Returns the frontend's kv_ metrics, summed over workers; of kv_drift_ratio the maximum."""
    found: dict[str, float] = {}
    text = mesh.http.get(f"{mesh.url}/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("kvmesh_frontend_")
            if name == "kv_drift_ratio":
                found[name] = max(found.get(name, 0.0), sample.value)
            elif name.startswith("kv_"):
                found[name] = found.get(name, 0.0) + sample.value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"workers": 2}, {"workers": 0, "prefill": 2, "decode": 2}])
def test_under_load_predictions_and_engines_differ_by_two_percent_at_most(
    tmp_path: Path, shape: dict[str, int]
) -> None:
    with Mesh(tmp_path, indexers=1, **shape) as mesh:  # type: ignore[arg-type]  # counts
        asyncio.run(load(mesh.url))
        sent = SYSTEMS + CLIENTS * TURNS
        wait_for(lambda: len(mesh.frontend.events("request")) >= sent, "every request is logged")
        lines = mesh.frontend.events("request")
        assert all("cached_tokens" in one for one in lines), "each response reports cached tokens"
        # Only predictions of a router for the first attempt count
        # (`frontend_svc/workers/hit_monitor.py`). On a busy machine a worker, or the router, may be
        # excluded for being late.
        judged = [
            one
            for one in lines
            if one["attempts"] == 1 and not any("unrouted" in reason for reason in one["routing"])
        ]
        pairs: list[tuple[int, int]] = [
            (one["predicted_cached_tokens"], one["cached_tokens"]) for one in judged
        ]
        largest = sum(max(pair) for pair in pairs)
        wrong = sum(abs(predicted - actual) for predicted, actual in pairs)
        assert largest > sent * 100, "the caches were used"
        assert wrong <= DRIFT_MAX * largest, (wrong, largest)
        shown = metrics(mesh)
        assert shown["kv_predicted_requests_total"] == len(judged)
        assert shown["kv_predicted_cached_tokens_total"] == sum(p for p, _ in pairs)
        assert shown["kv_actual_cached_tokens_total"] == sum(a for _, a in pairs)
        assert mesh.http.get(f"{mesh.url}/ready").json()["degraded"] == []
        assert mesh.frontend.events("kv_drift") == []


@pytest.mark.slow
def test_an_empty_index_is_reported_in_log_readiness_and_metrics(tmp_path: Path) -> None:
    async def send_requests(url: str) -> None:
        for number in range(2 * REQUESTS_MIN):
            reply = await fetch(url, Reply(f"{system(1)} {number}", 4))
            assert not reply.error, reply.error

    # No indexer: the router receives no KV events. Its predictions would hide that for seconds.
    no_predictions = ["--router-predicted-ttl-secs=0"]
    with Mesh(tmp_path, workers=1, router_flags=no_predictions) as mesh:
        asyncio.run(send_requests(mesh.url))
        (warning_text,) = mesh.http.get(f"{mesh.url}/ready").json()["degraded"]
        assert "worker" in warning_text
        assert "100.0%" in warning_text
        assert mesh.http.get(f"{mesh.url}/health").json()["degraded"] == [warning_text]
        assert mesh.http.get(f"{mesh.url}/ready").json()["ready"], "the router serves, degraded"
        (warning,) = mesh.frontend.events("kv_drift")
        assert warning["level"] == "warning"
        assert warning["worker_id"] == str(mesh.workers[0].instance_id)
        shown = metrics(mesh)
        assert (shown["kv_degraded"], shown["kv_drift_ratio"]) == (1.0, 1.0)
        assert shown["kv_predicted_cached_tokens_total"] == 0.0
