"""`make demo`: the whole vertical, from the SDK to the linked spans, on real processes."""

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
# It takes 5 to 8 seconds; up to 67 were seen with a dozen busy processes for each core beside it.
TIMEOUT_S = 200


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 10)
@pytest.mark.row("S2-25")
@pytest.mark.parametrize("registry", ["file", "consul"])
def test_the_demo_shows_a_kv_hit_and_decode_linked_to_prefill(registry: str) -> None:
    if registry == "consul":
        consul_binary()  # skips, saying why, where there is none
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
    # It ends by itself.
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
def test_a_demo_that_is_ended_by_a_signal_leaves_nothing_behind(tmp_path: Path) -> None:
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
        # Said once signals are listened to.
        assert demo.stdout.readline().startswith("starting ")
        (folder,) = tmp_path.glob("kvmesh-demo-*")
        # As `timeout` does, whom `make` then helps: to all of the group, and once more.
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
