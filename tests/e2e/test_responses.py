"""The Responses API at the door, with the OpenAI SDK: streams, tools, stored conversations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from tests.kit.processes import MODEL, Mesh, Service
from tests.kit.sdk import open_sdk_client
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": SUM, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": False},
]
REASONING_FORM = "<think>( [a-z]{2,5}){3}</think>( [a-z]{2,5}){2}"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    flags = ["--speedup=20", "--reasoning-parser=qwen3", "--context-length=32768"]
    with Mesh(tmp_path_factory.mktemp("mesh"), frontends=2, worker_flags=flags) as mesh:
        wait_for(
            lambda: all(len(mesh.known_instance_ids("frontend", url)) == 2 for url in mesh.urls),
            "the frontends discover each other",
        )
        yield mesh


@pytest.fixture
async def clients(mesh: Mesh) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """One for each frontend."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_sdk_client(mesh, url)) for url in mesh.urls]


@pytest.fixture
def client(clients: list[openai.AsyncOpenAI]) -> openai.AsyncOpenAI:
    return clients[0]


# Any, here and below: fields of a body, and JSON.
async def whole(client: openai.AsyncOpenAI, content: Any, **fields: Any) -> Response:
    """A response that is not streamed; checks it against the types of the SDK."""
    raw = await client.responses.with_raw_response.create(model=MODEL, input=content, **fields)
    return Response.model_validate_json(raw.text)


async def streamed(client: openai.AsyncOpenAI, content: Any, **fields: Any) -> list[Any]:
    """The events of a response, validated under the types of the SDK."""
    async with await client.responses.create(
        model=MODEL, input=content, stream=True, **fields
    ) as stream:
        raw = [event.model_dump(exclude_unset=True) async for event in stream]
    events = [EVENT.validate_python(event) for event in raw]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def output_of(response: Response) -> list[dict[str, Any]]:
    """The output without ids, which differ between responses."""
    items = []
    for item in response.output:
        value = item.model_dump()
        items.append({k: v for k, v in value.items() if k not in ("id", "call_id")})
    return items


def calls_of(response: Response) -> list[Any]:
    return [item for item in response.output if item.type == "function_call"]


async def chat_text(client: openai.AsyncOpenAI, messages: list[Any], **fields: Any) -> str:
    response = await client.chat.completions.create(model=MODEL, messages=messages, **fields)
    return response.choices[0].message.content or ""


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def test_a_response_has_the_text_of_the_chat_with_its_messages(
    client: openai.AsyncOpenAI,
) -> None:
    fields: Any = {"temperature": 0.7, "top_p": 0.9}
    response = await whole(
        client, "Hello", instructions="Be brief.", max_output_tokens=20, **fields
    )
    messages = [{"role": "system", "content": "Be brief."}, user("Hello")]
    assert response.output_text == await chat_text(
        client, messages, max_completion_tokens=20, **fields
    )
    assert response.usage is not None
    assert response.usage.total_tokens > response.usage.output_tokens > 0
    assert (response.model, response.object, response.temperature) == (MODEL, "response", 0.7)


async def test_a_stream_has_the_events_of_the_sdk_and_the_whole_response(
    client: openai.AsyncOpenAI,
) -> None:
    events = await streamed(client, "Hello")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    names = [event.type for event in events if not event.type.endswith(".delta")]
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert sum(event.type == "response.output_text.delta" for event in events) > 1
    assert events[-1].response.output_text == text
    assert output_of(events[-1].response) == output_of(await whole(client, "Hello"))
    assert await client.responses.retrieve(events[-1].response.id) == events[-1].response


