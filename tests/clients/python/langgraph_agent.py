"""A LangGraph agent with tools: it calls them until the model answers."""

from __future__ import annotations

from typing import Any

from cells import KEY, MODEL, RESULT, URL, Weather, expect_equal, first_with, get_weather, run
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, ToolMessage
from langchain_openai import ChatOpenAI

CHAT = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_retries=0)
AGENT: Any = create_agent(CHAT, [get_weather], system_prompt="Use the tools.")
CONFIG: Any = {"recursion_limit": 60}


def question(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def used_tools(messages: list[Any]) -> bool:
    return any(isinstance(one, ToolMessage) for one in messages)


def expect_finished(messages: list[Any]) -> None:
    results = [one.content for one in messages if isinstance(one, ToolMessage)]
    expect_equal(set(results), {RESULT})
    assert isinstance(messages[-1], AIMessage)
    assert messages[-1].content


def agent() -> None:
    messages = first_with(
        lambda prompt: AGENT.invoke(question(prompt), CONFIG)["messages"], used_tools
    )
    expect_finished(messages)


def streaming() -> None:
    def ask(prompt: str) -> list[Any]:
        found: list[Any] = []
        for update in AGENT.stream(question(prompt), CONFIG, stream_mode="updates"):
            for step in update.values():
                found += step["messages"]
        return found

    expect_finished(first_with(ask, used_tools))


def tools_streamed() -> None:
    def ask(prompt: str) -> list[Any]:
        return list(AGENT.stream(question(prompt), CONFIG, stream_mode="messages"))

    parts = first_with(ask, lambda parts: any(isinstance(one, ToolMessage) for one, _ in parts))
    assert any(getattr(one, "tool_call_chunks", None) for one, _ in parts)


def json_schema() -> None:
    agent: Any = create_agent(CHAT, [get_weather], response_format=Weather)
    result = agent.invoke(question("What is the weather?"), CONFIG)
    assert isinstance(result["structured_response"], Weather)


run(
    "LangGraph",
    agent=agent,
    streaming=streaming,
    tools_streamed=tools_streamed,
    json_schema=json_schema,
)
