"""LiteLLM's SDK with the provider `openai`."""

from __future__ import annotations

from typing import Any

import litellm
from cells import (
    HELLO,
    KEY,
    MODEL,
    URL,
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

SETTINGS: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def ask(messages: list[Any], **fields: Any) -> Any:
    return litellm.completion(messages=messages, **SETTINGS, **fields)


def chat() -> None:
    expect_equal(ask(HELLO).choices[0].message.content, chat_text(HELLO))


def streaming() -> None:
    chunks = list(ask(HELLO, stream=True))
    text = "".join(one.choices[0].delta.content or "" for one in chunks)
    expect_equal(text, chat_text(HELLO))


def tools() -> None:
    message = ask(HELLO, tools=[openai_tool()], tool_choice=NAMED).choices[0].message
    (call,) = message.tool_calls
    expect_weather(call.function.name, call.function.arguments)


def tools_streamed() -> None:
    chunks = list(ask(HELLO, tools=[openai_tool()], tool_choice=NAMED, stream=True))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    expect_weather(call.function.name, call.function.arguments)


def parallel_tools() -> None:
    def calls(prompt: str) -> list[Any]:
        turns = [{"role": "user", "content": prompt}]
        response = ask(turns, tools=[openai_tool()], tool_choice="required")
        return response.choices[0].message.tool_calls

    for call in first_with(calls, lambda found: len(found) > 1):
        expect_weather(call.function.name, call.function.arguments)


def json_schema() -> None:
    message = ask(HELLO, response_format=Weather).choices[0].message
    Weather.model_validate_json(message.content)


def tool_results() -> None:
    expect_equal(ask(conversation()).choices[0].message.content, chat_text(conversation()))


def embeddings() -> None:
    data = litellm.embedding(input=["one", "two"], **SETTINGS).data
    expect_vectors([one["embedding"] for one in data], ["one", "two"])


def responses() -> None:
    response = litellm.responses(input="Hello", **SETTINGS)
    expect_equal(response.output[-1].content[0].text, chat_text(HELLO))


run(
    "LiteLLM",
    chat=chat,
    streaming=streaming,
    tools=tools,
    tools_streamed=tools_streamed,
    parallel_tools=parallel_tools,
    json_schema=json_schema,
    tool_results=tool_results,
    embeddings=embeddings,
    responses=responses,
)
