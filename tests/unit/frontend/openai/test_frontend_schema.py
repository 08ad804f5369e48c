from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion

from common.errors import InvalidRequest, PromptTooLong, Unsupported
from common.request.preprocessed import (
    CompletionUsage,
    PreprocessedRequest,
    PromptTokensDetails,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TokenIds,
)
from frontend_svc.errors import http_error
from frontend_svc.openai.body.fields import PROMPT_TOKENS_MAX
from frontend_svc.openai.body.guided import requested_constraint
from frontend_svc.openai.body.parsing import parse_chat, parse_completion
from frontend_svc.openai.body.preprocessing import (
    check_total_tokens,
    choice_request,
    to_preprocessed,
)
from frontend_svc.openai.body.schema import ChatRequest, CompletionRequest
from frontend_svc.openai.output.completion_objects import (
    completion_json,
    model_list,
    model_object,
)
from frontend_svc.text.api_format import ChoiceEnd, ChoiceResult, OpenAIFinishReason
from frontend_svc.tools.deltas import Content


def whole(text: str, reason: OpenAIFinishReason = "stop") -> ChoiceResult:
    return ChoiceResult(ChoiceEnd(reason), [Content(text)])


HI = [{"role": "user", "content": "hi"}]
USAGE = CompletionUsage(7, 3, 10, PromptTokensDetails(cached_tokens=4))


def chat_body(**fields: object) -> bytes:
    return orjson.dumps({"model": "m", "messages": HI, **fields})


def completion_body(**fields: object) -> bytes:
    return orjson.dumps({"model": "m", "prompt": "hi", **fields})


def chat(**fields: object) -> ChatRequest:
    return parse_chat(chat_body(**fields))


def completion(**fields: object) -> CompletionRequest:
    return parse_completion(completion_body(**fields))


def message(**fields: object) -> bytes:
    return chat_body(messages=[*HI, fields])


def parts(*content: object) -> bytes:
    return message(role="user", content=list(content))


NOT_JSON: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"[1", "line 1, column 3"),
    (b'{"model": "m",\n "messages": x}', "line 2, column 14"),
    (b'{"model": "m",}', "line 1, column 14"),
    (b'{"a": NaN}', "not valid JSON"),
    (b'{"a": Infinity}', "not valid JSON"),
    (b'{"a": 1e999}', "infinity"),
    (b'{"a": "\\ud800"}', "surrogate"),
    (b'{"model": "\xff"}', "not valid UTF-8: invalid start byte at byte 11"),
    (b'{"model": "m\xe2\x82"}', "at byte 12"),
    (b"[" * 5000, "depth"),
    (b"[]", "must be a JSON object, not a list"),
    (b"null", "must be a JSON object, not null"),
    (b'"m"', "must be a JSON object, not a string"),
]


