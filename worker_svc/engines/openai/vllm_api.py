"""Requests to vLLM's `/v1/completions` with token ids in and out (`return_token_ids`, vLLM 0.11 and
later). Pure.

A stop token is part of vLLM's `token_ids`; a hidden one is removed here. Alternatives of log
probabilities are named by id (`return_tokens_as_token_ids`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import orjson

from common.errors import (
    InternalError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    Unsupported,
    WorkerLost,
)
from common.request.preprocessed import GuidedDecoding, PromptTokensDetails, TopLogprob
from worker_svc.engines.contract import (
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    PreprocessedRequest,
    TokenLogprob,
    unsupported_fields,
    usage,
)
from worker_svc.engines.openai.facts import ServerFacts
from worker_svc.engines.stop_tokens import TOKEN_STOP_CONDITIONS, StopToken, stop_tokens_of

COMPLETIONS_PATH: Final = "/v1/completions"
LOGPROB_MIN: Final = -9999.0
_SAMPLING: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_SUPPORTED: Final = frozenset(
    {
        *(f"sampling_options.{name}" for name in (*_SAMPLING, "logit_bias")),
        *(f"stop_conditions.{name}" for name in TOKEN_STOP_CONDITIONS),
        *("output_options.logprobs", "routing.lora_name", "routing.cache_salt"),
        *(
            f"sampling_options.guided_decoding.{name}"
            for name in ("json", "regex", "choice", "grammar", "structural_tag")
        ),
    }
)
# A probe may have the fields of a handoff, which mean nothing here.
_PROBE_FIELDS: Final = frozenset({"bootstrap_info", "prefill_result"})
_ID_PREFIX: Final = "token_id:"


# Any: JSON.
def flush_body(model: str) -> Mapping[str, Any]:
    """Returns a request of one step that leaves no page in the cache."""
    return {"model": model, "prompt": [0], "max_tokens": 1, "ignore_eos": True}


class VllmApi:
    """A `TokenApi`."""

    def __init__(self, facts: ServerFacts) -> None:
        self._facts = facts

    def supported_fields(self) -> frozenset[str]:
        """Returns the fields that every request may have."""
        return _SUPPORTED

    def open(self, request: PreprocessedRequest, priority: int | None, rid: str) -> VllmStream:
        """Returns the call; vLLM refuses priorities unless it schedules by them, so none is sent.

        Raises Unsupported, InvalidRequest and PromptTooLong.
        """
        lora = self._check(request)
        stops = stop_tokens_of(request, self._facts.properties.eos_ids)
        options, stop = request.sampling_options, request.stop_conditions
        max_output = self._facts.properties.context_length - len(request.token_ids)
        limit = max_output if stop.max_tokens is None else min(stop.max_tokens, max_output)
        # Any: JSON.
        body: dict[str, Any] = {
            "model": lora or self._facts.model,
            "prompt": request.token_ids.tolist(),
            "max_tokens": 1 if request.is_probe else limit,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "request_id": rid,
        }
        for name in _SAMPLING:
            if (value := getattr(options, name)) is not None:
                body[name] = value
        if options.logit_bias:
            body["logit_bias"] = {str(name): bias for name, bias in options.logit_bias.items()}
        if stop.ignore_eos or request.is_probe:
            body["ignore_eos"] = True
        elif stops:
            body["stop_token_ids"] = sorted(stops)
        if stop.min_tokens:
            body["min_tokens"] = stop.min_tokens
        logprobs = request.output_options.logprobs
        if logprobs is not None:
            body |= {"logprobs": logprobs, "return_tokens_as_token_ids": True}
        guided = options.guided_decoding
        if guided is not None and not guided.best_effort:
            body["structured_outputs"] = _structured(guided)
        if request.routing is not None and request.routing.cache_salt:
            body["cache_salt"] = request.routing.cache_salt
        return VllmStream(body, stops, len(request.token_ids), logprobs)

    def _check(self, request: PreprocessedRequest) -> str | None:
        """Returns the adapter of the request."""
        supported = _SUPPORTED | _PROBE_FIELDS if request.is_probe else _SUPPORTED
        if unsupported := unsupported_fields(request, supported):
            raise Unsupported(unsupported[0], "not supported by the adapter for vLLM")
        count, properties = len(request.token_ids), self._facts.properties
        if not count:
            raise InvalidRequest("token_ids must not be empty", "token_ids")
        if count >= properties.max_input_tokens:
            longest = properties.max_input_tokens - 1
            raise PromptTooLong(f"prompt too long: {count}/{longest} tokens", field="token_ids")
        if request.stop_conditions.max_tokens == 0:
            raise InvalidRequest("max_tokens must be at least 1", "stop_conditions.max_tokens")
        lora = request.routing.lora_name if request.routing is not None else None
        if lora and lora not in properties.loras:
            raise Unsupported("routing.lora_name", f"the adapter {lora!r} is not loaded here")
        return lora


class VllmStream:
    """A `TokenStream`. The counts follow the last token in a chunk of their own, so the terminal
    output is that of `end`."""

    is_streamed = True
    path = COMPLETIONS_PATH
    # vLLM aborts a request when its connection closes.
    rid = ""

    def __init__(
        self,
        body: Mapping[str, Any],
        stops: Mapping[int, StopToken],
        prompt_tokens: int,
        logprobs: int | None,
    ) -> None:
        self.body = body
        self._stops = stops
        self._prompt_tokens = prompt_tokens
        self._logprobs_count = logprobs
        self._delivered = 0
        self._cached_tokens: int | None = None
        self._terminal: LLMEngineOutput | None = None

    def convert(self, data: bytes) -> LLMEngineOutput | None:
        """Returns the tokens of a chunk. Raises MeshError if the chunk is an error."""
        raw = orjson.loads(data)
        if error := raw.get("error"):
            raise _stream_error(error)
        details = (raw.get("usage") or {}).get("prompt_tokens_details") or {}
        self._cached_tokens = details.get("cached_tokens", self._cached_tokens)
        if not raw.get("choices"):
            return None
        (choice,) = raw["choices"]
        ids = choice.get("token_ids")
        if ids is None:
            text = (
                "the server returns no token ids: it needs vLLM 0.11 or later, or --server-api text"
            )
            raise InternalError(text)
        tokens = list(ids)
        reason = choice.get("finish_reason")
        if reason is not None:
            tokens = self._finish(reason, choice.get("stop_reason"), tokens)
        self._delivered += len(tokens)
        if not tokens:
            return None
        return LLMEngineOutput(token_ids=tokens, logprobs=self._logprobs(choice, tokens))

    def end(self) -> LLMEngineOutput | None:
        """Returns the terminal output, None if the stream was cut."""
        return None if self._terminal is None else self._terminal.with_usage(self.usage())

    def usage(self) -> CompletionUsage:
        """Returns the counts so far."""
        counts = usage(self._prompt_tokens, self._delivered)
        if self._cached_tokens is None:
            return counts
        return replace(
            counts, prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens)
        )

    def _finish(self, reason: str, stop_reason: int | str | None, tokens: list[int]) -> list[int]:
        """Sets the terminal output. Returns the tokens without a hidden stop token."""
        if reason == "abort":
            raise WorkerLost("the server aborted the request", retryable=True)
        if reason != "stop":
            self._terminal = LLMEngineOutput(finish_reason=FinishReason.LENGTH)
            return tokens
        last = tokens[-1] if tokens else None
        token_id = stop_reason if isinstance(stop_reason, int) else last
        stop = (
            self._stops.get(token_id, StopToken(FinishReason.EOS)) if token_id is not None else None
        )
        if stop is not None and stop.is_visible:
            self._terminal = LLMEngineOutput(finish_reason=stop.reason, stop_reason=token_id)
            return tokens
        finish = FinishReason.EOS if stop is None else stop.reason
        self._terminal = LLMEngineOutput(finish_reason=finish)
        return tokens[:-1] if last is not None and last == token_id else tokens

    def _logprobs(self, choice: Mapping[str, Any], tokens: Sequence[int]) -> list[TokenLogprob]:
        if self._logprobs_count is None:
            return []
        raw = choice["logprobs"]
        tops = raw.get("top_logprobs") or [None] * len(tokens)
        found = []
        for token, value, top in zip(tokens, raw["token_logprobs"], tops, strict=False):
            # The token itself is among them even if it is not one of the likeliest.
            ranked = sorted((top or {}).items(), key=lambda one: -one[1])[: self._logprobs_count]
            alternatives = tuple(TopLogprob(_id_of(name), _clamp(its)) for name, its in ranked)
            found.append(TokenLogprob(token, _clamp(value), alternatives))
        return found


def _id_of(name: str) -> int:
    return int(name.removeprefix(_ID_PREFIX))


def _clamp(logprob: float | None) -> float:
    return LOGPROB_MIN if logprob is None else max(LOGPROB_MIN, logprob)


def _structured(guided: GuidedDecoding) -> dict[str, Any]:
    if guided.regex is not None:
        return {"regex": guided.regex}
    if guided.choice is not None:
        return {"choice": list(guided.choice)}
    if guided.grammar is not None:
        return {"grammar": guided.grammar}
    if guided.structural_tag is not None:
        return {"structural_tag": orjson.dumps(guided.structural_tag).decode()}
    return {"json": guided.json}


def _stream_error(error: Mapping[str, Any] | str) -> Exception:
    """Returns the error that vLLM reports inside of a stream."""
    if isinstance(error, str):
        return WorkerLost(error, retryable=True)
    message, status = str(error.get("message")), error.get("code")
    if status in (429, 503):
        return Overloaded(None, message)
    if isinstance(status, int) and 400 <= status < 500:
        return InvalidRequest(message)
    return WorkerLost(message, retryable=True)
