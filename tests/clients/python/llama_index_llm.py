"""LlamaIndex: OpenAILike models, its agent, its embeddings."""

from __future__ import annotations

from typing import Any

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
    expect_vectors,
    expect_weather,
    first_with,
    get_weather,
    run,
)
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

# It sends a temperature of 0.1, which changes no text of the sim.
LLM = OpenAILike(
    model=MODEL,
    api_base=URL,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
    max_retries=0,
)
TOOL = FunctionTool.from_defaults(get_weather, fn_schema=Weather)
TURNS = [ChatMessage(role="user", content="Hello")]


def chat() -> None:
    expect_equal(LLM.chat(TURNS).message.content, chat_text(HELLO))


def streaming() -> None:
    deltas = [one.delta or "" for one in LLM.stream_chat(TURNS)]
    expect_equal("".join(deltas), chat_text(HELLO))


def calls_of(response: Any) -> list[Any]:
    calls = LLM.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    for call in calls:
        expect_weather(call.tool_name, call.tool_kwargs)
    return calls


def tools() -> None:
    assert calls_of(LLM.chat_with_tools([TOOL], user_msg="Hello", tool_required=True))


def tools_streamed() -> None:
    stream = LLM.stream_chat_with_tools([TOOL], user_msg="Hello", tool_required=True)
    assert calls_of(list(stream)[-1])


def parallel_tools() -> None:
    first_with(
        lambda prompt: calls_of(
            LLM.chat_with_tools(
                [TOOL], user_msg=prompt, tool_required=True, allow_parallel_tool_calls=True
            )
        ),
        lambda calls: len(calls) > 1,
    )


async def agent() -> None:
    agent = FunctionAgent(tools=[TOOL], llm=LLM)
    for number in range(ATTEMPTS):
        handler = agent.run(f"What is the weather in city {number}?", max_iterations=60)
        results = [
            event.tool_output.content
            async for event in handler.stream_events()
            if isinstance(event, ToolCallResult)
        ]
        await handler
        if results:
            expect_equal(set(results), {RESULT})
            return
    raise AssertionError("no run used the tool")


def json_schema() -> None:
    response = LLM.as_structured_llm(Weather).chat(TURNS)
    assert isinstance(response.raw, Weather)


def embeddings() -> None:
    model = OpenAILikeEmbedding(model_name=MODEL, api_base=URL, api_key=KEY, max_retries=0)
    expect_vectors(model.get_text_embedding_batch(["one", "two"]), ["one", "two"])


run(
    "LlamaIndex",
    chat=chat,
    streaming=streaming,
    tools=tools,
    tools_streamed=tools_streamed,
    parallel_tools=parallel_tools,
    agent=agent,
    json_schema=json_schema,
    embeddings=embeddings,
)
