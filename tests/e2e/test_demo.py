"""`make demo` on real processes, from the SDK to the linked spans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.consul_agent import consul_binary

ROOT = Path(__file__).resolve().parents[2]
# It takes 5 to 8 s; up to 67 s were measured with a dozen other busy processes per core.
TIMEOUT_S = 200


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 10)
@pytest.mark.row("S2-25", "S2-21", "S2-22", "S2-23", "S2-47")
@pytest.mark.parametrize("registry", ["file", "consul"])
def test_the_demo_shows_a_kv_hit_and_decode_linked_to_prefill(registry: str) -> None:
    if registry == "consul":
        consul_binary()  # skips the test if there is none
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}
    done = subprocess.run(
        [sys.executable, "-m", "meshctl", "demo", "--registry", registry],
        cwd=ROOT,
        env={**env, "PYTHONPATH": f"{ROOT}/protos:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # The demo ends by itself.
    assert "Ctrl-C" not in done.stdout
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["answers"] == 2
    assert facts["kv_hit_tokens"] >= 64
    assert facts["linked_span"] == facts["prefill_span"] != facts["decode_span"]
    second = done.stdout.split("cache    ")[2]
    assert second.startswith(
        f"predicted {facts['kv_hit_tokens']}, actual {facts['kv_hit_tokens']} of"
    )


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 10)
def test_a_demo_ended_by_a_signal_removes_its_folder(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}
    demo = subprocess.Popen(
        [sys.executable, "-m", "meshctl", "demo"],
        cwd=ROOT,
        env={**env, "PYTHONPATH": f"{ROOT}/protos:{ROOT}", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert demo.stdout is not None
        # The demo prints this once its signal handlers are set.
        assert demo.stdout.readline().startswith("starting ")
        (folder,) = tmp_path.glob("kvmesh-demo-*")
        # `timeout` signals the whole group, and `make` signals its child again.
        os.killpg(demo.pid, signal.SIGTERM)
        demo.terminate()
        shown, errors = demo.communicate(timeout=TIMEOUT_S)
    finally:
        demo.kill()
    assert demo.returncode == 128 + signal.SIGTERM, shown + errors
    assert "demo: ended by SIGTERM" in errors
    assert "Traceback" not in errors
    assert not folder.exists()
    assert list(tmp_path.glob("kvmesh-demo-*")) == []
