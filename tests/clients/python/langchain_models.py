"""LangChain's chat and embedding models."""

from __future__ import annotations

from typing import Any

from cells import (
    CALL,
    HELLO,
    KEY,
    MODEL,
    RESULT,
    URL,
    Weather,
    chat_text,
    conversation,
    expect_equal,
    expect_vectors,
    expect_weather,
    first_with,
    get_weather,
    run,
)
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

SETTINGS: dict[str, Any] = {"model": MODEL, "base_url": URL, "api_key": KEY, "max_retries": 0}
CHAT = ChatOpenAI(**SETTINGS)


def chat() -> None:
    expect_equal(CHAT.invoke("Hello").content, chat_text(HELLO))


def streaming() -> None:
    chunks = list(CHAT.stream("Hello", stream_usage=True))
    expect_equal("".join(str(one.content) for one in chunks), chat_text(HELLO))
    assert any(one.usage_metadata for one in chunks)


def tools() -> None:
    message = CHAT.bind_tools([get_weather], tool_choice="get_weather").invoke("Hello")
    (call,) = message.tool_calls
    expect_weather(call["name"], call["args"])


def tools_streamed() -> None:
    model = CHAT.bind_tools([get_weather], tool_choice="get_weather", strict=True)
    whole: Any = None
    for chunk in model.stream("Hello"):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    expect_weather(call["name"], call["args"])


def parallel_tools() -> None:
    model = CHAT.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=True)
    calls = first_with(lambda prompt: model.invoke(prompt).tool_calls, lambda calls: len(calls) > 1)
    for call in calls:
        expect_weather(call["name"], call["args"])


def json_schema() -> None:
    for method in ("json_schema", "function_calling"):
        model = CHAT.with_structured_output(Weather, method=method)
        assert isinstance(model.invoke("Hello"), Weather)


def tool_results() -> None:
    call: Any = {
        "id": CALL["id"],
        "name": CALL["name"],
        "args": {"city": "Bern", "unit": "celsius"},
        "type": "tool_call",
    }
    message = CHAT.invoke(
        [
            HumanMessage("What is the weather in Bern?"),
            AIMessage("", tool_calls=[call]),
            ToolMessage(RESULT, tool_call_id=CALL["id"]),
        ]
    )
    expect_equal(message.content, chat_text(conversation()))


def embeddings() -> None:
    model = OpenAIEmbeddings(**SETTINGS, check_embedding_ctx_length=False)
    expect_vectors(model.embed_documents(["one", "two"]), ["one", "two"])


def responses() -> None:
    model = ChatOpenAI(**SETTINGS, use_responses_api=True)
    expect_equal(model.invoke("Hello").text, chat_text(HELLO))
    expect_equal("".join(one.text for one in model.stream("Hello")), chat_text(HELLO))
    calls = model.bind_tools([get_weather], tool_choice="any").invoke("Hello").tool_calls
    assert calls
    for call in calls:
        expect_weather(call["name"], call["args"])


run(
    "LangChain",
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
