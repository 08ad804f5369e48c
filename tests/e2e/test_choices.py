"""Several choices and several prompts of one request, at the door."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

PROMPTS = ["One fish", "Two fish", "Red fish"]


mesh = mesh_fixture(workers=2, worker_flags=["--speedup=5"])


# Any, here and below: JSON.
def post(mesh: Mesh, path: str = "completions", **body: Any) -> Any:
    response = mesh.http.post(f"{mesh.url}/v1/{path}", json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(mesh: Mesh, path: str = "completions", **body: Any) -> Iterator[Any]:
    """The chunks of a stream, which must end with DONE."""
    url, body = f"{mesh.url}/v1/{path}", {"model": MODEL, "stream": True, **body}
    with mesh.http.stream("POST", url, json=body, timeout=WAIT_S) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        for line in lines:
            if line == "data: [DONE]":
                return
            yield json.loads(line.removeprefix("data: "))
    pytest.fail("the stream has no DONE")


def text_of(choice: Any) -> str:
    """The text of a choice or of a chunk's choice."""
    content: str = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get(
        "content", ""
    )
    return content


def texts(response: Any) -> list[str]:
    assert [one["index"] for one in response["choices"]] == list(range(len(response["choices"])))
    return [text_of(one) for one in response["choices"]]


def streamed(chunks: Iterator[Any]) -> tuple[list[str], list[str], Any]:
    """Text and finish reason by choice, and the usage."""
    pieces: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in reasons, "nothing follows a finish reason"
            pieces[index] = pieces.get(index, "") + text_of(choice)
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    return [pieces[i] for i in sorted(pieces)], [reasons[i] for i in sorted(reasons)], usage


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_choice_i_is_the_response_to_seed_plus_i(mesh: Mesh, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": PROMPTS[0]}
    if path != "completions":
        prompt = {"messages": [{"role": "user", "content": PROMPTS[0]}]}
    prompt |= {"max_tokens": 12}
    singles = [post(mesh, path, **prompt, seed=7 + i) for i in range(3)]
    together = post(mesh, path, **prompt, seed=7, n=3)
    assert texts(together) == [texts(one)[0] for one in singles]
    assert len(set(texts(together))) == 3
    stream = events(mesh, path, **prompt, seed=7, n=3, stream_options={"include_usage": True})
    stream_texts, reasons, usage = streamed(stream)
    assert stream_texts == texts(together)
    assert reasons == [one["finish_reason"] for one in together["choices"]]
    for counts in (usage, together["usage"]):
        assert counts["prompt_tokens"] == singles[0]["usage"]["prompt_tokens"]
        assert counts["completion_tokens"] == sum(
            one["usage"]["completion_tokens"] for one in singles
        )
        assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]


def test_choices_at_temperature_zero_are_equal(mesh: Mesh) -> None:
    both = texts(post(mesh, prompt="A choice", n=2, temperature=0, seed=1, max_tokens=8))
    assert both[0] == both[1] != ""


def test_choices_are_interleaved_while_they_are_generated(mesh: Mesh) -> None:
    chunks = events(mesh, prompt="Many", n=4, max_tokens=30, ignore_eos=True)
    order = [choice["index"] for chunk in chunks for choice in chunk["choices"]]
    assert order.index(3) < len(order) - order[::-1].index(0), "choice 3 does not wait for choice 0"


@pytest.mark.parametrize("kind", ["texts", "token ids"])
def test_choices_of_several_prompts_are_in_their_order(mesh: Mesh, kind: str) -> None:
    prompts: list[Any] = [*PROMPTS]
    if kind == "token ids":
        prompts = [[ord(c) % 90 for c in one] for one in PROMPTS]
    options: dict[str, Any] = {"max_tokens": 6, "seed": 3}
    singles = [post(mesh, prompt=one, n=2, **options) for one in prompts]
    together = post(mesh, prompt=prompts, n=2, best_of=2, **options)
    assert texts(together) == [text for one in singles for text in texts(one)]
    assert together["usage"]["prompt_tokens"] == sum(
        one["usage"]["prompt_tokens"] for one in singles
    )
    assert streamed(events(mesh, prompt=prompts, n=2, **options))[0] == texts(together)


def test_echo_puts_the_prompt_before_each_choice(mesh: Mesh) -> None:
    plain = post(mesh, prompt=PROMPTS, n=2, max_tokens=4)
    echoed = post(mesh, prompt=PROMPTS, n=2, max_tokens=4, echo=True)
    expected = [PROMPTS[i // 2] + text for i, text in enumerate(texts(plain))]
    assert texts(echoed) == expected
    assert streamed(events(mesh, prompt=PROMPTS, n=2, max_tokens=4, echo=True))[0] == expected


def test_stop_strings_end_each_choice_by_itself(mesh: Mesh) -> None:
    options: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": 30}
    whole = texts(post(mesh, **options))
    words = whole[1].split()
    stop = f" {words[len(words) // 2]}"
    response = post(mesh, **options, stop=stop)
    assert texts(response) == [text.split(stop)[0] for text in whole]
    assert response["choices"][1]["finish_reason"] == "stop"


def test_a_request_with_several_choices_is_one_request(mesh: Mesh) -> None:
    body = {"model": MODEL, "prompt": PROMPTS, "n": 2, "max_tokens": 5, "ignore_eos": True}
    headers = {"x-request-id": "six-choices"}
    mesh.http.post(f"{mesh.url}/v1/completions", json=body, headers=headers)
    line = mesh.request_line("six-choices")
    assert len(mesh.request_lines("six-choices")) == 1
    assert (line["completion_tokens"], line["requests"], line["attempts"]) == (30, 6, 6)
    before = requests_ended(mesh)
    post(mesh, prompt=PROMPTS, n=2, max_tokens=5)
    assert requests_ended(mesh) == before + 1


def requests_ended(mesh: Mesh) -> float:
    lines = mesh.http.get(f"{mesh.url}/metrics").text.splitlines()
    name = "kvmesh_frontend_requests_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_a_refused_prompt_refuses_the_request(mesh: Mesh) -> None:
    body = {"model": MODEL, "prompt": ["fine", ""]}
    response = mesh.http.post(f"{mesh.url}/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


def test_a_disconnect_ends_every_choice(mesh: Mesh) -> None:
    body = {"model": MODEL, "prompt": "Go", "n": 5, "max_tokens": 2000, "ignore_eos": True}
    url = f"{mesh.url}/v1/completions"
    with mesh.http.stream("POST", url, json=body | {"stream": True}) as response:
        lines = response.iter_lines()  # a dropped iterator would close the response
        next(lines)
        wait_for(
            lambda: sum(worker.open_slots() for worker in mesh.workers) == 5, "all choices run"
        )
    wait_for(
        lambda: not any(worker.open_slots() for worker in mesh.workers), "all choices have ended"
    )


def test_each_choice_survives_the_death_of_its_worker(mesh: Mesh) -> None:
    body: dict[str, Any] = {
        "prompt": "Die",
        "n": 6,
        "seed": 11,
        "max_tokens": 100,
        "ignore_eos": True,
    }
    expected = texts(post(mesh, **body))
    chunks = events(mesh, **body)
    begun = [next(chunks) for _ in range(12)]
    victim = max(mesh.workers, key=lambda worker: worker.open_slots())
    assert victim.open_slots() > 0
    victim.kill()
    received, reasons, _ = streamed(iter([*begun, *chunks]))
    assert received == expected
    assert reasons == ["length"] * 6