@pytest.mark.parametrize(("body", "message_part"), NOT_JSON)
@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
def test_a_body_that_is_not_a_json_object_is_refused_with_the_position(
    parse: Any, body: bytes, message_part: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse(body)
    assert message_part in raised.value.message
    response = http_error(raised.value)
    assert response.status == 400
    assert orjson.loads(response.body)["error"]["param"] is None


BAD_CHATS: list[tuple[bytes, str, str, str]] = [
    # Body, param, code, part of the message.
    (b"{}", "model", "missing_required_parameter", "Missing required parameter: 'model'."),
    (b'{"model":"m"}', "messages", "missing_required_parameter", "messages"),
    (chat_body(model=""), "model", "invalid_value", "1 or more characters"),
    (chat_body(model="x" * 513), "model", "invalid_value", "a string of 513 characters"),
    (chat_body(model=None), "model", "invalid_type", "but got null"),
    (chat_body(model=7), "model", "invalid_type", "expected a string, but got an integer"),
    (chat_body(messages=[]), "messages", "invalid_value", "1 or more items"),
    (chat_body(messages=None), "messages", "invalid_type", "expected a list"),
    (chat_body(messages={}), "messages", "invalid_type", "but got an object"),
    (chat_body(messages=["hi"]), "messages[0]", "invalid_type", "expected an object"),
    (message(content="hi"), "messages[1].role", "missing_required_parameter", "role"),
    (message(role="robot", content="x"), "messages[1].role", "invalid_value", "'system'"),
    (message(role="user"), "messages[1].content", "missing_required_parameter", "content"),
    (message(role="user", content=None), "messages[1].content", "missing_required_parameter", ""),
    (
        message(role="user", content=5),
        "messages[1].content",
        "invalid_type",
        "a list of parts",
    ),
    (message(role="user", content="x", foo=1), "messages[1].foo", "unknown_parameter", "Unknown"),
    (message(role="user", content="x", name=1), "messages[1].name", "invalid_type", "string"),
    (parts(), "messages[1].content", "invalid_value", "1 or more items"),
    (parts("x"), "messages[1].content[0]", "invalid_type", "expected an object"),
    (parts({"text": "x"}), "messages[1].content[0].type", "missing_required_parameter", "type"),
    (parts({"type": "text"}), "messages[1].content[0].text", "missing_required_parameter", "text"),
    (
        parts({"type": "text", "text": "a"}, {"type": "text", "text": 1}),
        "messages[1].content[1].text",
        "invalid_type",
        "but got an integer",
    ),
    (
        parts({"type": "text", "text": "a", "cache_control": {}}),
        "messages[1].content[0].cache_control",
        "unknown_parameter",
        "",
    ),
    (
        parts({"type": "video_url", "video_url": {"url": "data:"}}),
        "messages[1].content[0].type",
        "unsupported_parameter",
        "only parts of type text, image_url",
    ),
    (
        parts({"type": "image_url", "image_url": {"url": "data:", "detail": "low"}}),
        "messages[1].content[0].image_url.detail",
        "unsupported_parameter",
        "the same number of tokens",
    ),
    (
        message(role="tool", content="x"),
        "messages[1].tool_call_id",
        "missing_required_parameter",
        "",
    ),
    (
        message(role="user", content="x", tool_call_id="1"),
        "messages[1].tool_call_id",
        "invalid_value",
        "role 'tool'",
    ),
    (
        message(
            role="user",
            content="x",
            tool_calls=[
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        ),
        "messages[1].tool_calls",
        "invalid_value",
        "role 'assistant'",
    ),
    (
        message(role="assistant", tool_calls=[{"id": "1", "type": "function"}]),
        "messages[1].tool_calls[0].function",
        "missing_required_parameter",
        "",
    ),
    (
        message(role="assistant", refusal="no"),
        "messages[1].refusal",
        "unsupported_parameter",
        "",
    ),
    (chat_body(foo=1), "foo", "unknown_parameter", "Unknown parameter: 'foo'."),
    (chat_body(**{"\0text": 1}), "\0text", "unknown_parameter", ""),
    (chat_body(**{"k" * 500: 1}), "k" * 80 + "…", "unknown_parameter", ""),
    (chat_body(**{f"k{i}": 1 for i in range(99)}), "body", "invalid_value", "at most 64 keys"),
    (chat_body(max_tokens=0), "max_tokens", "invalid_value", "a value >= 1, but got 0"),
    (chat_body(max_tokens=-5), "max_tokens", "invalid_value", "but got -5"),
    (chat_body(max_tokens=2**32), "max_tokens", "invalid_value", "<= 4294967295"),
    (chat_body(max_tokens=True), "max_tokens", "invalid_type", "but got a boolean"),
    (chat_body(max_tokens=1.0), "max_tokens", "invalid_type", "but got a decimal number"),
    (chat_body(max_tokens="5"), "max_tokens", "invalid_type", "but got a string"),
    (
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":99999999999999999999}',
        "max_tokens",
        "invalid_type",
        "expected an integer",
    ),
    (chat_body(max_completion_tokens=0), "max_completion_tokens", "invalid_value", ">= 1"),
    (chat_body(max_tokens=1, max_completion_tokens=2), "max_tokens", "invalid_value", "differ"),
    (chat_body(min_tokens=-1), "min_tokens", "invalid_value", ">= 0"),
    (chat_body(min_tokens=9, max_tokens=8), "min_tokens", "invalid_value", "'max_tokens' (8)"),
    (chat_body(stream=1), "stream", "invalid_type", "true or false"),
    (chat_body(stream_options={}), "stream_options", "invalid_value", "'stream' is true"),
    (
        chat_body(stream=True, stream_options={"include_usage": 1}),
        "stream_options.include_usage",
        "invalid_type",
        "",
    ),
    (
        chat_body(stream=True, stream_options={"include_obfuscation": True}),
        "stream_options.include_obfuscation",
        "unsupported_parameter",
        "",
    ),
    (chat_body(stop=""), "stop", "invalid_value", "1 or more characters"),
    (chat_body(stop=["a", ""]), "stop[1]", "invalid_value", "1 or more characters"),
    (chat_body(stop=["a"] * 33), "stop", "invalid_value", "at most 32 items, but got a list of 33"),
    (chat_body(stop=[1]), "stop[0]", "invalid_type", "expected a string"),
    (chat_body(stop=1), "stop", "invalid_type", "a string or a list of strings"),
    (chat_body(stop="x" * 1025), "stop", "invalid_value", "at most 1024 characters"),
    (chat_body(stop_token_ids=[-1]), "stop_token_ids[0]", "invalid_value", ""),
    (chat_body(stop_token_ids=[True]), "stop_token_ids[0]", "invalid_type", "a boolean"),
    (chat_body(stop_token_ids=[1] * 257), "stop_token_ids", "invalid_value", "at most 256"),
    (chat_body(ignore_eos=True, stop="x"), "stop", "invalid_value", "'ignore_eos'"),
    (
        chat_body(nvext={"ignore_eos": True}, stop_token_ids=[5]),
        "stop_token_ids",
        "invalid_value",
        "",
    ),
    (chat_body(temperature=2.1), "temperature", "invalid_value", "<= 2.0, but got 2.1"),
    (chat_body(temperature=-0.1), "temperature", "invalid_value", ">= 0.0"),
    (chat_body(temperature=False), "temperature", "invalid_type", "expected a number"),
    (chat_body(temperature="1"), "temperature", "invalid_type", "but got a string"),
    (chat_body(top_p=0), "top_p", "invalid_value", "> 0"),
    (chat_body(top_p=1.01), "top_p", "invalid_value", "<= 1"),
    (chat_body(top_k=0), "top_k", "invalid_value", "-1 (off)"),
    (chat_body(top_k=-2), "top_k", "invalid_value", ">= -1"),
    (chat_body(min_p=1.5), "min_p", "invalid_value", "<= 1"),
    (chat_body(repetition_penalty=0), "repetition_penalty", "invalid_value", "> 0"),
    (chat_body(repetition_penalty=2.5), "repetition_penalty", "invalid_value", "<= 2"),
    (chat_body(presence_penalty=-2.5), "presence_penalty", "invalid_value", ">= -2"),
    (chat_body(frequency_penalty=3), "frequency_penalty", "invalid_value", "<= 2"),
    (chat_body(seed=2**63), "seed", "invalid_value", ""),
    (chat_body(seed=1.5), "seed", "invalid_type", ""),
    (chat_body(n=0), "n", "invalid_value", ">= 1"),
    (chat_body(n=0), "n", "invalid_value", ""),
    (chat_body(n=129), "n", "invalid_value", ""),
    (chat_body(n=True), "n", "invalid_type", "a boolean"),
    (chat_body(user=5), "user", "invalid_type", ""),
    (chat_body(metadata={"a": 1}), "metadata.a", "invalid_type", ""),
    (chat_body(metadata={str(i): "" for i in range(17)}), "metadata", "invalid_value", "16 pairs"),
    (chat_body(store=True), "store", "unsupported_parameter", "not stored"),
    (chat_body(store=0), "store", "unsupported_parameter", ""),
    (chat_body(use_beam_search=True), "use_beam_search", "unsupported_parameter", "beam"),
    (chat_body(length_penalty=0.5), "length_penalty", "unsupported_parameter", "beam"),
    (chat_body(documents=[{}]), "documents", "unsupported_parameter", "messages"),
    (chat_body(continue_final_message=True), "continue_final_message", "unsupported_parameter", ""),
    (chat_body(truncate_prompt_tokens=5), "truncate_prompt_tokens", "unsupported_parameter", ""),
    (chat_body(bad_words=["a"]), "bad_words", "unsupported_parameter", "logit_bias"),
    (
        chat_body(structured_outputs={"structural_tag": "{}"}),
        "structured_outputs.structural_tag",
        "unsupported_parameter",
        "tools",
    ),
    (
        chat_body(structured_outputs={"foo": 1}),
        "structured_outputs.foo",
        "unknown_parameter",
        "",
    ),
    (chat_body(structured_outputs={"json": 1}), "structured_outputs.json", "invalid_type", ""),
    (chat_body(regex=""), "regex", "invalid_value", "1 or more characters"),
    (chat_body(logprobs=1), "logprobs", "invalid_type", ""),
    (chat_body(logprobs=False, top_logprobs=3), "top_logprobs", "invalid_value", "logprobs"),
    (chat_body(logprobs=True, top_logprobs=21), "top_logprobs", "invalid_value", ""),
    (chat_body(logit_bias={"a": 1}), "logit_bias", "invalid_value", "token ids as keys"),
    (chat_body(logit_bias={"5": 101}), "logit_bias.5", "invalid_value", "<= 100"),
    (chat_body(tools=[{"type": "custom"}]), "tools[0].type", "unsupported_parameter", ""),
    (chat_body(tool_choice="required"), "tool_choice", "invalid_value", "needs tools"),
    (chat_body(functions=[{}]), "functions", "unsupported_parameter", ""),
    (
        chat_body(response_format={"type": "xml"}),
        "response_format.type",
        "invalid_value",
        "one of",
    ),
    (chat_body(modalities=["text", "audio"]), "modalities", "unsupported_parameter", ""),
    (chat_body(audio={}), "audio", "unsupported_parameter", ""),
    (chat_body(service_tier="priority"), "service_tier", "unsupported_parameter", ""),
    (chat_body(reasoning_effort="much"), "reasoning_effort", "invalid_value", "one of"),
    (chat_body(max_thinking_tokens=1), "max_thinking_tokens", "unsupported_parameter", ""),
    (chat_body(nvext=[]), "nvext", "invalid_type", "expected an object"),
    (chat_body(nvext={"foo": 1}), "nvext.foo", "unknown_parameter", ""),
    (
        chat_body(nvext={"annotations": ["a" * 257]}),
        "nvext.annotations[0]",
        "invalid_value",
        "at most 256",
    ),
    (
        chat_body(nvext={"extra_fields": ["engine_data"]}),
        "nvext.extra_fields[0]",
        "invalid_value",
        "one of",
    ),
    (
        chat_body(nvext={"greed_sampling": True}),
        "nvext.greed_sampling",
        "unsupported_parameter",
        "temperature",
    ),
    (
        chat_body(nvext={"backend_instance_id": -1}),
        "nvext.backend_instance_id",
        "invalid_value",
        "",
    ),
    (
        chat_body(nvext={"backend_instance_id": "fd6d04a5a154fff"}),
        "nvext.backend_instance_id",
        "invalid_value",
        "expected a decimal number, but got 'fd6d04a5a154fff'",
    ),
    (
        chat_body(nvext={"decode_worker_id": str(2**64)}),
        "nvext.decode_worker_id",
        "invalid_value",
        "<= 18446744073709551615",
    ),
    (chat_body(nvext={"dp_rank": 2**32}), "nvext.dp_rank", "invalid_value", ""),
    (chat_body(nvext={"dp_rank": "1"}), "nvext.dp_rank", "invalid_type", "a string"),
    (chat_body(nvext={"token_data": []}), "nvext.token_data", "invalid_value", "1 or more items"),
    (chat_body(nvext={"token_data": [1, 2**32]}), "nvext.token_data[1]", "invalid_value", ""),
    (
        chat_body(nvext={"agent_hints": {"priority": 2**31}}),
        "nvext.agent_hints.priority",
        "invalid_value",
        "<= 2147483647",
    ),
    (
        chat_body(nvext={"agent_hints": {"strict_priority": -1}}),
        "nvext.agent_hints.strict_priority",
        "invalid_value",
        ">= 0",
    ),
    (
        chat_body(nvext={"agent_hints": {"strict_priority": 1.5}}),
        "nvext.agent_hints.strict_priority",
        "invalid_type",
        "an integer",
    ),
    (
        chat_body(nvext={"agent_hints": {"speculative_prefill": True}}),
        "nvext.agent_hints.speculative_prefill",
        "unknown_parameter",
        "",
    ),
]

BAD_COMPLETIONS: list[tuple[bytes, str, str, str]] = [
    (b'{"model":"m"}', "prompt", "missing_required_parameter", ""),
    (completion_body(prompt=None), "prompt", "invalid_type", "a string, a list of"),
    (completion_body(prompt=[]), "prompt", "invalid_value", "1 or more items"),
    (completion_body(prompt=["a", 2]), "prompt[1]", "invalid_type", ""),
    (completion_body(prompt=[[1], "b"]), "prompt[1]", "invalid_type", ""),
    (completion_body(prompt=[[1], [-2]]), "prompt[1][0]", "invalid_value", ""),
    (completion_body(prompt=["a"] * 257), "prompt", "invalid_value", ""),
    (completion_body(prompt=["a"] * 3, n=100), "prompt", "invalid_value", "256 choices"),
    (completion_body(best_of=2), "best_of", "unsupported_parameter", "value of n"),
    (completion_body(best_of=1, n=2), "best_of", "unsupported_parameter", "value of n"),
    (completion_body(best_of=0), "best_of", "invalid_value", ""),
    (completion_body(prompt=[1, -1]), "prompt[1]", "invalid_value", ">= 0"),
    (completion_body(prompt=[1, True]), "prompt[1]", "invalid_type", "a boolean"),
    (completion_body(prompt=[1, "a"]), "prompt[1]", "invalid_type", "a string"),
    (completion_body(prompt=[1.5]), "prompt[0]", "invalid_type", ""),
    (completion_body(echo="yes"), "echo", "invalid_type", ""),
    (completion_body(best_of=2), "best_of", "unsupported_parameter", ""),
    (completion_body(suffix="x"), "suffix", "unsupported_parameter", ""),
    (completion_body(logprobs=6), "logprobs", "invalid_value", ""),
    (completion_body(prompt_logprobs=0), "prompt_logprobs", "unsupported_parameter", "echo"),
    (completion_body(messages=HI), "messages", "unknown_parameter", ""),
    (completion_body(max_completion_tokens=5), "max_completion_tokens", "unknown_parameter", ""),
]


def assert_refused(parse: Any, body: bytes, param: str, code: str, message_part: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse(body)
    response = http_error(raised.value)
    details = orjson.loads(response.body)["error"]
    assert (response.status, details["type"]) == (400, "invalid_request_error")
    assert (details["param"], details["code"]) == (param, code)
    assert param in details["message"]
    assert message_part in details["message"]
    assert len(response.body) < 1000


@pytest.mark.parametrize(("body", "param", "code", "message_part"), BAD_CHATS)
def test_an_invalid_chat_is_a_400_that_names_the_field(
    body: bytes, param: str, code: str, message_part: str
) -> None:
    assert_refused(parse_chat, body, param, code, message_part)


@pytest.mark.parametrize(("body", "param", "code", "message_part"), BAD_COMPLETIONS)
def test_an_invalid_completion_is_a_400_that_names_the_field(
    body: bytes, param: str, code: str, message_part: str
) -> None:
    assert_refused(parse_completion, body, param, code, message_part)


@pytest.mark.parametrize(
    "body",
    [
        completion_body(prompt=["x"] * 100_000),
        completion_body(prompt=[1, *["x"] * 100_000]),
        chat_body(messages=[1] * 100_000),
        chat_body(stop=[1] * 100_000),
        chat_body(metadata={f"k{i}": 1 for i in range(100_000)}),
        chat_body(nvext={f"k{i}": 1 for i in range(100_000)}),
        message(role="user", content=[1] * 100_000),
    ],
)
def test_a_large_invalid_body_causes_a_small_error(body: bytes) -> None:
    parse = parse_completion if b"prompt" in body else parse_chat
    with pytest.raises(InvalidRequest) as raised:
        parse(body)
    assert len(raised.value.message) < 300


def test_a_minimal_chat_sets_no_sampling_options() -> None:
    request = chat()
    assert (request.model, request.is_stream, request.include_usage) == ("m", False, False)
    assert (request.stop_strings, request.token_data) == ((), None)
    assert request.template_messages() == HI


def test_every_kind_of_message_reaches_the_template_unchanged() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "ann"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]
    assert chat(messages=messages).template_messages() == messages


def test_an_assistant_message_may_be_returned_as_the_sdk_serialises_it() -> None:
    response = completion_json("chatcmpl-1", "m", 1, [whole("hello")], USAGE, is_chat=True)
    dumped = ChatCompletion.model_validate_json(response).choices[0].message.model_dump()
    assert "annotations" in dumped
    request = chat(messages=[*HI, dumped, *HI])
    assert request.template_messages()[1] == {"role": "assistant", "content": "hello"}


ACCEPTED = {
    "user": "u",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "parallel_tool_calls": True,
    "store": False,
    "service_tier": "auto",
    "response_format": {"type": "text"},
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "function_call": "auto",
    "modalities": ["text"],
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_retention": "in_memory",
    "return_tokens_as_token_ids": False,
    "n": 1,
    "stop": [],
    "nvext": {"annotations": [], "greed_sampling": False},
    "stream_options": {"include_obfuscation": False, "continuous_usage_stats": False},
    "client_metadata": {"session": "s", "turn": 3},
    "request_id": "r",
    "rid": ["r"],
    "trace": {"a": 1},
    "tags": ["a"],
    "litellm_metadata": {"a": {"b": None}},
    "use_beam_search": False,
    "length_penalty": 1.0,
    "documents": [],
    "include_reasoning": True,
    "add_special_tokens": False,
    "add_generation_prompt": True,
    "bad_words": [],
    "cache_prompt": True,
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_fields_without_effect_change_nothing(name: str) -> None:
    plain, extended = chat(stream=True), chat(stream=True, **{name: ACCEPTED[name]})
    assert preprocessed(extended).sampling_options.n in (None, 1)
    for part in ("stop_conditions", "output_options", "routing", "token_ids"):
        assert getattr(preprocessed(extended), part) == getattr(preprocessed(plain), part)


def test_null_means_absent_for_every_optional_field() -> None:
    for shape, parse, body in (
        (ChatRequest, parse_chat, chat_body),
        (CompletionRequest, parse_completion, completion_body),
    ):
        required = {name for name, field in shape.model_fields.items() if field.is_required()}
        nulls = dict.fromkeys(set(shape.model_fields) - required)
        assert parse(body(**nulls)) == parse(body())


def test_stop_may_be_one_string_or_a_list() -> None:
    assert chat(stop="a").stop_strings == ("a",)
    assert chat(stop=["a", "b"] * 16).stop_strings == ("a", "b") * 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        (["hi"], ["hi"]),
        (["hi", ""], ["hi", ""]),
        ([5], [[5]]),
        ([0, 7], [[0, 7]]),
        ([[0, 7], [5]], [[0, 7], [5]]),
    ],
)
def test_a_prompt_is_a_text_or_token_ids_or_a_list_of_these(
    prompt: object, prompts: list[object]
) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_token_data_replaces_the_prompt() -> None:
    request = completion(prompt="hi", nvext={"token_data": [1, 2]})
    assert request.prompts == [[1, 2]]
    assert chat(nvext={"token_data": [1, 2]}).token_data == [1, 2]


def test_usage_in_a_stream_is_optional() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage


def test_usage_in_every_chunk_needs_usage() -> None:
    for include, continuous in ((True, True), (True, False), (False, True)):
        options = {"include_usage": include, "continuous_usage_stats": continuous}
        request = chat(stream=True, stream_options=options)
        assert request.continuous_usage is (include and continuous)


JSON_FORM = {"type": "object", "properties": {"a": {"type": "integer"}}}
CONSTRAINTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    # Fields, the same with the guided_ fields, the path of the constraint.
    ({"regex": "a+"}, {"guided_regex": "a+"}, "regex"),
    ({"ebnf": 'root ::= "a"'}, {"guided_grammar": 'root ::= "a"'}, "ebnf"),
    ({"json_schema": orjson.dumps(JSON_FORM).decode()}, {"guided_json": JSON_FORM}, "json_schema"),
    (
        {"structured_outputs": {"json": JSON_FORM, "disable_any_whitespace": True}},
        {"guided_json": JSON_FORM},
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json": orjson.dumps(JSON_FORM).decode()}},
        {"guided_json": JSON_FORM},
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json": JSON_FORM, "whitespace_pattern": " ?"}},
        {"guided_json": JSON_FORM, "guided_whitespace_pattern": " ?"},
        "structured_outputs.json",
    ),
    (
        {"structured_outputs": {"json_object": True}},
        {"guided_json": {"type": "object"}},
        "structured_outputs.json_object",
    ),
    ({"structured_outputs": {"regex": "a+"}}, {"guided_regex": "a+"}, "structured_outputs.regex"),
    (
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"guided_choice": ["a", "b"]},
        "structured_outputs.choice",
    ),
    (
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        {"guided_grammar": 'root ::= "a"'},
        "structured_outputs.grammar",
    ),
]