async def test_the_stream_helper_of_the_sdk_assembles_the_response(
    client: openai.AsyncOpenAI,
) -> None:
    async with client.responses.stream(model=MODEL, input="Hello", tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        response = await stream.get_final_response()
    assert kinds[-1] == "response.completed"
    stored = await client.responses.retrieve(response.id)
    assert response.to_dict(exclude_unset=True).keys() >= stored.to_dict().keys()
    assert (response.output_text, response.usage) == (stored.output_text, stored.usage)


async def test_a_response_at_its_token_limit_is_incomplete(client: openai.AsyncOpenAI) -> None:
    events = await streamed(client, "Hello", max_output_tokens=3)
    response = events[-1].response
    assert (events[-1].type, response.status) == ("response.incomplete", "incomplete")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 3
    assert output_of(await whole(client, "Hello", max_output_tokens=3)) == output_of(response)


async def test_calls_are_items_whole_and_streamed_in_parallel_and_single(
    client: openai.AsyncOpenAI,
) -> None:
    counts = set()
    for number in range(6):
        content = f"Prompt {number}"
        events = await streamed(client, content, tools=TOOLS, tool_choice="required")
        response = events[-1].response
        assert output_of(response) == output_of(
            await whole(client, content, tools=TOOLS, tool_choice="required")
        )
        calls = calls_of(response)
        assert calls == response.output
        for call in calls:
            schema = SUM if call.name == "add" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call.arguments), schema)
            deltas = [
                event.delta
                for event in events
                if event.type == "response.function_call_arguments.delta"
                and event.item_id == call.id
            ]
            assert "".join(deltas) == call.arguments
        assert len({call.call_id for call in calls}) == len(calls)
        counts.add(len(calls))
        single = await whole(
            client, content, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        )
        assert len(calls_of(single)) == 1
    assert max(counts) > 1
    named = await whole(client, "Go", tools=TOOLS, tool_choice={"type": "function", "name": "now"})
    assert [call.name for call in calls_of(named)] == ["now"]
    assert not calls_of(await whole(client, "Prompt 1", tools=TOOLS, tool_choice="none"))


async def test_a_json_schema_is_enforced_and_parsed_by_the_sdk(client: openai.AsyncOpenAI) -> None:
    class Sum(BaseModel):
        a: int
        b: int

    response = await client.responses.parse(model=MODEL, input="Go", text_format=Sum)
    assert isinstance(response.output_parsed, Sum)
    any_object = await whole(client, "Go", text={"format": {"type": "json_object"}})
    assert isinstance(json.loads(any_object.output_text), dict)


async def test_input_tokens_are_those_of_the_response(client: openai.AsyncOpenAI) -> None:
    first = await whole(client, "Hello", max_output_tokens=8)
    for fields in (
        {"input": "Hello"},
        {"input": "Hello", "instructions": "Be brief.", "tools": TOOLS},
        {"input": "Again", "previous_response_id": first.id},
    ):
        counted = await client.responses.input_tokens.count(model=MODEL, **fields)
        assert counted.object == "response.input_tokens"
        content = fields.pop("input")
        response = await whole(client, content, max_output_tokens=1, **fields)
        assert response.usage is not None
        assert counted.input_tokens == response.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.input_tokens.count(model=MODEL, input=[], extra_body={"top": 1})
    assert refused.value.param == "top"


async def test_reasoning_is_an_item_before_the_message(client: openai.AsyncOpenAI) -> None:
    fields: Any = {"extra_body": {"nvext": {"guided_regex": REASONING_FORM}}}
    events = await streamed(client, "Hello", **fields)
    reasoning, message = events[-1].response.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert len(reasoning.content[0].text.split()) == 3
    assert len(message.content[0].text.split()) == 2
    pieces = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    assert "".join(pieces) == reasoning.content[0].text
    response = await whole(client, "Hello", **fields)
    assert output_of(response) == output_of(events[-1].response)
    items = [user("Hello"), *(item.model_dump(exclude_unset=True) for item in response.output)]
    again = await whole(client, [*items, user("Again")])
    past = {
        "role": "assistant",
        "content": message.content[0].text,
        "reasoning_content": reasoning.content[0].text,
    }
    messages = [user("Hello"), past, user("Again")]
    assert again.output_text == await chat_text(client, messages)


