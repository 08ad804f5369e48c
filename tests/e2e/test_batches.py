"""Files and batches by OpenAI's SDK against a running mesh, with the death of its services."""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from common.api_keys import ApiKey, KeyDocument, Permission, Tenant, hash_of
from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh, mesh_fixture
from tests.kit.sdk import open_blocking_sdk_client
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

COMPLETIONS = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")

mesh = mesh_fixture(
    workers=1, batches=1, worker_flags=["--speedup=20"], batch_flags=["--batch-lines-max=2000"]
)


sdk = partial(open_blocking_sdk_client, max_retries=8)


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with sdk(mesh) as opened:
        yield opened


# Any: JSON.
Json = dict[str, Any]


def completion(prompt: str, max_tokens: int = 4, **more: Any) -> Json:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, **more}


def upload(client: openai.OpenAI, bodies: list[Json], url: str = COMPLETIONS) -> str:
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": url, "body": body}
        for n, body in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    return client.files.create(file=("lines.jsonl", io.BytesIO(content)), purpose="batch").id


def create(client: openai.OpenAI, file_id: str, url: Any = COMPLETIONS) -> Batch:
    return client.batches.create(
        input_file_id=file_id, endpoint=url, completion_window="24h", metadata={"job": "test"}
    )


def ended(client: openai.OpenAI, batch_id: str) -> Batch:
    """Waits for the end of a batch."""

    def read() -> Batch | None:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in ENDED else None

    found = wait_for(read, f"{batch_id} has ended", 4 * WAIT_S)
    assert found is not None
    return found


def rows(client: openai.OpenAI, file_id: str | None) -> list[Json]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_each_line_has_its_response_in_the_order_of_the_file(
    client: openai.OpenAI, oracle: Oracle
) -> None:
    prompts = [f"Tell me number {n}." for n in range(20)]
    batch = create(client, upload(client, [completion(prompt) for prompt in prompts]))
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"job": "test"})
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.error_file_id is None
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    found = rows(client, batch.output_file_id)
    assert [row["custom_id"] for row in found] == [f"line-{n}" for n in range(20)]
    for prompt, row in zip(prompts, found, strict=True):
        response = row["response"]
        assert (response["status_code"], row["error"]) == (200, None)
        expected = oracle.completion(prompt, 4)
        assert response["body"]["choices"][0]["text"] == expected.text
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert list(times) == sorted(time for time in times if time is not None)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
        ),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}),
        ("/v1/embeddings", {"input": ["Hi", "there"]}),
    ],
)
def test_lines_of_every_endpoint_have_responses(
    client: openai.OpenAI, url: str, body: Json
) -> None:
    batch = ended(client, create(client, upload(client, [{"model": MODEL, **body}], url), url).id)
    (row,) = rows(client, batch.output_file_id)
    assert row["response"]["status_code"] == 200
    assert row["response"]["body"]["model"] == MODEL


def test_a_line_that_fails_is_in_the_error_file(client: openai.OpenAI) -> None:
    bodies = [completion("a"), completion("b", max_tokens=-1), completion("c")]
    batch = ended(client, create(client, upload(client, bodies)).id)
    assert batch.status == "completed"
    assert [row["custom_id"] for row in rows(client, batch.output_file_id)] == ["line-0", "line-2"]
    (error,) = rows(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("line-1", 400)
    assert error["response"]["body"]["error"]["param"] == "max_tokens"


def test_an_invalid_file_fails_with_the_line_and_the_field(client: openai.OpenAI) -> None:
    file_id = upload(client, [completion("a"), completion("b", stream=True)])
    batch = ended(client, create(client, file_id).id)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.errors is not None
    assert batch.errors.data is not None
    (error,) = batch.errors.data
    assert (error.line, error.param, error.code) == (2, "body.stream", "unsupported_parameter")


def test_a_cancelled_batch_keeps_the_results_that_it_has(mesh: Mesh, client: openai.OpenAI) -> None:
    file_id = upload(client, [completion(f"{n}", 400, ignore_eos=True) for n in range(400)])
    batch = create(client, file_id)

    def has_results() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed > 0

    wait_for(has_results, "a line has a result")
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch.id)
    assert done.status == "cancelled"
    found = rows(client, done.output_file_id)
    assert done.request_counts is not None
    assert 0 < len(found) == done.request_counts.completed < 400
    wait_for(lambda: mesh.workers[0].open_slots() == 0, "no line of the batch is left")
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(create_ended(client))