@pytest.mark.parametrize(("fields", "guided", "path"), CONSTRAINTS)
def test_constraints_have_the_names_of_vllm_and_sglang(
    fields: dict[str, Any], guided: dict[str, Any], path: str
) -> None:
    for make in (chat, completion):
        expected = requested_constraint(make(**guided))
        found = requested_constraint(make(**fields))
        assert found is not None
        assert expected is not None
        assert (found.guided, found.field) == (expected.guided, path)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"regex": "a", "guided_regex": "b"}, "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"json_schema": "{"}, "json_schema"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"ebnf": "x", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_an_unusable_constraint_names_its_field(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        requested_constraint(chat(**fields))
    assert raised.value.field == path


def preprocessed(
    request: ChatRequest | CompletionRequest, prompt: int = 10, **options: Any
) -> PreprocessedRequest:
    given: dict[str, Any] = {"eos_token_ids": (2,), "card_checksum": "sum", "context_length": 100}
    return to_preprocessed(request, range(100, 100 + prompt), **given | options)


def test_every_honoured_field_reaches_the_engine() -> None:
    request = chat(
        max_completion_tokens=20,
        min_tokens=3,
        stop_token_ids=[9, 2],
        temperature=0.5,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=-7,
        logit_bias={"3": -1},
        cache_salt="s",
        priority=-4,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.1,
        n=1,
    )
    assert preprocessed(request) == PreprocessedRequest(
        model="m",
        token_ids=preprocessed(chat()).token_ids,
        stop_conditions=StopConditions(max_tokens=20, min_tokens=3, stop_token_ids_hidden=(2, 9)),
        sampling_options=SamplingOptions(
            temperature=0.5,
            top_p=0.5,
            top_k=40,
            min_p=0.1,
            seed=-7,
            logit_bias={3: -1.0},
            presence_penalty=1.0,
            frequency_penalty=-1.5,
            repetition_penalty=1.1,
        ),
        eos_token_ids=(2,),
        card_checksum="sum",
        routing=RoutingHints(priority=4, priority_jump=4.0, cache_salt="s"),
    )


def test_a_greedy_request_has_no_seed() -> None:
    assert preprocessed(chat(seed=1, temperature=0)).sampling_options.seed is None


def test_requested_stop_tokens_are_visible_if_the_text_includes_stops() -> None:
    stops = preprocessed(chat(stop_token_ids=[9], include_stop_str_in_output=True)).stop_conditions
    assert (stops.stop_token_ids_hidden, stops.stop_token_ids_visible) == ((2,), (9,))


def test_reasoning_effort_sets_the_variables_that_a_template_reads() -> None:
    request = chat(reasoning_effort="none", chat_template_kwargs={"a": 1})
    switched = request.template_kwargs({"enable_thinking"}, is_reasoning=False)
    assert switched == {"enable_thinking": False, "a": 1}
    both = request.template_kwargs({"thinking", "reasoning_effort"}, is_reasoning=False)
    assert both == {"thinking": False, "reasoning_effort": "none", "a": 1}
    with pytest.raises(Unsupported, match="no such setting"):
        request.template_kwargs({"messages"}, is_reasoning=False)


def test_the_prompt_is_the_given_token_ids() -> None:
    made = to_preprocessed(
        chat(), np.array([3, 1, 2]), eos_token_ids=(), card_checksum=None, context_length=0
    )
    assert made.token_ids.tolist() == [3, 1, 2]
    assert made.card_checksum is None
    assert made.stop_conditions.max_tokens is None


def test_ignore_eos_sends_no_eos_ids() -> None:
    for request in (chat(ignore_eos=True), chat(nvext={"ignore_eos": True})):
        made = preprocessed(request)
        assert made.eos_token_ids == ()
        assert made.stop_conditions == StopConditions(max_tokens=90, ignore_eos=True)


def test_the_top_level_wins_over_nvext() -> None:
    both = chat(
        top_k=1, repetition_penalty=1.5, nvext={"top_k": 2, "repetition_penalty": 0.5, "min_p": 0.5}
    )
    sampling = preprocessed(both).sampling_options
    assert (sampling.top_k, sampling.repetition_penalty, sampling.min_p) == (1, 1.5, 0.5)
    assert preprocessed(chat(ignore_eos=False, nvext={"ignore_eos": True})).eos_token_ids == (2,)


def test_routing_hints_come_from_nvext() -> None:
    nvext = {
        "backend_instance_id": str(2**64 - 1),
        "prefill_worker_id": 1,
        "decode_worker_id": 2,
        "dp_rank": 3,
        "prefill_dp_rank": 4,
        "agent_hints": {"priority": 5, "osl": 6},
    }
    assert preprocessed(chat(nvext=nvext)).routing == RoutingHints(
        backend_instance_id=2**64 - 1,
        prefill_worker_id=1,
        decode_worker_id=2,
        dp_rank=3,
        prefill_dp_rank=4,
        expected_output_tokens=6,
        priority=5,
        priority_jump=5.0,
    )
    assert preprocessed(chat(nvext={"agent_hints": {"priority": -5}})).routing == RoutingHints(
        priority=-5, priority_jump=0.0
    )
    assert preprocessed(chat(nvext={"top_k": 5})).routing is None


@pytest.mark.parametrize(
    ("max_tokens", "context", "default", "limit"),
    [
        (None, 100, None, 90),
        (None, 100, 16, 16),
        (None, 100, 500, 90),
        (90, 100, 16, 90),
        (None, 0, None, None),
        (None, 0, 16, 16),
        (5000, 0, None, 5000),
        (None, 11, None, 1),
    ],
)
def test_the_limit_of_output_tokens(
    max_tokens: int | None, context: int, default: int | None, limit: int | None
) -> None:
    made = preprocessed(
        chat(max_tokens=max_tokens), context_length=context, default_max_tokens=default
    )
    assert made.stop_conditions.max_tokens == limit


@pytest.mark.parametrize("prompt", [100, 101])
def test_a_prompt_without_room_for_output_is_refused_with_openais_text(prompt: int) -> None:
    with pytest.raises(PromptTooLong) as raised:
        preprocessed(chat(), prompt)
    assert raised.value.message.startswith(
        "This model's maximum context length is 100 tokens."
        f" However, your messages resulted in {prompt} tokens."
    )
    details = orjson.loads(http_error(raised.value).body)["error"]
    assert (details["param"], details["code"]) == ("messages", "context_length_exceeded")
    with pytest.raises(PromptTooLong, match="your prompt resulted"):
        preprocessed(completion(), prompt)


def test_more_output_than_the_context_allows_is_refused() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(PromptTooLong, match=r"101 tokens \(10 in the messages, 91") as raised:
            preprocessed(chat(**{name: 91}))
        assert raised.value.field == name


def test_min_tokens_above_the_output_limit_is_refused() -> None:
    assert preprocessed(chat(min_tokens=90)).stop_conditions.min_tokens == 90
    with pytest.raises(InvalidRequest, match="91 is more than the output limit of 90 tokens"):
        preprocessed(chat(min_tokens=91))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens") as raised:
        preprocessed(completion(prompt=""), 0)
    assert raised.value.field == "prompt"


def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    assert preprocessed(completion(), vocab_size=110)
    with pytest.raises(InvalidRequest, match=r"token 108 at position 8 .* of 108"):
        preprocessed(completion(), vocab_size=108)


@pytest.mark.parametrize(
    ("seed", "choice", "expected"),
    [(5, 0, 5), (5, 3, 8), (None, 3, None), (-1, 1, 0), (2**63 - 1, 1, -(2**63))],
)
def test_each_choice_of_a_prompt_has_a_seed_of_its_own(
    seed: int | None, choice: int, expected: int | None
) -> None:
    request = choice_request(preprocessed(completion(seed=seed, n=4)), choice)
    assert request.sampling_options.seed == expected
    assert request.sampling_options.n is None, "a worker generates one choice"


def test_the_tokens_of_all_prompts_together_are_limited() -> None:
    def of(tokens: int) -> PreprocessedRequest:
        return PreprocessedRequest(model="m", token_ids=TokenIds.of(np.zeros(tokens, np.uint32)))

    half = of(PROMPT_TOKENS_MAX // 2)
    assert check_total_tokens([half, half]) == PROMPT_TOKENS_MAX
    with pytest.raises(InvalidRequest, match="1048577 tokens together, and 1048576"):
        check_total_tokens([half, half, of(1)])


def test_a_chat_completion_has_the_types_of_the_sdk() -> None:
    choices = [whole('a "b"', "length")]
    body = completion_json("chatcmpl-1", "m", 1_700_000_000, choices, USAGE, is_chat=True)
    response = ChatCompletion.model_validate_json(body, strict=True)
    assert (response.id, response.object, response.created) == (
        "chatcmpl-1",
        "chat.completion",
        1.7e9,
    )
    assert response.choices[0].message.content == 'a "b"'
    assert response.choices[0].finish_reason == "length"
    assert response.usage is not None
    assert response.usage.prompt_tokens_details is not None
    assert response.usage.prompt_tokens_details.cached_tokens == 4


def test_a_text_completion_has_the_types_of_the_sdk() -> None:
    body = completion_json(
        "cmpl-1", "m", 1_700_000_000, [whole("text")], CompletionUsage(1, 2, 3), is_chat=False
    )
    response = Completion.model_validate_json(body, strict=True)
    assert (response.id, response.object) == ("cmpl-1", "text_completion")
    assert (response.choices[0].text, response.choices[0].finish_reason) == ("text", "stop")
    assert orjson.loads(body)["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
    }


def test_the_list_of_models_has_the_types_of_the_sdk() -> None:
    listed = orjson.loads(model_list([model_object("a", 1, "kvmesh"), model_object("b", 2, "x")]))
    assert listed["object"] == "list"
    models = [Model.model_validate(one, strict=True) for one in listed["data"]]
    assert [(model.id, model.owned_by) for model in models] == [("a", "kvmesh"), ("b", "x")]
