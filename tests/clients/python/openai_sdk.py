"""The OpenAI SDK for Python."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
from cells import (
    HELLO,
    KEY,
    MAX_TOKENS,
    MODEL,
    URL,
    WEATHER_SCHEMA,
    Weather,
    chat_text,
    conversation,
    expect_equal,
    expect_vectors,
    expect_weather,
    first_with,
    openai_tool,
    run,
)

CLIENT = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
TOOLS: Any = [openai_tool()]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
# Of a batch of one line.
BATCH_S = 60.0
RESPONSES_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER_SCHEMA}


def chat() -> None:
    response = CLIENT.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=MAX_TOKENS)
    expect_equal(response.choices[0].message.content, chat_text(HELLO, max_tokens=MAX_TOKENS))
    assert response.usage is not None
    assert response.usage.completion_tokens


def streaming() -> None:
    chunks = list(
        CLIENT.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    expect_equal(text, chat_text(HELLO))
    assert chunks[-1].usage is not None


def tools() -> None:
    response = CLIENT.chat.completions.create(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=NAMED
    )
    (call,) = response.choices[0].message.tool_calls or ()
    expect_weather(call.function.name, call.function.arguments)


def tools_streamed() -> None:
    with CLIENT.chat.completions.stream(
        model=MODEL, messages=HELLO, tools=[openai_tool(strict=True)], tool_choice=NAMED
    ) as stream:
        deltas = [
            event.arguments_delta
            for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    expect_weather(call.function.name, call.function.arguments)
    expect_equal("".join(deltas), call.function.arguments)


def parallel_tools() -> None:
    def ask(prompt: str) -> list[Any]:
        response = CLIENT.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=True,
        )
        return response.choices[0].message.tool_calls or []

    calls = first_with(ask, lambda calls: len(calls) > 1)
    for call in calls:
        expect_weather(call.function.name, call.function.arguments)
    assert len({call.id for call in calls}) == len(calls)


def json_schema() -> None:
    response = CLIENT.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Weather)
    assert isinstance(response.choices[0].message.parsed, Weather)


def tool_results() -> None:
    response = CLIENT.chat.completions.create(model=MODEL, messages=conversation())
    expect_equal(response.choices[0].message.content, chat_text(conversation()))
    assert chat_text(conversation("Rain.")) != chat_text(conversation())


def embeddings() -> None:
    texts = ["one", "two"]
    data = CLIENT.embeddings.create(model=MODEL, input=texts).data
    expect_vectors([one.embedding for one in data], texts)


def responses() -> None:
    whole = CLIENT.responses.create(model=MODEL, input="Hello")
    expect_equal(whole.output_text, chat_text(HELLO))
    with CLIENT.responses.stream(model=MODEL, input="Hello") as stream:
        deltas = [one.delta for one in stream if one.type == "response.output_text.delta"]
        expect_equal("".join(deltas), whole.output_text)
        expect_equal(stream.get_final_response().output_text, whole.output_text)
    again = CLIENT.responses.create(model=MODEL, input="More", previous_response_id=whole.id)
    turns = [*HELLO, {"role": "assistant", "content": whole.output_text}]
    expect_equal(again.output_text, chat_text([*turns, {"role": "user", "content": "More"}]))
    called = CLIENT.responses.create(
        model=MODEL, input="Hello", tools=[RESPONSES_TOOL], tool_choice="required"
    )
    for item in called.output:
        assert item.type == "function_call"
        expect_weather(item.name, item.arguments)
    assert CLIENT.responses.parse(model=MODEL, input="Hello", text_format=Weather).output_parsed


def websocket() -> None:
    turns: list[Any] = []
    previous: str | None = None
    with CLIENT.responses.connect() as connection:
        for text in ("Hello", "More"):
            turns.append({"role": "user", "content": text})
            connection.response.create(
                model=MODEL, input=text, store=False, previous_response_id=previous
            )
            for event in connection:
                if event.type == "response.completed":
                    break
            assert event.type == "response.completed"
            expect_equal(event.response.output_text, chat_text(turns))
            turns.append({"role": "assistant", "content": event.response.output_text})
            previous = event.response.id


def background() -> None:
    response = CLIENT.responses.create(model=MODEL, input="Hello", background=True)
    assert response.status == "queued"
    ends_at = time.monotonic() + BATCH_S
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < ends_at, response.status
        # Sleep: clients of such responses poll.
        time.sleep(0.1)
        response = CLIENT.responses.retrieve(response.id)
    expect_equal(response.status, "completed")
    expect_equal(response.output_text, chat_text(HELLO))
    expect_equal(CLIENT.responses.cancel(response.id).status, "completed")


def background_stream() -> None:
    with CLIENT.responses.create(
        model=MODEL, input="Hello", background=True, stream=True
    ) as stream:
        first = [next(stream) for _ in range(8)]
    assert first[0].type == "response.created"
    response_id, last = first[0].response.id, first[-1].sequence_number
    rest = list(CLIENT.responses.retrieve(response_id, stream=True, starting_after=last))
    expect_equal(
        [one.sequence_number for one in [*first, *rest]], list(range(last + len(rest) + 1))
    )
    deltas = [one.delta for one in [*first, *rest] if one.type == "response.output_text.delta"]
    expect_equal("".join(deltas), chat_text(HELLO))
    with CLIENT.responses.stream(response_id=response_id, starting_after=last) as resumed:
        expect_equal(next(iter(resumed)).sequence_number, last + 1)
        expect_equal(resumed.get_final_response().output_text, chat_text(HELLO))


def conversations() -> None:
    named = CLIENT.conversations.create(metadata={"topic": "demo"})
    turns: list[Any] = []
    for text in ("Hello", "More"):
        turns.append({"role": "user", "content": text})
        response = CLIENT.responses.create(model=MODEL, input=text, conversation=named.id)
        expect_equal(response.output_text, chat_text(turns))
        turns.append({"role": "assistant", "content": response.output_text})
    items = list(CLIENT.conversations.items.list(named.id, order="asc"))
    texts = [item.content[0].text for item in items if item.type == "message"]
    expect_equal(texts, [turn["content"] for turn in turns])
    assert CLIENT.conversations.delete(named.id).deleted


def batches() -> None:
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": HELLO, "max_tokens": MAX_TOKENS},
    }
    content = json.dumps(line).encode()
    file = CLIENT.files.create(file=("lines.jsonl", content), purpose="batch")
    assert file.id in [one.id for one in CLIENT.files.list(purpose="batch")]
    batch = CLIENT.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    ends_at = time.monotonic() + BATCH_S
    while batch.status != "completed":
        assert time.monotonic() < ends_at, batch.status
        # Sleep: clients of batches poll.
        time.sleep(0.1)
        batch = CLIENT.batches.retrieve(batch.id)
    assert batch.id in [one.id for one in CLIENT.batches.list()]
    assert batch.output_file_id is not None
    row = json.loads(CLIENT.files.content(batch.output_file_id).text)
    expect_equal(row["custom_id"], "one")
    text = row["response"]["body"]["choices"][0]["message"]["content"]
    expect_equal(text, chat_text(HELLO, max_tokens=MAX_TOKENS))
    assert CLIENT.files.delete(file.id).deleted


run(
    "openai (Python)",
    chat=chat,
    streaming=streaming,
    tools=tools,
    tools_streamed=tools_streamed,
    parallel_tools=parallel_tools,
    json_schema=json_schema,
    tool_results=tool_results,
    embeddings=embeddings,
    responses=responses,
    websocket=websocket,
    background=background,
    background_stream=background_stream,
    conversations=conversations,
    batches=batches,
)
