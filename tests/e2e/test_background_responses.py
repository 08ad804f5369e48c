"""Responses in the background: they run without their client, and survive every process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.sdk import open_blocking_sdk_client
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

ENDED = ("completed", "incomplete", "failed", "cancelled")
# Any: fields of a body. A response that takes seconds.
LONG: Any = {"max_output_tokens": 600, "extra_body": {"nvext": {"ignore_eos": True}}}
# One that does not end during a test.
ENDLESS: Any = {"max_output_tokens": 100_000, "extra_body": {"nvext": {"ignore_eos": True}}}

mesh = mesh_fixture(
    workers=1,
    batches=1,
    frontends=2,
    worker_flags=["--speedup=5", "--context-length=131072"],
    batch_flags=["--tenant-background-max=4"],
)


sdk = partial(open_blocking_sdk_client, max_retries=8)


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with sdk(mesh) as opened:
        yield opened


def start(client: openai.OpenAI, text: str = "Hello", **fields: Any) -> Any:
    fields.setdefault("max_output_tokens", 16)
    return client.responses.create(model=MODEL, input=text, background=True, **fields)


def text_of(item: Any) -> str:
    """The text of an item of the SDK, which has many types."""
    text: str = item.content[0].text
    return text


def with_status(client: openai.OpenAI, response_id: str, *statuses: str) -> Response:
    """Waits until a response has one of these states."""

    def read() -> Response | None:
        response = client.responses.retrieve(response_id)
        return response if response.status in statuses else None

    found = wait_for(read, f"{response_id} is {' or '.join(statuses)}", 4 * WAIT_S)
    assert found is not None
    return found


def test_a_response_runs_without_its_client(client: openai.OpenAI) -> None:
    queued = start(client, instructions="Be brief.", metadata={"a": "b"})
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    response = with_status(client, queued.id, *ENDED)
    expected = client.responses.create(
        model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=16
    )
    assert response.status == expected.status
    assert response.output_text == expected.output_text
    assert response.usage is not None
    assert expected.usage is not None
    assert response.usage.total_tokens == expected.usage.total_tokens
    assert response.metadata == {"a": "b"}
    assert (response.created_at, response.background) == (queued.created_at, True)
    (item,) = client.responses.input_items.list(response.id).data
    assert text_of(item) == "Hello"
    again = start(client, "Again", previous_response_id=response.id)
    again = with_status(client, again.id, *ENDED)
    continued = client.responses.create(
        model=MODEL, input="Again", previous_response_id=expected.id, max_output_tokens=16
    )
    assert again.output_text == continued.output_text


def test_a_response_survives_frontends_workers_and_the_batch_service(
    mesh: Mesh, client: openai.OpenAI
) -> None:
    prompts = [f"Prompt {number}" for number in range(3)]
    ids = [start(client, prompt, **LONG).id for prompt in prompts]
    for kind in ("frontend", "batch", "frontend", "worker"):
        with sdk(mesh) as one:
            with_status(one, ids[-1], "in_progress", *ENDED)
        mesh.running(kind)[0].kill()
        mesh.spawn(kind).wait_ready()
    wait_for(mesh.is_complete, "the frontends use the router and all workers")
    with sdk(mesh) as one:
        for prompt, response_id in zip(prompts, ids, strict=True):
            response = with_status(one, response_id, *ENDED)
            assert response.error is None
            expected = one.responses.create(model=MODEL, input=prompt, **LONG)
            assert response.output_text == expected.output_text


def test_a_cancelled_response_leaves_its_worker(mesh: Mesh, client: openai.OpenAI) -> None:
    response = start(client, **ENDLESS)
    with_status(client, response.id, "in_progress")
    wait_for(lambda: mesh.workers[0].open_slots() > 0, "a worker runs it")
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        start(client, previous_response_id=response.id)
    cancelled = client.responses.cancel(response.id)
    assert (cancelled.id, cancelled.status) == (response.id, "cancelled")
    wait_for(lambda: mesh.workers[0].open_slots() == 0, "the worker has ended it")
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.retrieve(response.id).status == "cancelled"
    foreground = client.responses.create(model=MODEL, input="Hi", max_output_tokens=16)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(foreground.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_1")


def test_a_deleted_response_leaves_its_worker(mesh: Mesh, client: openai.OpenAI) -> None:
    response = start(client, **ENDLESS)
    wait_for(lambda: mesh.workers[0].open_slots() > 0, "a worker runs it")
    client.responses.delete(response.id)
    wait_for(lambda: mesh.workers[0].open_slots() == 0, "the worker has ended it")


def test_a_tenant_with_too_many_responses_is_refused(mesh: Mesh, client: openai.OpenAI) -> None:
    ids = [start(client, **ENDLESS).id for _ in range(4)]
    body = {"model": MODEL, "input": "Hi", "background": True}
    refused = mesh.http.post(f"{mesh.url}/v1/responses", json=body)
    assert refused.status_code == 429, refused.text
    assert "the limit is 4" in refused.json()["error"]["message"]
    assert "retry-after" in refused.headers
    for response_id in ids:
        client.responses.cancel(response_id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": False}, "background"),
        ({"stream": True}, "stream"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_queued(
    mesh: Mesh, fields: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "input": "Hi", "background": True, **fields}
    refused = mesh.http.post(f"{mesh.url}/v1/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
