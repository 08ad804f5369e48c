"""The OpenAI Agents SDK, with chat completions and with responses."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cells import (
    ATTEMPTS,
    HELLO,
    KEY,
    MODEL,
    RESULT,
    URL,
    Weather,
    chat_text,
    expect_equal,
    get_weather,
    run,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
TURNS = 60


def chat_model() -> Any:
    return OpenAIChatCompletionsModel(MODEL, openai_client())


def responses_model() -> Any:
    return OpenAIResponsesModel(MODEL, openai_client())


def openai_client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)


def make_agent(model: Any, **fields: Any) -> Any:
    return Agent(name="assistant", model=model, **fields)


def outputs(result: Any) -> list[str]:
    return [one.output for one in result.new_items if one.type == "tool_call_output_item"]


async def loop(model: Any) -> None:
    agent = make_agent(model, tools=[function_tool(get_weather)])
    for number in range(ATTEMPTS):
        result = await Runner.run(agent, f"What is the weather in city {number}?", max_turns=TURNS)
        if outputs(result) and result.final_output:
            expect_equal(set(outputs(result)), {RESULT})
            return
    raise AssertionError("no run used the tool")


async def chat() -> None:
    result = await Runner.run(make_agent(chat_model()), "Hello")
    expect_equal(result.final_output, chat_text(HELLO))


async def streaming() -> None:
    result = Runner.run_streamed(make_agent(chat_model()), "Hello")
    events = [one async for one in result.stream_events() if one.type == "raw_response_event"]
    deltas = [one.data.delta for one in events if one.data.type == "response.output_text.delta"]
    expect_equal("".join(deltas), chat_text(HELLO))


async def agent() -> None:
    await loop(chat_model())


async def tools() -> None:
    settings = ModelSettings(tool_choice="get_weather")
    result = await Runner.run(
        make_agent(
            chat_model(),
            tools=[function_tool(get_weather)],
            model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        ),
        "Hello",
    )
    expect_equal(result.final_output, RESULT)


async def tools_streamed() -> None:
    settings = ModelSettings(tool_choice="required")
    result = Runner.run_streamed(
        make_agent(
            chat_model(),
            tools=[function_tool(get_weather)],
            model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        ),
        "Hello",
    )
    kinds = [
        one.name async for one in result.stream_events() if one.type == "run_item_stream_event"
    ]
    assert "tool_called" in kinds
    expect_equal(result.final_output, RESULT)


async def parallel_tools() -> None:
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=True)
    agent = make_agent(
        chat_model(),
        tools=[function_tool(get_weather)],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    for number in range(ATTEMPTS):
        result = await Runner.run(agent, f"What is the weather in city {number}?")
        if len(outputs(result)) > 1:
            return
    raise AssertionError("no response with several calls")


async def json_schema() -> None:
    result = await Runner.run(make_agent(chat_model(), output_type=Weather), "Hello")
    assert isinstance(result.final_output, Weather)


async def responses() -> None:
    result = await Runner.run(make_agent(responses_model()), "Hello")
    expect_equal(result.final_output, chat_text(HELLO))
    await loop(responses_model())


run(
    "openai-agents",
    chat=chat,
    streaming=streaming,
    agent=agent,
    tools=tools,
    tools_streamed=tools_streamed,
    parallel_tools=parallel_tools,
    json_schema=json_schema,
    responses=responses,
)
