"""Bodies of clients to a server without token ids, and its chunks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from common.errors import InvalidRequest, WorkerLost
from common.request.preprocessed import PromptTokensDetails, load_json_text
from worker_svc.engines.contract import (
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    usage,
)

_PATHS: Final = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
# Objects of a body that are the mesh's.
_OWN_FIELDS: Final = ("nvext", "kvmesh")
_U32: Final = 2**32 - 1


class PassThroughStream:
    """A `TokenStream` of OpenAI chunks: they travel as `chunk_json`."""

    is_streamed = True
    # Servers abort a request when its connection closes.
    rid = ""

    # Any: JSON.
    def __init__(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        is_probe: bool = False,
        hides_usage: bool = False,
    ) -> None:
        """hides_usage: whether a chunk with nothing but the counts is not for the client."""
        self.path = path
        self.body = body
        self._is_probe = is_probe
        self._hides_usage = hides_usage
        self._has_token = False
        self._finish: FinishReason | None = None
        self._usage: CompletionUsage | None = None

    @classmethod
    def of_body(cls, kind: str, raw: bytes, model: str) -> PassThroughStream:
        """Returns the call for the body of a client, with the server's name of the model.

        It always requests the counts of tokens, which are those of the client's usage.
        Raises InvalidRequest for a body that is no JSON object, or an unknown kind.
        """
        body = load_json_text(raw, "body")
        if not isinstance(body, dict):
            raise InvalidRequest("the body must be a JSON object", "body")
        if kind not in _PATHS:
            raise InvalidRequest(f"kind must be chat or completion, not {kind!r}", "kind")
        for name in _OWN_FIELDS:
            body.pop(name, None)
        # The frontend joins the chunks for a client that did not ask for a stream.
        options = body.get("stream_options") if body.get("stream") else None
        hides_usage = bool(body.get("stream"))
        if isinstance(options, dict | None):
            hides_usage = hides_usage and not (options or {}).get("include_usage")
            body["stream_options"] = {**(options or {}), "include_usage": True}
        sent = {**body, "model": model, "stream": True}
        return cls(_PATHS[kind], sent, hides_usage=hides_usage)

    @classmethod
    def probe(cls, model: str) -> PassThroughStream:
        """Returns the call of a probe: one token."""
        message = {"role": "user", "content": "Hi"}
        body = {"model": model, "messages": [message], "max_tokens": 1, "stream": True}
        return cls(_PATHS["chat"], body, is_probe=True)

    def convert(self, data: bytes) -> LLMEngineOutput | None:
        """Returns the chunk. Raises MeshError if it is an error."""
        raw = orjson.loads(data)
        if raw.get("error"):
            raise _stream_error(raw["error"])
        choices = raw.get("choices") or ()
        for choice in choices:
            if reason := choice.get("finish_reason"):
                self._finish = _finish_reason(reason)
        if counts := raw.get("usage"):
            prompt, completion = counts.get("prompt_tokens"), counts.get("completion_tokens")
            self._usage = usage(min(prompt or 0, _U32), min(completion or 0, _U32))
            cached = (counts.get("prompt_tokens_details") or {}).get("cached_tokens")
            if cached is not None:
                details = PromptTokensDetails(cached_tokens=min(cached, _U32))
                self._usage = replace(self._usage, prompt_tokens_details=details)
        if not self._is_probe:
            is_hidden = self._hides_usage and counts and not choices
            return None if is_hidden else LLMEngineOutput(chunk_json=data)
        if self._has_token or not choices:
            return None
        self._has_token = True
        # A probe gets one token; its id has no meaning here.
        return LLMEngineOutput(token_ids=(0,))

    def end(self) -> LLMEngineOutput | None:
        """Returns the terminal output; None if no choice has ended."""
        if self._finish is None:
            return None
        return LLMEngineOutput(finish_reason=self._finish, completion_usage=self._usage)

    def usage(self) -> CompletionUsage:
        """Returns the counts that the server has reported."""
        return self._usage or usage(0, 0)


def _finish_reason(reason: str) -> FinishReason:
    match reason:
        case "length":
            return FinishReason.LENGTH
        case "content_filter":
            return FinishReason.CONTENT_FILTER
        case _:  # tool_calls too: the chunk itself has the server's reason
            return FinishReason.STOP


def _stream_error(error: Any) -> Exception:
    message = str(error.get("message")) if isinstance(error, dict) else str(error)
    kind = error.get("type") if isinstance(error, dict) else ""
    if kind == "invalid_request_error":
        return InvalidRequest(message)
    return WorkerLost(message, retryable=True)
