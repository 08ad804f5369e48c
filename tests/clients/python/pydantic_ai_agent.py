"""pydantic-ai agents with the models of three APIs."""

from __future__ import annotations

from typing import Any

from cells import (
    BASE_URL,
    HELLO,
    KEY,
    MODEL,
    RESULT,
    URL,
    Weather,
    chat_text,
    expect_equal,
    first_with,
    get_weather,
    run,
)
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimits
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

CHAT = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
LIMITS = UsageLimits(request_limit=60)


def parts_of(result: Any, kind: type) -> list[Any]:
    return [part for one in result.all_messages() for part in one.parts if isinstance(part, kind)]


def agent_loop(model: Any) -> Any:
    """A run that has used the tool and has an answer."""
    agent: Any = Agent(model, tools=[get_weather], retries=5)
    result = first_with(
        lambda prompt: agent.run_sync(prompt, usage_limits=LIMITS),
        lambda result: bool(parts_of(result, ToolReturnPart)) and bool(result.output),
    )
    expect_equal({part.content for part in parts_of(result, ToolReturnPart)}, {RESULT})
    return result


def chat() -> None:
    expect_equal(Agent(CHAT).run_sync("Hello").output, chat_text(HELLO))


async def streaming() -> None:
    async with Agent(CHAT).run_stream("Hello") as result:
        text = "".join([one async for one in result.stream_text(delta=True, debounce_by=None)])
    expect_equal(text, chat_text(HELLO))


def agent() -> None:
    agent_loop(CHAT)


def tools() -> None:
    result = Agent(CHAT, output_type=ToolOutput(Weather)).run_sync("Hello")
    assert isinstance(result.output, Weather)


async def tools_streamed() -> None:
    async with Agent(CHAT, output_type=ToolOutput(Weather)).run_stream("Hello") as result:
        assert isinstance(await result.get_output(), Weather)


def parallel_tools() -> None:
    agent: Any = Agent(CHAT, tools=[get_weather], retries=5)

    def most_calls(result: Any) -> int:
        return max(
            sum(isinstance(part, ToolCallPart) for part in one.parts)
            for one in result.all_messages()
        )

    first_with(
        lambda prompt: agent.run_sync(prompt, usage_limits=LIMITS),
        lambda result: most_calls(result) > 1,
    )


def json_schema() -> None:
    result = Agent(CHAT, output_type=NativeOutput(Weather)).run_sync("Hello")
    assert isinstance(result.output, Weather)


def responses() -> None:
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    expect_equal(Agent(model).run_sync("Hello").output, chat_text(HELLO))
    agent_loop(model)


def messages() -> None:
    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE_URL, api_key=KEY))
    expect_equal(Agent(model).run_sync("Hello").output, chat_text(HELLO))
    agent_loop(model)


run(
    "pydantic-ai",
    chat=chat,
    streaming=streaming,
    agent=agent,
    tools=tools,
    tools_streamed=tools_streamed,
    parallel_tools=parallel_tools,
    json_schema=json_schema,
    responses=responses,
    messages=messages,
)