def test_an_expired_batch_has_the_results_it_has_and_an_error_for_every_other_line(
    mesh: Mesh, client: openai.OpenAI
) -> None:
    lines = 300
    file_id = upload(client, [completion(f"{n}", 400, ignore_eos=True) for n in range(lines)])
    batch = create(client, file_id)
    _await_more(client, batch.id)
    with contextlib.closing(
        sqlite3.connect(mesh.folder / "batches.db", timeout=WAIT_S)
    ) as database:
        # The end of its 24 hours.
        database.execute("UPDATE batches SET expires_at = 1 WHERE id = ?", (batch.id,))
        database.commit()
    done = ended(client, batch.id)
    assert (done.status, done.cancelled_at, done.completed_at) == ("expired", None, None)
    assert done.expired_at is not None
    found, errors = rows(client, done.output_file_id), rows(client, done.error_file_id)
    assert {row["error"]["code"] for row in errors} == {"batch_expired"}
    ids = [row["custom_id"] for row in found]
    assert 0 < len(ids) < lines
    assert sorted([*ids, *(row["custom_id"] for row in errors)]) == sorted(
        f"line-{n}" for n in range(lines)
    )
    assert done.request_counts is not None
    counts = done.request_counts
    assert (counts.completed, counts.failed) == (len(found), len(errors))
    wait_for(lambda: mesh.workers[0].open_slots() == 0, "no line of the batch is left")


def create_ended(client: openai.OpenAI) -> str:
    return ended(client, create(client, upload(client, [completion("x")])).id).id


def test_files_are_listed_read_and_deleted(client: openai.OpenAI) -> None:
    file_id = upload(client, [completion("a")])
    assert file_id in [file.id for file in client.files.list(purpose="batch")]
    file = client.files.retrieve(file_id)
    assert (file.filename, file.purpose, file.status) == ("lines.jsonl", "batch", "processed")
    assert len(client.files.content(file_id).content) == file.bytes
    assert client.files.delete(file_id).deleted
    # Any: each returns another type.
    calls: list[Any] = [client.files.retrieve, client.files.delete, client.files.content]
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            call(file_id)


def test_bad_requests_are_refused_by_name(mesh: Mesh, client: openai.OpenAI) -> None:
    file_id = upload(client, [completion("a")])
    changes: list[tuple[Json, str]] = [
        ({"endpoint": "/v1/rerank"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"more": 1}, "more"),
    ]
    for change, param in changes:
        body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        response = mesh.http.post(f"{mesh.url}/v1/batches", json=body | change)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    missing = {"input_file_id": "file-0", "endpoint": COMPLETIONS, "completion_window": "24h"}
    assert mesh.http.post(f"{mesh.url}/v1/batches", json=missing).status_code == 404
    forms: list[tuple[Json, str | None]] = [
        ({"data": {"purpose": "fine-tune"}, "files": {"file": b"{}"}}, "purpose"),
        ({"data": {"purpose": "batch"}, "files": {"other": b"{}"}}, "other"),
        ({"data": {}, "files": {"file": b"{}"}}, "purpose"),
        ({"data": {"purpose": "batch"}, "files": {"file": b""}}, "file"),
        ({"json": {"purpose": "batch"}}, None),
    ]
    for form, field in forms:
        response = mesh.http.post(f"{mesh.url}/v1/files", **form)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_killed_services_neither_lose_nor_repeat_a_line(mesh: Mesh, client: openai.OpenAI) -> None:
    lines = 600
    file_id = upload(client, [completion(f"Line {n}", 24, ignore_eos=True) for n in range(lines)])
    batch = create(client, file_id)
    for kind in ("batch", "worker", "router", "batch"):
        _await_more(client, batch.id)
        mesh.running(kind)[0].kill()
        mesh.spawn(kind).wait_ready()
    done = ended(client, batch.id)
    assert done.status == "completed"
    found = rows(client, done.output_file_id)
    assert [row["custom_id"] for row in found] == [f"line-{n}" for n in range(lines)]
    assert done.error_file_id is None


def _await_more(client: openai.OpenAI, batch_id: str) -> None:
    before = _completed(client, batch_id)
    wait_for(lambda: _completed(client, batch_id) > before, "more lines have results")


def _completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


def test_an_id_that_no_text_of_a_database_can_be_is_not_found(mesh: Mesh) -> None:
    for path in ("files/%00", "files/%00/content", "batches/%00", "batches/%FF"):
        assert mesh.http.get(f"{mesh.url}/v1/{path}").status_code == 404
    response = mesh.http.get(f"{mesh.url}/v1/files?purpose=%00")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "purpose")


def test_without_a_batch_service_the_routes_state_the_reason(mesh: Mesh) -> None:
    for service in mesh.running("batch"):
        service.kill()

    def refusal() -> httpx.Response | None:
        response = mesh.http.get(f"{mesh.url}/v1/batches")
        return response if response.status_code == 503 else None

    response = wait_for(refusal, "the frontend sees that the service has left")
    assert response is not None
    # First it does not respond, then it is gone: the end of its lease decides.
    assert "batch service" in response.json()["error"]["message"]
    assert "127.0.0.1" not in response.text
    mesh.spawn("batch").wait_ready()
    wait_for(
        lambda: mesh.http.get(f"{mesh.url}/v1/batches").status_code == 200, "batches are served"
    )


