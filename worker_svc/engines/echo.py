"""The echo engine, for smoke tests: returns the prompt as its output.

`generate` returns the prompt's token ids, one per chunk. `generate_pass_through` takes an OpenAI
body and streams the last user message (chat) or the prompt (completion) in OpenAI chunk objects,
word by word. It has no cache, no queue and no KV events.

Output is deterministic, so temperature, top_p, top_k, min_p and seed have no effect. Any other
unsupported field is rejected by name.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final

from common.errors import InvalidRequest, MeshError, PromptTooLong, Unavailable, Unsupported
from common.kv.load import Load
from common.request.preprocessed import JsonValue, load_json_text, to_json_value, unsupported_fields
from worker_svc.engines.contract import (
    EngineConfig,
    FinishReason,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    chunk,
    usage,
)
from worker_svc.engines.stop_tokens import TOKEN_STOP_CONDITIONS, stop_tokens_of

_SUPPORTED_FIELDS: Final = frozenset(
    {
        *(f"stop_conditions.{name}" for name in TOKEN_STOP_CONDITIONS),
        *(
            f"sampling_options.{name}"
            for name in ("temperature", "top_p", "top_k", "min_p", "seed")
        ),
        # It shares no KV.
        "routing.cache_salt",
    }
)
_IGNORED_FOR_PROBES: Final = frozenset({"bootstrap_info", "prefill_result"})
# Supported body fields; most of them have no effect here.
_BODY_FIELDS: Final = frozenset(
    {"model", "max_tokens", "stream", "stream_options", "temperature", "top_p", "seed", "user"}
)
_CHAT_FIELDS: Final = _BODY_FIELDS | {"messages", "max_completion_tokens"}
_COMPLETION_FIELDS: Final = _BODY_FIELDS | {"prompt"}
_WORD_PATTERN: Final = re.compile(r"\s*\S+|\s+$")


@dataclass(frozen=True, slots=True)
class EchoConfig:
    """Settings of the echo engine. token_delay_s: seconds before each token or word."""

    model: str = "kvmesh-echo"
    served_model_name: str | None = None
    context_length: int = 32_768
    token_delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.context_length < 1 or self.token_delay_s < 0:
            raise ValueError(
                "context_length must be at least 1 and token_delay_s must not be negative"
            )


@dataclass(frozen=True, slots=True)
class _Response:
    """A planned output: opening, words, closing, then the terminal chunk, unless it is stopped."""

    prompt_word_count: int
    words: Sequence[LLMEngineOutput]
    terminal: LLMEngineOutput
    opening: Sequence[LLMEngineOutput] = ()
    closing: Sequence[LLMEngineOutput] = ()


class EchoEngine:
    """An `LLMEngine` that repeats the prompt.

    Counters at rest: accepted == finished + cancelled + closed, without `rejected` requests.
    """

    def __init__(self, config: EchoConfig) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        self._is_started = False
        self._running = 0
        self._words_emitted = 0

    async def start(self, worker_id: int) -> EngineConfig:
        """Returns at once."""
        self._is_started = True
        return EngineConfig(
            model=self.config.model,
            served_model_name=self.config.served_model_name,
            context_length=self.config.context_length,
            kv_index_reason="the echo engine has no cache",
            supported_fields=_SUPPORTED_FIELDS,
        )

    async def generate(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields the prompt's tokens, up to max_tokens or a stop token.

        Raises InvalidRequest, Unsupported, PromptTooLong or Unavailable at its first step.
        """
        outputs = self._run(lambda: _echo_of_tokens(request, self.config.context_length), ctx)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def generate_pass_through(
        self, kind: str, body: bytes, ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        """Yields OpenAI chunk objects for an OpenAI body (JSON), then a terminal chunk without one.

        kind: "chat" or "completion". `id` and `created` of the chunks derive from the request id,
        so equal requests give equal output. With `stream_options.include_usage` the last object has
        the counts, in words. Raises InvalidRequest, Unsupported or Unavailable at its first step.
        """
        outputs = self._run(lambda: _echo_of_body(kind, body, ctx.id), ctx)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, ctx: GenerateContext) -> None:
        """Does nothing: the stop ends the stream."""

    async def drain(self) -> None:
        """Returns at once."""

    async def cleanup(self) -> None:
        """Rejects further requests. Open streams continue to their end."""
        self._is_started = False

    def loads(self) -> Sequence[Load]:
        """Returns the load of the only rank; each word counts as a step."""
        return (Load(engine_step=self._words_emitted, running=self._running),)

    async def _run(
        self, plan: Callable[[], _Response], ctx: GenerateContext
    ) -> AsyncGenerator[LLMEngineOutput, None]:
        try:
            if not self._is_started:
                raise Unavailable("the engine is not started")
            response = plan()
        except MeshError:
            self.counters["rejected"] += 1
            raise
        self.counters["accepted"] += 1
        self._running += 1
        outcome, emitted = "closed", 0
        try:
            for output in response.opening:
                yield output
            for output in response.words:
                if await self._is_stopped_after_delay(ctx):
                    outcome = "cancelled"
                    yield chunk.cancelled().with_usage(usage(response.prompt_word_count, emitted))
                    return
                emitted += 1
                self._words_emitted += 1
                yield output
            for output in response.closing:
                yield output
            outcome = "finished"
            yield response.terminal.with_usage(usage(response.prompt_word_count, emitted))
        finally:
            self._running -= 1
            self.counters[outcome] += 1

    async def _is_stopped_after_delay(self, ctx: GenerateContext) -> bool:
        if self.config.token_delay_s > 0:
            with suppress(TimeoutError):  # the delay has passed
                async with asyncio.timeout(self.config.token_delay_s):
                    await ctx.stopped()
        else:
            await asyncio.sleep(0)  # lets other tasks run between words
        return ctx.is_stopped


