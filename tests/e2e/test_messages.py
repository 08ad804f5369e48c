"""The Anthropic Messages API at the door, through Anthropic's SDK."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic.types import Message, ToolUseBlock

from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import WAIT_S, wait_for
from worker_svc.engines.sim.config import SIM_MODEL_DIR

pytestmark = pytest.mark.slow

# A template that reads the setting and shows past reasoning, unlike the sim's own.
THINKING_TEMPLATE = (
    "{%- for tool in tools or [] %}{{- tool | tojson + '\n' }}{%- endfor %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['reasoning_content'] %}"
    "{{- '<think>' + message['reasoning_content'] + '</think>' }}"
    "{%- endif %}"
    "{{- message['content'] }}"
    "{%- for call in message['tool_calls'] or [] %}{{- call['function'] | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if reasoning_effort is defined %}{{- 'Effort: ' + reasoning_effort + '\n' }}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\n\n</think>\n\n' }}"
    "{%- endif %}"
)
THOUGHT = "<think>( [a-z]{2,5}){3}</think>( [a-z]{2,5}){2}"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": CITY, "now": EMPTY}
# Any, here and below: JSON.
TOOLS: Any = [
    {"name": name, "description": f"Calls {name}.", "input_schema": schema}
    for name, schema in SCHEMAS.items()
]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    model = shutil.copytree(SIM_MODEL_DIR, tmp_path_factory.mktemp("model") / MODEL)
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"chat_template": THINKING_TEMPLATE}))
    flags = ["--speedup=20", f"--model-path={model}", f"--model-name={MODEL}"]
    flags += ["--tool-call-parser=hermes", "--reasoning-parser=qwen3"]
    folder, frontend_flags = tmp_path_factory.mktemp("mesh"), ["--body-limit-mb=4"]
    with Mesh(folder, workers=1, worker_flags=flags, frontend_flags=frontend_flags) as mesh:
        yield mesh


def open_client(mesh: Mesh) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=mesh.url,
        api_key="none",
        max_retries=0,
        timeout=WAIT_S,
        http_client=anthropic.DefaultAsyncHttpxClient(trust_env=False),
    )


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with open_client(mesh) as client:
        yield client


def user(*content: object) -> list[Any]:
    """One turn: a text, or blocks."""
    is_text = isinstance(content[0], str)
    return [{"role": "user", "content": content[0] if is_text else list(content)}]


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


async def whole(client: anthropic.AsyncAnthropic, messages: list[Any], **fields: Any) -> Message:
    options = {"max_tokens": 400} | fields
    return await client.messages.create(model=MODEL, messages=messages, **options)


async def streamed(client: anthropic.AsyncAnthropic, messages: list[Any], **fields: Any) -> Message:
    options = {"max_tokens": 400} | fields
    async with client.messages.stream(model=MODEL, messages=messages, **options) as stream:
        return await stream.get_final_message()


async def both(client: anthropic.AsyncAnthropic, messages: list[Any], **fields: Any) -> Message:
    """The message, after a check that it is the same streamed."""
    message = await whole(client, messages, **fields)
    other = await streamed(client, messages, **fields)
    assert (message.role, message.model) == ("assistant", MODEL)
    assert message.id.startswith("msg_")
    assert without_ids(message) == without_ids(other)
    return message


def without_ids(message: Message) -> dict[str, Any]:
    """Content and end of a message, without ids and counts."""
    fields = message.to_dict()
    content: Any = fields["content"]
    blocks = [{name: value for name, value in one.items() if name != "id"} for one in content]
    return {"content": blocks, **{name: fields[name] for name in ("stop_reason", "stop_sequence")}}


def answer(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def calls(message: Message) -> list[ToolUseBlock]:
    return [block for block in message.content if block.type == "tool_use"]


CALL = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
CHAT_CALL = {"id": "toolu_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"messages": user("Hi")}, {"messages": user("Hi")}),
        (
            {"messages": user("Hi"), "system": [text("Be brief."), text("Be kind.")]},
            {"messages": [{"role": "system", "content": "Be brief.\nBe kind."}, *user("Hi")]},
        ),
        (
            {"messages": [*user("Hi"), *user(text("you"))], "max_tokens": 5},
            {"messages": user("Hi\nyou"), "max_tokens": 5},
        ),
        (
            {
                "messages": [
                    *user("Time?"),
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "A call.", "signature": "s"},
                            text("I look."),
                            CALL,
                        ],
                    },
                    *user(
                        {
                            "type": "tool_result",
                            "tool_use_id": "toolu_1",
                            "content": "no clock",
                            "is_error": True,
                        },
                        text("Again."),
                    ),
                ],
            },
            {
                "messages": [
                    *user("Time?"),
                    {
                        "role": "assistant",
                        "content": "I look.",
                        "reasoning_content": "A call.",
                        "tool_calls": [CHAT_CALL],
                    },
                    {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no clock"},
                    *user("Again."),
                ]
            },
        ),
    ],
    ids=["text", "system", "neighbours", "tool results"],
)
async def test_a_message_is_the_answer_to_the_chat_with_the_same_turns(
    mesh: Mesh, client: anthropic.AsyncAnthropic, fields: dict[str, Any], chat: dict[str, Any]
) -> None:
    message = await both(client, **fields)
    body = {"model": MODEL, "max_tokens": 400, **chat}
    (choice,) = mesh.http.post(f"{mesh.url}/v1/chat/completions", json=body).json()["choices"]
    assert answer(message) == choice["message"]["content"]
    reason = {"stop": "end_turn", "length": "max_tokens"}[choice["finish_reason"]]
    assert message.stop_reason == reason
    assert (message.stop_reason == "max_tokens") == ("max_tokens" in fields)


async def test_a_stop_sequence_ends_the_message_and_is_reported(
    client: anthropic.AsyncAnthropic,
) -> None:
    plain = await whole(client, user("Hello"))
    words = answer(plain).split()
    message = await both(client, user("Hello"), stop_sequences=["never", f" {words[2]}"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", f" {words[2]}")
    assert answer(message).split() == words[:2]
    assert message.usage.output_tokens < plain.usage.output_tokens


async def test_tool_calls_have_inputs_of_their_schema(client: anthropic.AsyncAnthropic) -> None:
    counts = set()
    for number in range(6):
        for choice in ("auto", "any"):
            fields: Any = {"tools": TOOLS, "tool_choice": {"type": choice}}
            message = await both(client, user(f"Prompt {number}"), **fields)
            found = calls(message)
            counts.add(len(found))
            assert message.stop_reason == ("tool_use" if found else "end_turn")
            assert found or choice == "auto"
            assert len({call.id for call in found}) == len(found)
            for call in found:
                jsonschema.validate(call.input, SCHEMAS[call.name])
            fields["tool_choice"]["disable_parallel_tool_use"] = True
            single = await both(client, user(f"Prompt {number}"), **fields)
            assert len(calls(single)) == min(1, len(found))
    assert counts >= {0, 1, 2}, "auto has answers without calls, and there are parallel calls"


async def test_a_tool_choice_of_one_tool_or_none_is_kept(client: anthropic.AsyncAnthropic) -> None:
    for name in SCHEMAS:
        choice: Any = {"type": "tool", "name": name}
        message = await both(client, user("Go"), tools=TOOLS, tool_choice=choice)
        assert [call.name for call in calls(message)] == [name]
    message = await both(client, user("Go"), tools=TOOLS, tool_choice={"type": "none"})
    assert without_ids(message) == without_ids(await whole(client, user("Go")))


async def test_an_agent_returns_results_until_there_is_an_answer(
    client: anthropic.AsyncAnthropic,
) -> None:
    messages = user("What is the weather?")
    for number in range(30):
        choice: Any = {"type": "auto" if number else "any"}
        message = await streamed(client, messages, tools=TOOLS, tool_choice=choice)
        if not calls(message):
            break
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [text("Sunny.")]}
            for call in calls(message)
        ]
        messages += user(*results, text("Go on."))
    assert answer(message)
    assert len(messages) > 1


async def test_thinking_is_a_block_of_its_own(client: anthropic.AsyncAnthropic) -> None:
    form = {"guided_regex": THOUGHT}
    for thinking in ({"type": "adaptive"}, {"type": "adaptive", "display": "omitted"}):
        fields: Any = {"thinking": thinking, "extra_body": form}
        message = await both(client, user("Why?"), **fields)
        thought, result = message.content
        assert (thought.type, result.type) == ("thinking", "text")
        assert thought.signature  # type: ignore[union-attr]
        words = 0 if "display" in thinking else 3
        assert len(thought.thinking.split()) == words  # type: ignore[union-attr]
        assert len(answer(message).split()) == 2
        turns = [*user("Why?"), {"role": "assistant", "content": message.content}, *user("And?")]
        count = await client.messages.count_tokens(model=MODEL, messages=turns)
        turns[1] = {"role": "assistant", "content": answer(message)}
        plain = await client.messages.count_tokens(model=MODEL, messages=turns)
        assert (count.input_tokens > plain.input_tokens) == bool(words)


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
async def test_thinking_and_effort_are_settings_of_the_chat_template(
    mesh: Mesh,
    client: anthropic.AsyncAnthropic,
    fields: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    message = await both(client, user("Why?"), **fields)
    body = {"model": MODEL, "messages": user("Why?"), "chat_template_kwargs": settings}
    (choice,) = mesh.http.post(f"{mesh.url}/v1/chat/completions", json=body).json()["choices"]
    assert answer(message) == choice["message"]["content"]
    assert answer(message) != answer(await whole(client, user("Why?")))


async def test_an_output_format_is_enforced(client: anthropic.AsyncAnthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": CITY}}
    message = await both(client, user("Where?"), output_config=config)
    jsonschema.validate(json.loads(answer(message)), CITY)


async def test_counted_tokens_are_the_input_tokens_of_the_message(
    client: anthropic.AsyncAnthropic,
) -> None:
    fresh = uuid.uuid4().hex  # not in a cache
    prompts: list[dict[str, Any]] = [
        {},
        {"system": f"{fresh} system"},
        {"tools": TOOLS},
        {"thinking": {"type": "disabled"}},
        {"messages": user(f"{fresh} A long prompt. " * 40)},
    ]
    for number, fields in enumerate(prompts):
        fields = {"messages": user(f"{number} {fresh}"), **fields}
        count = await client.messages.count_tokens(model=MODEL, **fields)
        usage = (await whole(client, **fields)).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count.input_tokens
        assert usage.cache_read_input_tokens == 0 or "tools" in fields
    usage = (await streamed(client, **fields)).usage
    assert usage.cache_read_input_tokens, "the blocks of the request before it"
    assert usage.input_tokens + usage.cache_read_input_tokens == count.input_tokens


def logged_params(mesh: Mesh, request_id: str) -> list[str]:
    """The invalid fields in the log lines of a request, which follow its response."""

    def params() -> list[str]:
        lines = mesh.frontend.events("request")
        return [one["param"] for one in lines if one["request_id"] == request_id]

    return wait_for(params, "the request is logged")


@pytest.mark.parametrize(
    ("fields", "error", "kind", "param"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error", "model"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
        (
            {"max_tokens": 10**6},
            anthropic.BadRequestError,
            "invalid_request_error",
            "max_tokens",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            anthropic.BadRequestError,
            "invalid_request_error",
            "thinking.budget_tokens",
        ),
        (
            {"tools": [TOOLS[0] | {"input_schema": {"type": "array"}}]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "tools[0].input_schema",
        ),
        (
            {"messages": user("a" * 3_000_000)},
            anthropic.BadRequestError,
            "invalid_request_error",
            "messages",
        ),
    ],
)
async def test_an_error_is_the_sdks_class_and_names_the_field(
    mesh: Mesh,
    client: anthropic.AsyncAnthropic,
    fields: dict[str, Any],
    error: type[anthropic.APIStatusError],
    kind: str,
    param: str,
) -> None:
    for stream in (False, True):
        options = {"model": MODEL, "max_tokens": 10, "messages": user("Hi"), **fields}
        with pytest.raises(error) as raised:
            await client.messages.create(stream=stream, **options)
        body: Any = raised.value.body
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert body["error"]["details"]["param"] == param
        assert body["request_id"] == raised.value.request_id
        assert logged_params(mesh, body["request_id"]) == [param]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("GET", "", b"", 405, "invalid_request_error"),
        ("POST", "/batches", b"", 404, "not_found_error"),
        ("POST", "/count_tokens", b"", 400, "invalid_request_error"),
        ("POST", "", b"[1", 400, "invalid_request_error"),
        ("POST", "", bytes(5 << 20), 413, "request_too_large"),
    ],
)
async def test_every_error_of_the_routes_has_the_envelope_of_the_api(
    mesh: Mesh, method: str, path: str, body: bytes, status: int, kind: str
) -> None:
    url, headers = f"{mesh.url}/v1/messages{path}", {"x-request-id": "mine"}
    response = mesh.http.request(method, url, content=body, headers=headers)
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert response.headers["request-id"] == error["request_id"] == "mine"


async def test_the_models_have_the_form_of_the_api_for_its_clients(
    mesh: Mesh, client: anthropic.AsyncAnthropic
) -> None:
    page = await client.models.list()
    assert ([model.id for model in page.data], page.has_more) == ([MODEL], False)
    (model,) = page.data
    assert (model.type, model.display_name, model.lifecycle) == ("model", MODEL, "active")
    assert (page.first_id, page.last_id) == (MODEL, MODEL)
    card = mesh.http.get(f"{mesh.url}/v1/models").json()["data"][0]
    assert model.max_input_tokens == card["max_model_len"]
    assert int(model.created_at.timestamp()) == card["created"]
    assert await client.models.retrieve(MODEL) == model
    assert (await client.models.list(after_id=MODEL)).data == []

    with pytest.raises(anthropic.NotFoundError) as raised:
        await client.models.retrieve("claude-none")
    body: Any = raised.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert body["request_id"] == raised.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="after_id"):
        await client.models.list(after_id="claude-none")
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        await client.models.list(limit=0)


async def test_messages_are_counted_and_logged_as_their_endpoint(
    mesh: Mesh, client: anthropic.AsyncAnthropic
) -> None:
    response = await client.messages.with_raw_response.create(
        model=MODEL,
        max_tokens=5,
        messages=user("Log"),
        extra_headers={"x-request-id": "logged"},
    )
    assert response.headers["request-id"] == "logged"
    line = mesh.request_line("logged")
    message = await response.parse()
    assert (line["endpoint"], line["status"]) == ("messages", 200)
    assert message.id == f"msg_{line['request_id']}"
    assert line["prompt_tokens"] == message.usage.input_tokens


@pytest.mark.parametrize("shape", [{"workers": 2}, {"workers": 0, "prefill": 1, "decode": 2}])
async def test_a_message_survives_its_worker_and_fails_as_an_event_without_any(
    start: Callable[..., AbstractContextManager[Mesh]], shape: dict[str, int]
) -> None:
    kind = "worker" if shape["workers"] else "decode"
    flags = ["--keep-alive-s=0.2", "--worker-wait-s=0.7"]
    long: dict[str, Any] = {
        "messages": user("Go"),
        "max_tokens": 150,
        "extra_body": {"guided_regex": "[a-z ]{500}"},
    }
    with start(**shape, worker_flags=["--speedup=3"], frontend_flags=flags) as mesh:
        async with open_client(mesh) as client:
            expected = await whole(client, **long)
            async with client.messages.stream(model=MODEL, **long) as stream:
                async for _ in stream.text_stream:
                    (busy,) = [worker for worker in mesh.of_kind(kind) if worker.open_slots()]
                    busy.kill()
                    break
                message = await stream.get_final_message()
            assert without_ids(message) == without_ids(expected)
            for worker in mesh.workers:
                worker.kill()
            wait_for(lambda: not mesh.known_instance_ids("worker"), "discovery reports the deaths")
            with pytest.raises(anthropic.APIStatusError) as raised:
                await streamed(client, **long)
            assert raised.value.type == "api_error"
        body = {"model": MODEL, "max_tokens": 5, "messages": user("Go"), "stream": True}
        response = mesh.http.post(f"{mesh.url}/v1/messages", json=body)
        events = [line for line in response.text.splitlines() if line.startswith("event:")]
        assert events[0] == "event: message_start"
        assert events[-1] == "event: error"
        assert set(events[1:-1]) == {"event: ping"}
