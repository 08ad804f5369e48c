"""Responses in the background: they run without their client, and survive every process."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
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
# Any, here and below: fields of a body.
IGNORING_EOS: Any = {"extra_body": {"nvext": {"ignore_eos": True}}}
# A response that takes seconds.
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


def stream(client: openai.OpenAI, text: str = "Hello", **fields: Any) -> Any:
    return start(client, text, stream=True, **fields)


def by_number(events: Iterable[Any]) -> dict[int, Any]:
    return {event.sequence_number: event for event in events}


def resumed(mesh: Mesh, response_id: str, last: int | None) -> list[Any]:
    """The events after one, of any frontend: as a client reads them that loses its connection."""
    events: list[Any] = []

    def read() -> bool:
        with sdk(mesh) as client:
            after = events[-1].sequence_number if events else last
            try:
                # Keeps the events before an error.
                events.extend(
                    client.responses.retrieve(
                        response_id,
                        stream=True,
                        starting_after=openai.omit if after is None else after,
                    )
                )
            except openai.BadRequestError:
                raise
            except openai.APIError:
                return False
        return bool(events) and events[-1].type.removeprefix("response.") in ENDED

    wait_for(read, "the stream has ended", 4 * WAIT_S)
    return events


def test_a_stream_in_the_background_is_resumed_at_another_frontend(
    mesh: Mesh, client: openai.OpenAI
) -> None:
    first: list[Any] = []
    with stream(client, **LONG) as events:
        for event in events:
            first.append(event)
            if event.type == "response.output_text.delta" and len(first) > 20:
                break
    response_id = first[0].response.id
    assert [event.type for event in first[:3]] == [
        f"response.{name}" for name in ("created", "queued", "in_progress")
    ]
    assert (first[0].response.status, first[0].response.background) == ("queued", True)
    with sdk(mesh, mesh.urls[1]) as other:
        rest = list(
            other.responses.retrieve(
                response_id, stream=True, starting_after=first[-1].sequence_number
            )
        )
        again = list(other.responses.retrieve(response_id, stream=True))
    whole = [*first, *rest]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert again == whole
    assert whole[-1].type == "response.incomplete"
    text = "".join(e.delta for e in whole if e.type == "response.output_text.delta")
    assert whole[-1].response == client.responses.retrieve(response_id)
    assert text == whole[-1].response.output_text
    assert text == client.responses.create(model=MODEL, input="Hello", **LONG).output_text


def test_a_stream_survives_frontends_workers_and_the_batch_service(mesh: Mesh) -> None:
    with sdk(mesh) as client, stream(client, "Survive", **LONG) as events:
        first = [next(events) for _ in range(16)]
    response_id = first[0].response.id
    for kind in ("frontend", "batch", "worker"):
        mesh.running(kind)[0].kill()
        mesh.spawn(kind).wait_ready()
    wait_for(mesh.is_complete, "the frontends use the router and all workers")
    whole = [*first, *resumed(mesh, response_id, first[-1].sequence_number)]
    with sdk(mesh) as client:
        expected = client.responses.create(model=MODEL, input="Survive", **LONG)
        again = by_number(client.responses.retrieve(response_id, stream=True))
    text = "".join(e.delta for e in whole if e.type == "response.output_text.delta")
    assert text == expected.output_text
    assert by_number(whole) == again
    assert [event.sequence_number for event in whole] == list(range(len(whole)))


def test_a_stream_whose_next_run_differs_ends_with_an_error(mesh: Mesh) -> None:
    with sdk(mesh) as client:
        with stream(client, **ENDLESS) as events:
            first = [next(events) for _ in range(16)]
            response_id = first[0].response.id
            mesh.running("batch")[0].kill()
            # The sim repeats itself: the output of the lost run is made another one.
            with sqlite3.connect(mesh.folder / "batches.db") as database:
                database.execute(
                    "UPDATE response_parts SET content = ? WHERE response_id = ? AND number = 0",
                    (b'["content","Other"]\n', response_id),
                )
            mesh.spawn("batch").wait_ready()
            with pytest.raises(openai.APIError, match="read the stream again") as restarted:
                list(events)
        assert restarted.value.code == "stream_restarted"
        with pytest.raises(openai.BadRequestError, match="the next one differs") as refused:
            client.responses.retrieve(
                response_id, stream=True, starting_after=first[-1].sequence_number
            )
        assert (refused.value.code, refused.value.param) == (
            "stream_restarted",
            "starting_after",
        )
        with client.responses.retrieve(response_id, stream=True) as again:
            event = next(again)
        assert (event.type, event.sequence_number) == ("response.created", 10_000_000)
        client.responses.cancel(response_id)


def test_the_stream_helper_of_the_sdk_begins_and_resumes(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input="Hi", background=True, max_output_tokens=16, **IGNORING_EOS
    ) as events:
        response_id = next(iter(events)).response.id  # type: ignore[union-attr]
    with client.responses.stream(response_id=response_id, starting_after=5) as events:
        numbers = [event.sequence_number for event in events]
    assert numbers[0] == 6
    ended = client.responses.retrieve(response_id)
    assert (ended.status, numbers) == ("incomplete", list(range(6, numbers[-1] + 1)))


def test_a_cancelled_stream_ends(client: openai.OpenAI) -> None:
    with stream(client, **ENDLESS) as events:
        created = next(events)
        client.responses.cancel(created.response.id)
        *_, last = events
    assert (last.type, last.response.status) == ("response.failed", "cancelled")
    with stream(client, **ENDLESS) as events:
        client.responses.delete(next(events).response.id)
        with pytest.raises(openai.APIError, match="not stored"):
            list(events)


def test_what_is_no_stream_is_refused(mesh: Mesh, client: openai.OpenAI) -> None:
    plain = start(client).id
    foreground = client.responses.create(model=MODEL, input="Hi", max_output_tokens=4).id
    for response_id in (plain, foreground):
        with pytest.raises(openai.BadRequestError, match="'background' and 'stream'") as refused:
            client.responses.retrieve(response_id, stream=True)
        assert (refused.value.param, refused.value.code) == ("stream", "not_streamed")
    *_, last = stream(client)
    url = f"{mesh.url}/v1/responses/{last.response.id}"
    for query, param in (
        ("starting_after=1", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=10000000", "starting_after"),
        ("stream=maybe", "stream"),
        ("stream=true&include_obfuscation=true", "include_obfuscation"),
    ):
        response = mesh.http.get(f"{url}?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert mesh.http.get(f"{url[:-4]}0000?stream=true").status_code == 404
    head = mesh.http.head(f"{url}?stream=true")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": False}, "background"),
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
