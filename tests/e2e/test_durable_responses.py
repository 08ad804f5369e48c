"""Stored responses of a mesh with a batch service: they survive every process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.kit.processes import MODEL, Mesh, Service, mesh_fixture
from tests.kit.sdk import open_blocking_sdk_client
from tests.kit.waiting import wait_for

pytestmark = pytest.mark.slow

mesh = mesh_fixture(
    workers=1,
    batches=1,
    frontends=2,
    worker_flags=["--speedup=20"],
    batch_flags=["--response-limit-mb=1", "--tenant-responses-mb=2"],
)


@pytest.fixture(autouse=True)
def complete(mesh: Mesh) -> None:
    """Every frontend sees the batch service, and no dead one."""
    expected = {service.instance_id for service in mesh.running("batch")}
    wait_for(
        lambda: all(mesh.known_instance_ids("batch", url) == expected for url in mesh.urls),
        "the frontends see the batch service",
    )


@pytest.fixture
def clients(mesh: Mesh) -> Iterator[list[openai.OpenAI]]:
    """One for each frontend."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_blocking_sdk_client(mesh, url)) for url in mesh.urls]


# Any, here and below: fields of a body, items, events.
def create(client: openai.OpenAI, text: Any = "Hello", **fields: Any) -> Any:
    return client.responses.create(model=MODEL, input=text, max_output_tokens=16, **fields)


def text_of(item: Any) -> str:
    """The text of an item of the SDK, which has many types."""
    text: str = item.content[0].text
    return text


def restart(mesh: Mesh, kind: str) -> Service:
    """Kills every process of a kind, and starts as many."""
    dead = mesh.running(kind)
    for service in dead:
        service.kill()
    started = [mesh.spawn(kind) for _ in dead]
    for service in started:
        service.wait_ready()
    wait_for(mesh.is_complete, "the frontends use the router and all workers")
    return started[0]


def found(client: openai.OpenAI, response_id: str) -> Response:
    """Waits until a response can be read."""

    def read() -> Response | None:
        try:
            return client.responses.retrieve(response_id)
        except (openai.InternalServerError, openai.APIConnectionError):
            return None

    response = wait_for(read, "the response is found")
    assert response is not None
    return response


def test_responses_survive_restarts_of_all_frontends_and_of_the_batch_service(mesh: Mesh) -> None:
    with open_blocking_sdk_client(mesh, mesh.urls[0]) as client:
        first = create(client, "My name is Ada.")
        *_, last = create(client, "Go on.", previous_response_id=first.id, stream=True)
    restart(mesh, "frontend")
    restart(mesh, "batch")
    for url in mesh.urls:
        with open_blocking_sdk_client(mesh, url) as client:
            assert found(client, first.id) == first
            again = client.responses.retrieve(last.response.id)
            assert (again.output_text, again.status) == (
                last.response.output_text,
                last.response.status,
            )
            items = client.responses.input_items.list(last.response.id, order="asc").data
            texts = [text_of(item) for item in items]
            assert texts == ["My name is Ada.", first.output_text, "Go on."]
            reply = create(client, "And?", previous_response_id=last.response.id)
            messages: list[Any] = [
                {"role": "user", "content": "My name is Ada."},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "Go on."},
                {"role": "assistant", "content": last.response.output_text},
                {"role": "user", "content": "And?"},
            ]
            assert reply.output_text == create(client, messages, store=False).output_text


def test_a_deleted_response_is_gone_at_every_frontend(clients: list[openai.OpenAI]) -> None:
    response = create(clients[0])
    clients[1].responses.delete(response.id)
    for client in clients:
        with pytest.raises(openai.NotFoundError, match="not stored"):
            client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, previous_response_id=response.id)
        assert refused.value.code == "previous_response_not_found"


def test_a_full_tenant_loses_its_oldest_responses(clients: list[openai.OpenAI]) -> None:
    metadata = {"text": "x" * 300_000}
    ids = [create(clients[0], metadata=metadata).id for _ in range(8)]
    with pytest.raises(openai.NotFoundError, match="too many"):
        clients[1].responses.retrieve(ids[0])
    assert clients[1].responses.retrieve(ids[-1]).id == ids[-1]


def test_a_response_above_the_limit_stays_in_the_memory_of_its_frontend(
    mesh: Mesh, clients: list[openai.OpenAI]
) -> None:
    response = create(clients[0], metadata={"text": "x" * 1_200_000})
    assert (response.model_extra or {})["store"] is True
    assert clients[1].responses.retrieve(response.id) == response
    (event,) = mesh.running("frontend")[0].events("response_not_durable")
    assert "the limit is 1 MB" in event["error"]


def test_without_the_batch_service_responses_are_served_and_stay_in_memory(
    mesh: Mesh, clients: list[openai.OpenAI]
) -> None:
    durable = create(clients[0])
    for service in mesh.running("batch"):
        service.kill()
    lost = create(clients[0])
    assert (lost.model_extra or {})["store"] is True
    for client in clients:
        assert client.responses.retrieve(lost.id) == lost
        with pytest.raises(openai.InternalServerError) as outage:
            client.responses.retrieve(durable.id)
        assert outage.value.status_code == 503
        with pytest.raises(openai.InternalServerError):
            create(client, previous_response_id=durable.id)
    mesh.spawn("batch").wait_ready()
    for client in clients:
        assert found(client, durable.id) == durable