async def test_a_conversation_continues_at_another_frontend(
    clients: list[openai.AsyncOpenAI],
) -> None:
    """Each turn goes to the other frontend, and equals the chat with the same messages."""
    messages: list[Any] = []
    previous: Any = openai.omit
    for turn in range(4):
        client = clients[turn % 2]
        messages.append(user(f"Turn {turn}"))
        response = await whole(
            client, f"Turn {turn}", previous_response_id=previous, instructions=f"Rule {turn}."
        )
        # Instructions of earlier responses do not count.
        rules = {"role": "system", "content": f"Rule {turn}."}
        assert response.output_text == await chat_text(client, [rules, *messages])
        messages.append({"role": "assistant", "content": response.output_text})
        previous = response.id
    for client in clients:
        assert (await client.responses.retrieve(response.id)) == response
        items = [item async for item in client.responses.input_items.list(response.id, limit=3)]
        texts = [item.content[0].text for item in items if item.type == "message"]  # type: ignore[union-attr]
        assert texts[::-1] == [message["content"] for message in messages[:-1]]


async def test_an_agent_returns_results_of_calls_to_a_stored_response(
    clients: list[openai.AsyncOpenAI],
) -> None:
    first = await whole(clients[0], "Add.", tools=TOOLS, tool_choice="required")
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        for call in calls_of(first)
    ]
    events = await streamed(
        clients[1], results, previous_response_id=first.id, tools=TOOLS, tool_choice="none"
    )
    history = [user("Add."), *(item.model_dump(exclude_unset=True) for item in first.output)]
    references = [user("Add."), *({"type": "item_reference", "id": i.id} for i in first.output)]
    for items in (history, references):
        stateless = await whole(
            clients[1], [*items, *results], tools=TOOLS, tool_choice="none", store=False
        )
        assert stateless.output_text == events[-1].response.output_text
    other = await whole(
        clients[0],
        [{**one, "output": "5"} for one in results],
        previous_response_id=first.id,
        tools=TOOLS,
        tool_choice="none",
    )
    assert other.output_text != events[-1].response.output_text


