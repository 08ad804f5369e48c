"""The Anthropic SDK for Python, at /v1/messages."""

from __future__ import annotations

from typing import Any

import anthropic
from cells import (
    BASE_URL,
    CALL,
    HELLO,
    KEY,
    MAX_TOKENS,
    MODEL,
    RESULT,
    WEATHER_SCHEMA,
    chat_text,
    conversation,
    expect_equal,
    expect_weather,
    first_with,
    run,
)

CLIENT = anthropic.Anthropic(base_url=BASE_URL, api_key=KEY, max_retries=0)
TOOLS: Any = [
    {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER_SCHEMA}
]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def calls_of(message: Any) -> list[Any]:
    return [block for block in message.content if block.type == "tool_use"]


def ask(prompt: str, **fields: Any) -> Any:
    turns: Any = [{"role": "user", "content": prompt}]
    return CLIENT.messages.create(model=MODEL, max_tokens=400, messages=turns, **fields)


def chat() -> None:
    message = CLIENT.messages.create(model=MODEL, max_tokens=MAX_TOKENS, messages=HELLO)
    expect_equal(text_of(message), chat_text(HELLO, max_tokens=MAX_TOKENS))
    assert message.stop_reason in ("end_turn", "max_tokens")
    counted = CLIENT.messages.count_tokens(model=MODEL, messages=HELLO)
    expect_equal(counted.input_tokens, message.usage.input_tokens)


def streaming() -> None:
    with CLIENT.messages.stream(model=MODEL, max_tokens=MAX_TOKENS, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        expect_equal(text_of(stream.get_final_message()), text)
    expect_equal(text, chat_text(HELLO, max_tokens=MAX_TOKENS))


def tools() -> None:
    message = ask("Hello", tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"})
    (call,) = calls_of(message)
    expect_weather(call.name, call.input)
    expect_equal(message.stop_reason, "tool_use")


def tools_streamed() -> None:
    with CLIENT.messages.stream(
        model=MODEL,
        max_tokens=400,
        messages=HELLO,
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "get_weather"},
    ) as stream:
        (call,) = calls_of(stream.get_final_message())
    expect_weather(call.name, call.input)


def parallel_tools() -> None:
    calls = first_with(
        lambda prompt: calls_of(ask(prompt, tools=TOOLS, tool_choice={"type": "any"})),
        lambda calls: len(calls) > 1,
    )
    for call in calls:
        expect_weather(call.name, call.input)


def tool_results() -> None:
    use = {
        "type": "tool_use",
        "id": CALL["id"],
        "name": CALL["name"],
        "input": {"city": "Bern", "unit": "celsius"},
    }
    result = {"type": "tool_result", "tool_use_id": CALL["id"], "content": RESULT}
    turns: Any = [
        {"role": "user", "content": "What is the weather in Bern?"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    message = CLIENT.messages.create(
        model=MODEL,
        max_tokens=MAX_TOKENS,
        messages=turns,
        tools=TOOLS,
        tool_choice={"type": "none"},
    )
    expect_equal(text_of(message), chat_text(conversation(), max_tokens=MAX_TOKENS))


run(
    "Anthropic SDK",
    messages_chat=chat,
    messages_streaming=streaming,
    messages_tools=tools,
    messages_tools_streamed=tools_streamed,
    messages_parallel_tools=parallel_tools,
    messages_tool_results=tool_results,
)
