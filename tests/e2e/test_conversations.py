"""Conversations by OpenAI's SDK: their items come before those of a response, which appends its
own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import openai
import pytest

from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.sdk import open_blocking_sdk_client
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

mesh = mesh_fixture(
    workers=1,
    batches=1,
    frontends=2,
    worker_flags=["--speedup=20"],
    batch_flags=["--conversation-items-max=24", "--tenant-conversations-max=12"],
)


sdk = partial(open_blocking_sdk_client, max_retries=8)


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with sdk(mesh) as opened:
        yield opened


@pytest.fixture
def other(mesh: Mesh) -> Iterator[openai.OpenAI]:
    """A client of another frontend."""
    with sdk(mesh, mesh.urls[1]) as opened:
        yield opened


# Any, here and below: items and fields of bodies.
def message(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


def respond(client: openai.OpenAI, text: Any, **fields: Any) -> Any:
    return client.responses.create(model=MODEL, input=text, max_output_tokens=16, **fields)


def text_of(item: Any) -> str:
    """The text of an item of the SDK, which has many types."""
    text: str = item.content[0].text
    return text


def texts(client: openai.OpenAI, conversation_id: str) -> list[str]:
    """The texts of all items, oldest first."""
    items = client.conversations.items.list(conversation_id, order="asc", limit=5)
    return [text_of(item) for item in items]


def test_a_conversation_is_created_read_updated_and_deleted(
    client: openai.OpenAI, other: openai.OpenAI
) -> None:
    created = client.conversations.create(items=[message("Hi")], metadata={"topic": "a"})
    assert (created.object, created.metadata) == ("conversation", {"topic": "a"})
    assert other.conversations.retrieve(created.id) == created
    updated = other.conversations.update(created.id, metadata={"topic": "b"})
    assert (updated.id, updated.metadata) == (created.id, {"topic": "b"})
    added = client.conversations.items.create(created.id, items=[message("A"), message("B")])
    assert [text_of(item) for item in added.data] == ["A", "B"]
    assert texts(other, created.id) == ["Hi", "A", "B"]
    item_id = cast(str, added.data[0].id)
    item = client.conversations.items.retrieve(item_id, conversation_id=created.id)
    assert item == added.data[0]
    client.conversations.items.delete(item_id, conversation_id=created.id)
    assert texts(other, created.id) == ["Hi", "B"]
    page = client.conversations.items.list(created.id, limit=1)
    assert ([text_of(item) for item in page.data], page.has_more) == (["B"], True)
    deleted = client.conversations.delete(created.id)
    assert (deleted.deleted, deleted.object) == (True, "conversation.deleted")
    # Any: each returns another type.
    calls: list[Any] = [
        *(other.conversations.retrieve, other.conversations.delete),
        *(other.conversations.items.list, lambda i: respond(other, "Hi", conversation=i)),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            call(created.id)


def test_a_response_continues_a_conversation_and_appends_its_items(
    client: openai.OpenAI, other: openai.OpenAI
) -> None:
    conversation = client.conversations.create(items=[message("My name is Ada.")])
    first = respond(client, "Hello", conversation=conversation.id)
    assert first.conversation is not None
    assert first.conversation.id == conversation.id
    stream = other.responses.create(
        model=MODEL,
        input="Go on.",
        conversation={"id": conversation.id},
        max_output_tokens=16,
        stream=True,
    )
    *_, last = stream
    second = cast(Any, last).response
    history = ["My name is Ada.", "Hello", first.output_text, "Go on.", second.output_text]
    assert texts(client, conversation.id) == history
    roles = ("user", "user", "assistant", "user", "assistant")
    items = [message(text, role) for role, text in zip(roles, history, strict=True)]
    assert first.output_text == respond(client, items[:2], store=False).output_text
    assert second.output_text == respond(client, items[:4], store=False).output_text
    third = respond(client, "And?", conversation=conversation.id, store=False)
    assert third.output_text == respond(client, [*items, message("And?")]).output_text
    assert texts(other, conversation.id) == [*history, "And?", third.output_text]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(third.id)


def test_concurrent_responses_lose_no_item(client: openai.OpenAI, other: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    prompts = [f"Prompt {number}" for number in range(8)]

    def run(number: int) -> Any:
        return respond((client, other)[number % 2], prompts[number], conversation=conversation.id)

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(run, range(8)))
    found = texts(client, conversation.id)
    pairs = [tuple(found[start : start + 2]) for start in range(0, len(found), 2)]
    expected = {(p, r.output_text) for p, r in zip(prompts, responses, strict=True)}
    assert (len(pairs), set(pairs)) == (8, expected)


def test_a_response_in_the_background_appends_at_its_end(mesh: Mesh, client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[message("Hi")])
    queued = respond(client, "Hello", conversation=conversation.id, background=True)
    for kind in ("batch", "frontend"):
        mesh.running(kind)[0].kill()
        mesh.spawn(kind).wait_ready()
    wait_for(mesh.is_complete, "the frontends use the router and all workers")
    with sdk(mesh) as one:
        found = wait_for(
            lambda: texts(one, conversation.id)[2:], "the response has ended", 4 * WAIT_S
        )
        response = one.responses.retrieve(queued.id)
        assert (response.status in ("completed", "incomplete"), found) == (
            *(True, [response.output_text]),
        )


def test_limits_are_refused_by_name(mesh: Mesh, client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[message("A")] * 20)
    client.conversations.items.create(conversation.id, items=[message("B")] * 4)
    bodies: list[tuple[str, Any, str]] = [
        (f"conversations/{conversation.id}/items", {"items": [message("C")]}, "conversation"),
        ("conversations", {"items": [message("C")] * 21}, "items"),
        ("conversations", {"items": [{**message("C"), "id": "a b"}]}, "items[0].id"),
        ("conversations", {"items": [{"type": "item_reference", "id": "a"}]}, "items[0].type"),
        ("conversations", {"metadata": {"a": 1}}, "metadata.a"),
        ("responses", {"conversation": conversation.id}, "conversation"),
        (
            "responses",
            {"conversation": "conv_1", "previous_response_id": "resp_1"},
            "conversation",
        ),
    ]
    for path, fields, param in bodies:
        body = {"model": MODEL, "input": "Hi", **fields} if path == "responses" else fields
        refused = mesh.http.post(f"{mesh.url}/v1/{path}", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text

    assert (
        mesh.http.post(f"{mesh.url}/v1/{bodies[0][0]}", json=bodies[0][1]).json()["error"]["code"]
        == "conversation_full"
    )

    def is_full() -> bool:
        created = mesh.http.post(f"{mesh.url}/v1/conversations")
        return created.status_code == 429 and "the limit is 12" in created.text

    wait_for(is_full, "the tenant has as many conversations as it may have")
