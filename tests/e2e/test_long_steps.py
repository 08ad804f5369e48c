"""Engines with long steps are served without retries."""

from __future__ import annotations

import json
import threading

import pytest

from tests.kit.oracle import Oracle
from tests.kit.processes import Mesh, mesh_fixture
from tests.kit.waiting import wait_for

PREFILL_TOKENS_PER_S = 1000
STEPS_S = (0.1, 2.0, 5.0, 20.0)


mesh = mesh_fixture(
    workers=1,
    worker_flags=[
        f"--prefill-tokens-per-s={PREFILL_TOKENS_PER_S}",
        f"--max-num-batched-tokens={round(STEPS_S[-1] * PREFILL_TOKENS_PER_S)}",
    ],
)


def prompt_of(step_s: float, first: int) -> list[int]:
    """A prompt whose prefill is one step of this duration. first: makes its blocks unique."""
    count = round(step_s * PREFILL_TOKENS_PER_S)
    return [300 + (first * 7919 + place * place) % 2000 for place in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_prefill_step_of_any_length_is_served_at_the_first_attempt(
    mesh: Mesh, step_s: float
) -> None:
    prompt, name = prompt_of(step_s, round(10 * step_s)), f"step-{step_s}"
    response = mesh.post_completion(name, prompt, max_tokens=3, ignore_eos=True)
    assert response.status_code == 200, response.text
    expected = Oracle().completion(prompt, 3, ignore_eos=True)
    assert response.json()["choices"][0]["text"] == expected.text
    line = mesh.request_line(name)
    assert (line["attempts"], line["ttft_ms"] >= 900 * step_s) == (1, True), line


@pytest.mark.slow
def test_a_stream_survives_a_long_prefill_of_another_request(mesh: Mesh) -> None:
    events: list[str] = []

    def read() -> None:
        body = {
            "model": "sim",
            "prompt": [300] * 20,
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"x-request-id": "stream"}
        url = f"{mesh.url}/v1/completions"
        with mesh.http.stream("POST", url, json=body, headers=headers) as response:
            events.extend(line for line in response.iter_lines() if line.startswith("data: {"))

    thread = threading.Thread(target=read)
    thread.start()
    wait_for(lambda: mesh.workers[0].load().loads[0].running, "the stream runs")
    response = mesh.post_completion("long", prompt_of(4.0, 99), max_tokens=1)
    thread.join()
    assert response.status_code == 200, response.text
    assert [mesh.request_line(name)["attempts"] for name in ("stream", "long")] == [1, 1]
    texts = [json.loads(event.removeprefix("data: ")) for event in events]
    text = "".join(choice["text"] for event in texts for choice in event["choices"])
    assert text == Oracle().completion([300] * 20, 200, ignore_eos=True).text
