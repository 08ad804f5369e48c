"""Engines that break the contract: one request ends, and no response lacks its form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from common.request.preprocessed import TopLogprob
from tests.kit.engines import RecordingEngine, Script
from tests.kit.local_mesh import CHAT, COMPLETIONS, LocalMesh, local_mesh
from tests.kit.waiting import until
from worker_svc.engines.contract import (
    FinishReason,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    TokenLogprob,
    chunk,
)
from worker_svc.engines.sim.config import SIM_MODEL_DIR

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json"))
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
GOOD = '{"city": "Rome", "count": 3}'


# Any, here and below: JSON.
def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# Its processes for templates and grammars are the same for all tests.
@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[LocalMesh]:
    async with local_mesh() as running, running.router():
        yield running


def saying(*texts: str, reason: FinishReason = FinishReason.EOS) -> Script:
    """An engine that ignores the constraint of its requests; the texts are those of its first
    requests, the last one also of all later ones."""
    remaining = list(texts)

    async def script(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        text = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        yield LLMEngineOutput(token_ids=TOKENIZER.encode(text).ids)
        yield LLMEngineOutput(finish_reason=reason)

    return script


def sending(*outputs: LLMEngineOutput) -> Script:
    """Sends these outputs to prompts that begin with token 1; to others a token now and then."""

    async def script(
        request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        if request.token_ids[0] == 1:
            for output in outputs:
                yield output
            return
        for _ in range(10):
            # Sleep: the other requests are open meanwhile.
            await asyncio.sleep(0.02)
            yield chunk.token(300)
        yield chunk.length()

    return script


async def post(mesh: LocalMesh, path: str = CHAT, **body: Any) -> httpx.Response:
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": "hi"}], **body}
    return await mesh.http.post(path, json={"model": "m", **body})


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a stream; the last is [DONE], or an error."""
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


