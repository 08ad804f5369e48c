"""Requests with `nvext` to a mesh, and what its router, log and traces have of them."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from meshctl.commands.demo import ReceivedSpan, SpanReceiver
from tests.kit.oracle import Oracle
from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import WAIT_S, wait_for

ORACLE = Oracle()
BLOCK = 16
NUMBERS = count(1)

# Any: JSON.
Json = dict[str, Any]


def unique_prompt(blocks: int = 4) -> list[int]:
    """Token ids that share no block with another prompt."""
    number = next(NUMBERS)
    return [300 + (number * 7919 + place * place) % 2000 for place in range(blocks * BLOCK)]


def complete(
    mesh: Mesh, prompt: list[int] | None = None, *, alias: str = "nvext", **extensions: Any
) -> tuple[Json, str]:
    """A completion, and the worker that served it."""
    name = f"request-{next(NUMBERS)}"
    fields: Json = {alias: extensions}
    response = mesh.post_completion(name, prompt or unique_prompt(), **fields)
    assert response.status_code == 200, response.text
    body: Json = response.json()
    return body, mesh.request_line(name)["workers"][-1]


def refusal(mesh: Mesh, status: int = 400, **fields: Any) -> Json:
    response = mesh.post_completion(f"refused-{next(NUMBERS)}", unique_prompt(), **fields)
    assert response.status_code == status, response.text
    error: Json = response.json()["error"]
    return error


def explain(mesh: Mesh, response_id: str) -> router_pb2.ExplainResponse:
    stub = router_pb2_grpc.RouterServiceStub(mesh.router.channel)
    return stub.Explain(router_pb2.ExplainRequest(request_id=response_id), timeout=WAIT_S)


def terms(mesh: Mesh, response_id: str, worker: str) -> dict[str, float]:
    """The parts of the cost of a worker in a decision."""
    (row,) = [
        one for one in explain(mesh, response_id).candidates if one.worker.worker_id == int(worker)
    ]
    return dict(row.terms)


def request_span(spans: tuple[SpanReceiver, str], client_id: str) -> ReceivedSpan:
    """Waits for the frontend's span of a request."""

    def found() -> list[ReceivedSpan]:
        return [s for s in spans[0].received if s.attribute("x_request_id") == client_id]

    return wait_for(found, f"the span of {client_id} is exported")[0]


def ids(mesh: Mesh) -> list[str]:
    return [str(worker.instance_id) for worker in mesh.workers]


def chat_body(**fields: Any) -> Json:
    """A chat with a message of its own and eight tokens of output."""
    messages = [{"role": "user", "content": f"Prompt {next(NUMBERS)}"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "ignore_eos": True, **fields}


def post(mesh: Mesh, path: str, body: Json, client_id: str = "") -> Json:
    headers = {"x-request-id": client_id} if client_id else {}
    response = mesh.http.post(f"{mesh.url}/v1/{path}", json=body, headers=headers)
    assert response.status_code == 200, response.text
    value: Json = response.json()
    return value


def stream(mesh: Mesh, path: str, body: Json) -> tuple[list[str], list[Json]]:
    """The comments of a stream, and its chunks."""
    url = f"{mesh.url}/v1/{path}"
    with mesh.http.stream("POST", url, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    comments = [line.removeprefix(": ") for line in lines if line.startswith(": ")]
    return comments, [json.loads(one) for one in data[:-1]]


def worker_spans(spans: tuple[SpanReceiver, str], response_id: str) -> list[ReceivedSpan]:
    """Waits for the spans of workers for a request."""
    request_id = response_id.partition("-")[2]

    def found() -> list[ReceivedSpan]:
        return [
            span
            for span in spans[0].received
            if span.service == "worker" and span.attribute("request_id") == request_id
        ]

    return wait_for(found, f"the workers' spans of {request_id} are exported")