async def test_a_deleted_response_is_gone_at_every_frontend(
    clients: list[openai.AsyncOpenAI],
) -> None:
    for owner, deleter in ((0, 0), (0, 1)):
        response = await whole(clients[owner], "Hello", max_output_tokens=2)
        await clients[deleter].responses.delete(response.id)
        for client in clients:
            with pytest.raises(openai.NotFoundError, match="deleted"):
                await client.responses.retrieve(response.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.delete(response.id)
            with pytest.raises(openai.BadRequestError) as raised:
                await whole(client, "Hi", previous_response_id=response.id)
            assert raised.value.param == "previous_response_id"
            assert raised.value.code == "previous_response_not_found"


async def test_what_ran_with_its_client_can_neither_be_streamed_again_nor_cancelled(
    clients: list[openai.AsyncOpenAI],
) -> None:
    response = await whole(clients[0], "Hello", max_output_tokens=2)
    for client in clients:
        with pytest.raises(openai.BadRequestError, match="'background' and 'stream'") as raised:
            await client.responses.retrieve(response.id, stream=True)
        assert (raised.value.param, raised.value.code) == ("stream", "not_streamed")
        with pytest.raises(openai.BadRequestError, match="did not run in the background"):
            await client.responses.cancel(response.id)


async def test_a_response_with_store_false_cannot_be_continued(client: openai.AsyncOpenAI) -> None:
    response = await whole(client, "Hello", store=False, max_output_tokens=2)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        await client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        await whole(client, "Hi", previous_response_id=response.id)


def spawn_frontend(mesh: Mesh, *flags: str) -> Service:
    """One more frontend, which the others know."""
    service = mesh.spawn("frontend", *flags).wait_ready()
    wait_for(
        lambda: service.instance_id in mesh.known_instance_ids("frontend"),
        "the first frontend knows the new one",
    )
    wait_for(mesh.is_complete, "the new frontend uses the router and all workers")
    return service


async def test_responses_expire_and_end_with_their_frontend(mesh: Mesh) -> None:
    other = spawn_frontend(mesh, "--response-ttl-s=1.5")
    async with open_sdk_client(mesh, other.addresses["http"]) as client:
        first = await whole(client, "Hello", max_output_tokens=2)
        wait_for(lambda: status(mesh, first.id) == 404, "the response expires")
        second = await whole(client, "Hello", max_output_tokens=2)
    assert status(mesh, second.id) == 200
    other.kill()
    wait_for(lambda: status(mesh, second.id) == 404, "the response is lost")
    error = get(mesh, second.id).json()["error"]
    assert "has left" in error["message"]
    assert (error["param"], error["code"]) == ("response_id", "not_found")


def get(mesh: Mesh, response_id: str) -> Any:
    return mesh.http.get(f"{mesh.url}/v1/responses/{response_id}", timeout=WAIT_S)


def status(mesh: Mesh, response_id: str) -> int:
    code: int = get(mesh, response_id).status_code
    return code


async def test_a_frontend_without_a_store_refuses_what_needs_one(mesh: Mesh) -> None:
    other = spawn_frontend(mesh, "--response-store-mb=0")
    async with open_sdk_client(mesh, other.addresses["http"]) as client:
        response = await whole(client, "Hello", max_output_tokens=2)
        assert (response.model_extra or {})["store"] is False
        for fields in ({"store": True}, {"previous_response_id": response.id}):
            with pytest.raises(openai.BadRequestError, match="response-store-mb") as raised:
                await whole(client, "Hello", **fields)
            assert raised.value.param in fields
        with pytest.raises(openai.NotFoundError, match="response-store-mb"):
            await client.responses.retrieve(response.id)
    other.kill()


async def test_a_stream_without_a_worker_ends_with_response_failed(
    start: Callable[..., AbstractContextManager[Mesh]],
) -> None:
    shape: Any = {"workers": 1, "worker_flags": ["--speedup=1"]}
    with start(**shape, frontend_flags=["--worker-wait-s=0"]) as mesh:
        async with open_sdk_client(mesh) as client:
            events = []
            async with await client.responses.create(
                model=MODEL, input="Hello", stream=True, extra_body={"nvext": {"ignore_eos": True}}
            ) as stream:
                async for event in stream:
                    events.append(event)
                    if len(events) == 10:
                        mesh.workers[0].kill()
            last = EVENT.validate_python(events[-1].model_dump(exclude_unset=True))
            deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
            assert (last.type, last.response.status) == ("response.failed", "failed")
            assert last.response.error.code == "server_error"
            assert last.response.output_text == "".join(deltas)
            assert status(mesh, last.response.id) == 404


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "invalid_value"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "context_length_exceeded"),
        ({"input": "word " * 10**5}, "input", "context_length_exceeded"),
        ({"tools": [{**TOOLS[0], "parameters": {"not": {}}}]}, "tools[0].parameters", None),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
         "text.format.schema", None),
    ],
)  # fmt: skip
def test_an_unusable_body_is_refused_by_name(
    mesh: Mesh, fields: dict[str, Any], param: str, code: str | None
) -> None:
    body = {"model": MODEL, "input": "Hello", **fields}
    response = mesh.http.post(f"{mesh.url}/v1/responses", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert code is None or error["code"] == code


def test_a_response_explains_its_placement(mesh: Mesh) -> None:
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 2}
    response = mesh.http.post(
        f"{mesh.url}/v1/responses", json=body, headers={"x-request-id": "explained"}
    )
    line = mesh.request_line("explained")
    assert (line["endpoint"], line["model"], line["status"]) == ("responses", MODEL, 200)
    assert response.json()["id"].startswith(f"resp_{line['request_id']}")
    stub = router_pb2_grpc.RouterServiceStub(mesh.router.channel)
    request = router_pb2.ExplainRequest(request_id=response.json()["id"])
    assert stub.Explain(request, timeout=WAIT_S).candidates