BROKEN = {
    "negative": [chunk.token(-1)],
    "above 32 bits": [chunk.token(2**32)],
    "outside": [chunk.token(300), chunk.token(2**31)],
    "after the end": [chunk.token(300), chunk.stop(), chunk.token(300)],
    "too many": [LLMEngineOutput(token_ids=[300] * 20), chunk.length()],
    "no end": [chunk.token(300)],
    "a float": [LLMEngineOutput(token_ids=(1.5,)), chunk.stop()],  # type: ignore[arg-type]
    "a negative id with a log probability": [
        LLMEngineOutput(token_ids=[300], logprobs=[TokenLogprob(-5, -1.0, ())]),
        chunk.stop(),
    ],
    **{
        f"a log probability of {value}": [
            LLMEngineOutput(token_ids=[300], logprobs=[TokenLogprob(300, value, ())]),
            chunk.stop(),
        ]
        for value in (float("nan"), float("-inf"))
    },
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("fault", BROKEN)
async def test_invalid_output_ends_its_request_and_no_other(
    mesh: LocalMesh, fault: str, *, is_stream: bool
) -> None:
    engine = RecordingEngine(sending(*BROKEN[fault]))
    async with mesh.worker(engine) as worker:
        others = [
            asyncio.create_task(post(mesh, COMPLETIONS, prompt=[2 + n], max_tokens=10))
            for n in range(4)
        ]
        await until(lambda: worker.runner.open_requests == 4, "the others run")
        response = await post(mesh, COMPLETIONS, prompt=[1], max_tokens=10, stream=is_stream)
        if is_stream and response.status_code == 200:
            error = events_of(response)[-1]["error"]
        else:
            assert response.status_code == 502
            error = response.json()["error"]
        assert error["code"] == "invalid_output"
        assert "invalid output of the engine" in error["message"]
        for other in await asyncio.gather(*others):
            assert other.status_code == 200
            assert other.json()["usage"]["completion_tokens"] == 10
        assert worker.runner.open_requests == 0


async def test_ids_without_a_text_are_an_error_and_not_a_shorter_text(mesh: LocalMesh) -> None:
    """A worker of a version before checks nothing."""
    engine = RecordingEngine(sending(chunk.token(300), chunk.token(2**31), chunk.stop()))
    async with mesh.worker(engine) as worker:
        worker.runner.vocab_size = None
        whole = await post(mesh, COMPLETIONS, prompt=[1], max_tokens=10)
        assert whole.status_code == 502
        assert whole.json()["error"]["code"] == "invalid_output"
        for fields in ({}, {"skip_special_tokens": False}):
            streamed = await post(
                mesh, COMPLETIONS, prompt=[1], max_tokens=10, stream=True, **fields
            )
            assert events_of(streamed)[-1]["error"]["code"] == "invalid_output"


Form = tuple[dict[str, Any], Sequence[str], Sequence[str]]
REQUIRED = {"tools": [tool("find"), tool("buy")], "tool_choice": "required"}
NAMED = REQUIRED | {"tool_choice": {"type": "function", "function": {"name": "buy"}}}
STRICT = {"tools": [tool("find", strict=True)]}
# Name -> fields of the body, texts with the form, texts without it.
FORMS: dict[str, Form] = {
    "json_schema": (
        {"response_format": JSON_SCHEMA},
        [GOOD, '{"city":"Rome","count":3}\n'],
        ["", "Rome", '{"city": "Rome"}', '{"city": "Rome", "count": "3"}', GOOD[:-1]],
    ),
    "json_object": (
        {"response_format": {"type": "json_object"}},
        [GOOD, "{}"],
        ["[1]", '{"a": 1', "a {}"],
    ),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, ["yes"], ["y", "maybe", ""]),
    "guided_regex": ({"guided_regex": "[ab]+c"}, ["abac"], ["aba", "x"]),
    "required": (
        REQUIRED,
        [call("find", GOOD), call("find", GOOD) + "\n" + call("buy", "{}")],
        ["no", "<tool", call("sell", GOOD), call("find", '{"city": ')],
    ),
    "named": (NAMED, [call("buy", GOOD)], ["no", call("find", GOOD)]),
    "strict": (
        STRICT,
        ["any text", call("find", GOOD)],
        [call("find", '{"city": "Rome"}')],
    ),
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", FORMS)
async def test_a_response_without_its_form_is_never_a_success(
    mesh: LocalMesh, name: str, *, is_stream: bool
) -> None:
    fields, good, bad = FORMS[name]
    async with mesh.worker(RecordingEngine(saying(*good, *bad))):
        for text in (*good, *bad):
            response = await post(mesh, stream=is_stream, **fields)
            if text in good:
                assert response.status_code == 200, (text, response.text)
                assert not is_stream or events_of(response)[-1] == "[DONE]"
                continue
            assert 'finish_reason":"' not in response.text, text
            if not is_stream:
                assert response.status_code == 502, text
                assert response.json()["error"]["code"] == "invalid_output"
            else:
                assert events_of(response)[-1]["error"]["code"] == "invalid_output", text


async def test_a_constraint_may_apply_only_behind_the_reasoning(mesh: LocalMesh) -> None:
    """The engine decides. Reasoning without its begin reaches the client as content: no form."""
    split, joined = "<think>\nI count.\n</think>\n\n", "I count.</think>"
    for text, status in ((split + GOOD, 200), (split + "Rome", 502), (joined + GOOD, 502)):
        engine = RecordingEngine(saying(text))
        async with mesh.worker(engine, reasoning_parser="qwen3"):
            for is_stream in (False, True):
                response = await post(mesh, stream=is_stream, response_format=JSON_SCHEMA)
                assert ("invalid_output" in response.text) == (status != 200), response.text
                assert is_stream or response.status_code == status


async def test_a_response_that_the_client_limits_may_be_incomplete(mesh: LocalMesh) -> None:
    async with mesh.worker(RecordingEngine(saying('{"city": "Ro', reason=FinishReason.LENGTH))):
        limited = await post(mesh, response_format=JSON_SCHEMA)
        assert limited.json()["choices"][0]["finish_reason"] == "length"
    async with mesh.worker(RecordingEngine(saying(GOOD))):
        stopped = await post(mesh, response_format=JSON_SCHEMA, stop="Rome")
        assert stopped.json()["choices"][0]["finish_reason"] == "stop"


async def test_the_other_apis_return_no_response_without_its_form(mesh: LocalMesh) -> None:
    async with mesh.worker(RecordingEngine(saying("Rome"))):
        responses = await mesh.http.post(
            "/v1/responses",
            json={
                "model": "m",
                "input": "hi",
                "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            },
        )
        assert responses.status_code == 502
        messages = await mesh.http.post(
            "/v1/messages",
            json={
                "model": "m",
                "max_tokens": 50,
                "messages": [{"role": "user", "content": "hi"}],
                "tools": [{"name": "find", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any"},
            },
        )
        assert messages.status_code == 502
        assert messages.json()["error"]["details"]["error_code"] == "invalid_output"


async def test_an_alternative_may_have_an_id_without_a_text(mesh: LocalMesh) -> None:
    """Models have logits for more ids than their tokenizer."""
    padded = TokenLogprob(300, -1.0, (TopLogprob(1 << 20, -0.5), TopLogprob(300, -1.0)))
    output = LLMEngineOutput(token_ids=[300], logprobs=[padded])
    async with mesh.worker(RecordingEngine(sending(output, chunk.length()))):
        response = await post(mesh, COMPLETIONS, prompt=[1], max_tokens=1, logprobs=2)
        assert response.status_code == 200, response.text
        (top,) = response.json()["choices"][0]["logprobs"]["top_logprobs"]
        assert top[""] == -0.5
        assert len(top) == 2


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_echo_is_complete_without_the_log_probabilities_of_the_prompt(
    mesh: LocalMesh, *, is_stream: bool
) -> None:
    """An engine of another package may ignore that they are requested."""
    output = LLMEngineOutput(token_ids=[301], logprobs=[TokenLogprob(301, -1.0, ())])
    fields = {"prompt": [1, 300, 302], "max_tokens": 1, "logprobs": 0}
    async with mesh.worker(RecordingEngine(sending(output, chunk.length()))):
        plain = (await post(mesh, COMPLETIONS, **fields)).json()["choices"][0]["text"]
        response = await post(mesh, COMPLETIONS, echo=True, stream=is_stream, **fields)
        events = events_of(response)[:-1] if is_stream else [response.json()]
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(choice["text"] for choice in choices)
        assert text == TOKENIZER.decode([1, 300, 302]) + plain
        entries = [choice["logprobs"] or {} for choice in choices]
        values = [value for entry in entries for value in entry.get("token_logprobs", ())]
        assert values == [None, None, None, -1.0]
