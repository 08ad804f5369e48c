"""`meshctl plan` on a running mesh: measured speeds, live traffic, a check of the prediction."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import WAIT_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    with Mesh(folder, workers=2, routers=1, worker_flags=["--speedup=10"]) as running:
        yield running


def plan(mesh: Mesh, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshctl", "plan", *flags, "--json"],
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
        env={
            "PYTHONPATH": ":".join(sys.path),
            "KVMESH_REGISTRY_PATH": str(mesh.folder / "registry"),
        },
    )


@contextmanager
def traffic(mesh: Mesh) -> Iterator[None]:
    """Sends one request after the other."""
    is_over = threading.Event()

    def send() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            mesh.post_completion(f"live-{number}", [300 + number % 900] * 200, max_tokens=8)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_plan_is_made_from_live_traffic_and_checked_on_the_mesh(
    mesh: Mesh, tmp_path: Path
) -> None:
    live, speeds = tmp_path / "live.jsonl", tmp_path / "speeds.json"
    speeds.write_text('{"base_s": 0.001, "prefill_token_s": 1e-5, "decode_seq_s": 1e-5}')
    with traffic(mesh):
        done = plan(
            *(mesh, str(live), "--live-s=2", f"--live-model={MODEL}", f"--speeds={speeds}"),
            *("--ttft-s=5", "--requests=100"),
        )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in live.read_text().splitlines()]
    mean = sum(row["input_length"] for row in rows) / len(rows)
    assert 195 < mean < 205
    assert json.loads(done.stdout)["best"]["fleet"]["aggregated"] == 1

    done = plan(
        *(mesh, str(live), f"--model={MODEL}", f"--speeds={speeds}"),
        *("--check-s=2", "--ttft-s=5", "--requests=100"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["check"]
    assert found["fleet"] == {"aggregated": 2, "prefill": 0, "decode": 0}
    assert found["failed"] == 0
    assert found["requests"] > 10
    assert found["figures"]["ttft_p50"]["measured_s"] > 0
    measured = json.loads(speeds.read_text())
    # What the worker advertises.
    assert measured["capacity"] == {
        **{"blocks": 16384, "block_size": 16, "requests": 256},
        "chunk_tokens": 8192,
    }
    assert measured["chunk_tokens"] == 8192


def test_a_plan_counts_the_size_and_the_steps_of_small_workers(tmp_path: Path) -> None:
    """16 requests that arrive at once have 2,000 tokens each. The cache has room for three."""
    trace, speeds = tmp_path / "trace.jsonl", tmp_path / "speeds.json"
    row = {"timestamp": 0, "input_length": 1900, "output_length": 100, "hash_ids": []}
    trace.write_text(16 * f"{json.dumps(row)}\n")
    sizes = ["--total-kv-blocks=400", "--max-num-batched-tokens=1024", "--no-mixed-steps"]
    with Mesh(tmp_path, workers=1, routers=1, worker_flags=["--speedup=4", *sizes]) as small:
        done = plan(
            *(small, str(trace), f"--model={MODEL}", f"--speeds={speeds}"),
            *("--ttft-s=1000", "--max-workers=1"),
        )
    assert done.returncode == 0, done.stderr
    measured = json.loads(speeds.read_text())
    assert measured["capacity"]["blocks"] == 400
    # The pause beside a long prompt was that of all its chunks.
    assert (measured["is_mixed"], measured["chunk_tokens"]) == (False, 1024)
    limited = json.loads(done.stdout)["best"]["ttft_p95_s"]
    flags = [str(trace), f"--speeds={speeds}", "--ttft-s=1000", "--blocks=3000"]
    free = json.loads(plan(small, *flags).stdout)["best"]["ttft_p95_s"]
    assert limited > 1.1 * free


def test_what_a_plan_needs_is_named(mesh: Mesh, tmp_path: Path) -> None:
    trace = str(tmp_path / "none.jsonl")
    for flags, text in (
        (["--live-s=1", "--ttft-s=1"], "--live-s needs --live-model or --model"),
        (["--check-s=1", "--ttft-s=1"], "--check-s needs --model"),
        (["--live-s=1", "--live-model=absent", "--ttft-s=1"], "0 requests in 1"),
        (["--live-s=0.5", "--ttft-s=1"], "0.5 is not in the range"),
    ):
        done = plan(mesh, trace, *flags)
        assert done.returncode == 2, done.stdout
        assert text in done.stderr