def test_files_and_batches_belong_to_a_tenant_whose_key_runs_the_lines(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    texts = {name: f"sk-{name}" for name in ("acme", "bravo")}
    created = datetime.now(UTC)
    keys.write_text(
        KeyDocument(
            tenants={
                name: Tenant(
                    keys=(
                        ApiKey(
                            id=f"key-{name}",
                            sha256=hash_of(text.encode()),
                            scopes=frozenset({Permission.INFER}),
                            created=created,
                        ),
                    )
                )
                for name, text in texts.items()
            }
        ).model_dump_json()
    )
    (tmp_path / "mesh").mkdir()
    with (
        Mesh(
            tmp_path / "mesh",
            workers=1,
            batches=1,
            worker_flags=["--speedup=20"],
        ) as mesh,
    ):
        open_to_all = mesh.frontend
        mesh.spawn("frontend", f"--api-keys={keys}").wait_ready().wait_routable()
        open_to_all.kill()
        with sdk(mesh, key=texts["acme"]) as acme, sdk(mesh, key=texts["bravo"]) as bravo:
            check_tenants(mesh, acme, bravo)
            check_stored(mesh, acme, bravo)


def test_lines_wait_for_a_router_however_often_their_time_ends(tmp_path: Path) -> None:
    with (
        Mesh(
            tmp_path,
            workers=1,
            batches=1,
            worker_flags=["--speedup=20"],
            frontend_flags=["--request-timeout-s=1"],
            batch_flags=["--line-attempts=1", "--metrics-port=0"],
        ) as mesh,
        sdk(mesh) as client,
    ):
        mesh.router.kill()
        batch = create(client, upload(client, [completion("a")]))
        (service,) = mesh.running("batch")
        retried = 'kvmesh_batch_lines_total{outcome="retried"}'
        wait_for(lambda: service.metric(retried) >= 2, "the time of the line has ended twice")
        mesh.spawn("router").wait_ready()
        batch = ended(client, batch.id)
        assert (batch.status, len(rows(client, batch.output_file_id))) == ("completed", 1)


def check_stored(mesh: Mesh, acme: openai.OpenAI, bravo: openai.OpenAI) -> None:
    """Stored responses and conversations belong to a tenant, whose key runs those in the
    background."""
    conversation = acme.conversations.create()
    queued = acme.responses.create(
        model=MODEL,
        input="Hi",
        max_output_tokens=16,
        background=True,
        conversation=conversation.id,
        extra_headers={"x-request-id": "in-background"},
    )

    def has_ended() -> bool:
        return acme.responses.retrieve(queued.id).status in ("completed", "incomplete")

    wait_for(has_ended, "the response has ended")

    def run_line() -> Json | None:
        lines = mesh.request_lines("in-background")
        return next((line for line in lines if line.get("completion_tokens")), None)

    line = wait_for(run_line, "the run is in the log")
    assert line is not None
    assert (line["tenant"], line["key_id"]) == ("acme", "key-acme")
    # Any: each returns another type.
    calls: list[tuple[Any, str]] = [
        (bravo.responses.retrieve, queued.id),
        (bravo.responses.cancel, queued.id),
        (bravo.responses.delete, queued.id),
        (bravo.conversations.retrieve, conversation.id),
        (bravo.conversations.delete, conversation.id),
        (bravo.conversations.items.list, conversation.id),
    ]
    for call, own_id in calls:
        with pytest.raises(openai.NotFoundError):
            call(own_id)
    with pytest.raises(openai.NotFoundError):
        bravo.responses.create(model=MODEL, input="Hi", conversation=conversation.id)
    with pytest.raises(openai.BadRequestError):
        bravo.responses.create(model=MODEL, input="Hi", previous_response_id=queued.id)
    assert len(acme.conversations.items.list(conversation.id).data) == 2


def check_tenants(mesh: Mesh, acme: openai.OpenAI, bravo: openai.OpenAI) -> None:
    file_id = upload(acme, [completion("a")])
    batch = ended(acme, create(acme, file_id).id)
    assert batch.status == "completed"
    (row,) = rows(acme, batch.output_file_id)
    (line,) = wait_for(lambda: mesh.request_lines(row["id"]), "the line is in the log")
    assert (line["tenant"], line["key_id"]) == ("acme", "key-acme")
    # Any: each returns another type.
    calls: list[Any] = [bravo.files.retrieve, bravo.files.content, bravo.files.delete]
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            call(file_id)
    with pytest.raises(openai.NotFoundError):
        bravo.batches.retrieve(batch.id)
    with pytest.raises(openai.NotFoundError):
        create(bravo, file_id)
    assert (bravo.files.list().data, bravo.batches.list().data) == ([], [])
    # Another scope than that of the lines.
    body = {"model": MODEL, "input": "Hi"}
    refused = ended(acme, create(acme, upload(acme, [body], "/v1/embeddings"), "/v1/embeddings").id)
    (error,) = rows(acme, refused.error_file_id)
    assert error["response"]["status_code"] == 403
