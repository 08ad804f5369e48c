"""Chat templates that loop or print without end: they stop neither streams nor other models."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.paced_streams import GAP_MAX_S, paced_streams, post_beside
from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import WAIT_S, wait_for
from worker_svc.engines.sim.config import SIM_MODEL_DIR

pytestmark = pytest.mark.slow

# Reading a tokenizer takes turns with the event loop.
LOAD_GAP_MAX_S = 2.0
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'A' * 3000000000 }}"
# It hides until a client sends the word.
HIDDEN = (
    "{% if messages[0].content == 'loop' %}" + LOOPS + "{% endif %}"
    "{% if messages[0].content == 'huge' %}" + HUGE + "{% endif %}"
    "{% if messages[0].content == 'long' %}{{ 'A' * 100000000 }}{% endif %}"
    "{{ messages[0].content }}"
)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    with Mesh(folder, workers=1) as mesh:
        mesh.spawn("worker", *model_flags(folder, "hidden", HIDDEN)).wait_ready()
        wait_for(lambda: mesh.model_names() == {MODEL, "hidden"}, "both models are served")
        yield mesh


def model_flags(folder: Path, name: str, template: str) -> tuple[str, str]:
    """The flags of a worker whose card has the template."""
    shutil.copytree(SIM_MODEL_DIR, folder / name)
    path = folder / name / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return f"--model-name={name}", f"--model-path={folder / name}"


def chat(content: str) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": "hidden", "messages": messages, "max_tokens": 4}).encode()


def test_a_template_that_exceeds_its_limits_fails_its_own_request_only(mesh: Mesh) -> None:
    path = "/v1/chat/completions"
    with paced_streams(mesh) as streams:
        for content in ("loop", "huge", "long", "loop"):
            status, value, seconds, gap_s = post_beside(streams, mesh.url, path, chat(content))
            print(f"{content}: {status} after {seconds:.2f} s, gap {gap_s:.3f} s")
            assert (status, value["error"]["param"]) == (400, "messages")
            assert value["error"]["message"].startswith("chat template: ")
            assert gap_s < GAP_MAX_S
        status, value, seconds, gap_s = post_beside(streams, mesh.url, path, chat("able about"))
        assert status == 200, value


def test_prompts_rendered_together_with_a_hostile_one_are_served(mesh: Mesh) -> None:
    url = f"{mesh.url}/v1/chat/completions"

    def status_of(content: str) -> int:
        response = mesh.http.post(url, content=chat(content), timeout=2 * WAIT_S)
        deadline = time.monotonic() + 2 * WAIT_S
        # On a busy machine the process may have no time for all of them: clients try again.
        while response.status_code == 503 and time.monotonic() < deadline:
            assert "busy with other prompts" in response.text
            # Sleep: the time that the refusal states.
            time.sleep(float(response.headers["retry-after"]))
            response = mesh.http.post(url, content=chat(content), timeout=2 * WAIT_S)
        return response.status_code

    contents = ["able about", "loop"] * 2 + ["able about"] * 12
    with ThreadPoolExecutor(len(contents)) as pool:
        statuses = list(pool.map(status_of, contents))
    assert statuses == [400 if one == "loop" else 200 for one in contents]


def test_a_card_whose_template_cannot_be_loaded_disables_its_model_only(
    mesh: Mesh, tmp_path: Path
) -> None:
    with paced_streams(mesh) as streams:
        flags = model_flags(tmp_path, "loops", LOOPS)
        mesh.spawn("worker", *flags).wait_ready()

        def reason() -> str:
            missing = mesh.http.get(f"{mesh.url}/health").json()["models_not_ready"]
            return str(missing.get("loops", ""))

        wait_for(lambda: "chat template: " in reason(), "the card is refused")
        gap_s = max(stream.gap_s for stream in streams)
        print(f"refused: {reason()}; gap {gap_s:.3f} s")
        assert "limits of time" in reason()
        assert gap_s < LOAD_GAP_MAX_S
    assert mesh.model_names() == {MODEL, "hidden"}