def _echo_of_tokens(request: PreprocessedRequest, context_length: int) -> _Response:
    _check_tokens(request, context_length)
    prompt, stop = request.token_ids.tolist(), request.stop_conditions
    response = prompt[: stop.max_tokens]
    terminal = chunk.stop() if len(response) == len(prompt) else chunk.length()
    stops = stop_tokens_of(request, ())
    for index in range(stop.min_tokens or 0, len(response)):
        found = stops.get(response[index])
        if found is not None:
            stop_reason = response[index] if found.reason is FinishReason.STOP else None
            terminal = LLMEngineOutput(finish_reason=found.reason, stop_reason=stop_reason)
            response = response[: index + found.is_visible]
            break
    return _Response(len(prompt), [chunk.token(token) for token in response], terminal)


def _check_tokens(request: PreprocessedRequest, context_length: int) -> None:
    supported = _SUPPORTED_FIELDS | _IGNORED_FOR_PROBES if request.is_probe else _SUPPORTED_FIELDS
    if unsupported := unsupported_fields(request, supported):
        raise Unsupported(unsupported[0], "not supported by the echo engine")
    if not request.token_ids:
        raise InvalidRequest("token_ids must not be empty", "token_ids")
    if request.stop_conditions.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1", "stop_conditions.max_tokens")
    if len(request.token_ids) > context_length:
        raise PromptTooLong(
            f"prompt too long: {len(request.token_ids)}/{context_length} tokens",
            "token_ids",
        )


def _echo_of_body(kind: str, body: bytes, request_id: str) -> _Response:
    fields = load_json_text(body, "body")
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object", "body")
    match kind:
        case "chat":
            known_fields, text, limit_field = _CHAT_FIELDS, _last_user_text, "max_completion_tokens"
        case "completion":
            known_fields, text, limit_field = _COMPLETION_FIELDS, _prompt_text, "max_tokens"
        case _:
            raise InvalidRequest(f"kind must be chat or completion, not {kind!r}", "kind")
    for name, value in fields.items():
        if name not in known_fields and value is not None:
            raise Unsupported(name, "not supported by the echo engine")
    input_words = _WORD_PATTERN.findall(text(fields))
    limit_field = limit_field if fields.get(limit_field) is not None else "max_tokens"
    emitted = input_words[: _max_words(fields, limit_field)]
    terminal = chunk.stop() if len(emitted) == len(input_words) else chunk.length()
    chunk_builder = _ChunkBuilder(kind, request_id, _text_field(fields.get("model", ""), "model"))
    opening = [chunk_builder.choice({"delta": {"role": "assistant", "content": ""}}, {})]
    closing = [chunk_builder.choice({"delta": {}}, {"text": ""}, terminal.finish_reason)]
    if _is_usage_requested(fields):
        counts = to_json_value(usage(len(input_words), len(emitted)))
        closing.append(chunk_builder.chunk(choices=[], usage=counts))
    return _Response(
        len(input_words),
        [chunk_builder.choice({"delta": {"content": word}}, {"text": word}) for word in emitted],
        terminal,
        opening if kind == "chat" else (),
        closing,
    )


def _last_user_text(fields: Mapping[str, JsonValue]) -> str:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", "messages")
    for index in reversed(range(len(messages))):
        message, path = messages[index], f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidRequest(f"{path} must be an object", path)
        if message.get("role") == "user":
            return _content_text(message.get("content"), f"{path}.content")
    raise InvalidRequest("messages must contain a message with role user", "messages")


def _content_text(content: JsonValue, path: str) -> str:
    if not isinstance(content, list):
        return _text_field(content, path)
    texts = []
    for index, part in enumerate(content):
        part_path = f"{path}[{index}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            raise Unsupported(part_path, "the echo engine accepts text parts only")
        texts.append(_text_field(part.get("text"), f"{part_path}.text"))
    return "".join(texts)


def _prompt_text(fields: Mapping[str, JsonValue]) -> str:
    return _text_field(fields.get("prompt"), "prompt")


def _text_field(value: JsonValue, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path} must be a string", path)
    return value


def _max_words(fields: Mapping[str, JsonValue], name: str) -> int | None:
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidRequest(f"{name} must be an integer of at least 1", name)
    return value


def _is_usage_requested(fields: Mapping[str, JsonValue]) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options must be an object", "stream_options")
    return options.get("include_usage") is True


class _ChunkBuilder:
    """Builds the OpenAI chunk objects of one response."""

    def __init__(self, kind: str, request_id: str, model: str) -> None:
        self._is_chat = kind == "chat"
        self._frame: dict[str, JsonValue] = {
            "id": ("chatcmpl-" if self._is_chat else "cmpl-") + request_id,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            # In the range of Unix seconds, but constant for a request id.
            "created": zlib.crc32(request_id.encode("utf-8", "surrogatepass")),
            "model": model,
        }

    def choice(
        self,
        chat: Mapping[str, JsonValue],
        completion: Mapping[str, JsonValue],
        finish: str | None = None,
    ) -> LLMEngineOutput:
        """Returns a chunk with the fields of the request's kind. finish: its finish reason."""
        content = chat if self._is_chat else completion
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return self.chunk(choices=[choice])

    def chunk(self, **extra_fields: JsonValue) -> LLMEngineOutput:
        text = json.dumps({**self._frame, **extra_fields}, separators=(",", ":"))
        return LLMEngineOutput(chunk_json=text.encode())
