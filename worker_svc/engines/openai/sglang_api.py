"""Requests to SGLang's `/generate`, which takes the arguments of its Engine as JSON (0.5.23). Pure.

Translation and conversion are those of the SGLang engine, with three differences: `min_tokens` is
SGLang's `min_new_tokens`, because a server has no logit processor of ours; a priority is sent only
to a server that schedules by it; a server that was started with incremental output sends only what
is new, which is joined here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from common.errors import InvalidRequest, Overloaded, Unsupported, WorkerLost
from worker_svc.engines.contract import (
    CompletionUsage,
    LLMEngineOutput,
    PreprocessedRequest,
)
from worker_svc.engines.openai.facts import ServerFacts
from worker_svc.engines.sglang.sampling import (
    OutputConverter,
    build_sglang_request,
    supported_fields,
)

GENERATE_PATH: Final = "/generate"
# Values of `meta_info` of which an incremental chunk has only the new part.
_GROWING: Final = ("output_token_logprobs", "output_top_logprobs")


class SglangApi:
    """A `TokenApi`."""

    def __init__(self, facts: ServerFacts) -> None:
        self._facts = facts

    def supported_fields(self) -> frozenset[str]:
        """Returns the fields that every request may have."""
        fields = supported_fields(self._facts.properties)
        return fields if self._facts.has_min_tokens else fields - {"stop_conditions.min_tokens"}

    def open(self, request: PreprocessedRequest, priority: int | None, rid: str) -> SglangStream:
        """Returns the call. Raises Unsupported, InvalidRequest and PromptTooLong."""
        if request.stop_conditions.min_tokens and not self._facts.has_min_tokens:
            text = "the server runs without a tokenizer (--skip-tokenizer-init)"
            raise Unsupported("stop_conditions.min_tokens", text)
        call = build_sglang_request(request, self._facts.properties, priority)
        body = {name: value for name, value in call.arguments.items() if value is not None}
        if not self._facts.has_priorities:
            del body["priority"]
        sampling = dict(body["sampling_params"])
        if custom := sampling.pop("custom_params", None):
            sampling["min_new_tokens"] = custom["min_tokens"]
        body |= {"sampling_params": sampling, "stream": True, "rid": rid}
        converter = OutputConverter(call, self._facts.properties, len(request.token_ids))
        return SglangStream(body, rid, converter, is_incremental=self._facts.is_incremental)


class SglangStream:
    """A `TokenStream`."""

    is_streamed = True
    path = GENERATE_PATH

    # Any: SGLang's arguments and chunks are JSON-like values of many types.
    def __init__(
        self,
        body: Mapping[str, Any],
        rid: str,
        converter: OutputConverter,
        *,
        is_incremental: bool,
    ) -> None:
        self.body = body
        self.rid = rid
        self._converter = converter
        self._joined: dict[str, list[Any]] | None = {} if is_incremental else None

    def convert(self, data: bytes) -> LLMEngineOutput | None:
        """Returns the new part of a chunk. Raises MeshError if the chunk is an error."""
        raw = orjson.loads(data)
        if error := raw.get("error"):
            raise _stream_error(error)
        if self._joined is not None:
            raw = self._join(raw, self._joined)
        return self._converter.convert(raw)

    def end(self) -> LLMEngineOutput | None:
        """Returns None: the last chunk has the finish reason."""
        return None

    def usage(self) -> CompletionUsage:
        """Returns the counts so far."""
        return self._converter.usage()

    def _join(self, raw: Mapping[str, Any], joined: dict[str, list[Any]]) -> dict[str, Any]:
        meta = dict(raw["meta_info"])
        for name, values in (
            ("output_ids", raw["output_ids"]),
            *((name, meta.get(name)) for name in _GROWING),
        ):
            joined.setdefault(name, []).extend(values or ())
        meta |= {name: joined[name] for name in _GROWING if name in meta}
        return {**raw, "output_ids": joined["output_ids"], "meta_info": meta}


def _stream_error(error: Mapping[str, Any]) -> Exception:
    """Returns the error that SGLang reports inside of a stream."""
    message, status = str(error.get("message")), error.get("code")
    if status == 503:
        return Overloaded(None, message)
    if isinstance(status, int) and status >= 500:
        return WorkerLost(message, retryable=True)
    return InvalidRequest(message)
