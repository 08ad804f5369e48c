"""Server-sent events of one response: `data: {chunk}` lines in OpenAI's format (pure).

A `ChunkWriter` is created once per request. It serialises all of a content chunk except the text
in advance, so a token costs one concatenation. With `include_usage` every chunk has `"usage":null`
(with `usage_so_far`: the counts up to this chunk) and one more chunk, without choices, has the
counts.

The order of a choice is role? content* finish. After all choices come usage? DONE; an `error` may
take the place of the rest. The wrong order is a bug and fails an assertion. Invariants: exactly one
chunk of a choice has a finish reason; no content of it follows; an error is the last event and no
`DONE` follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import orjson

from common.request.preprocessed import CompletionUsage, usage
from frontend_svc.errors import error_event
from frontend_svc.openai.output.completion_objects import usage_object
from frontend_svc.text.api_format import OpenAIFinishReason

DONE = b"data: [DONE]\n\n"
# A comment, ignored by clients: keeps proxies from closing a stream during a long prefill.
KEEP_ALIVE = b": keep-alive\n\n"

# Marks the position of the text in a template; JSON never has this character unescaped.
_TEXT_PLACEHOLDER = "\x00"
_TEXT_PLACEHOLDER_JSON = orjson.dumps(_TEXT_PLACEHOLDER)


def event(chunk: bytes) -> bytes:
    return b"data: " + chunk + b"\n\n"


class ChunkKind(StrEnum):
    """The chunk object of an API."""

    CHAT = "chat.completion.chunk"
    COMPLETION = "text_completion"


class UsageSoFar:
    """The token counts of a response that is being generated. counts: output tokens of each choice,
    which the choices set."""

    def __init__(self, prompt_tokens: int, counts: Sequence[int]) -> None:
        self._prompt_tokens = prompt_tokens
        self._counts = counts

    def of_choice(self, index: int) -> CompletionUsage:
        return usage(self._prompt_tokens, self._counts[index])


class ChunkWriter:
    """Writes the events of one response. created: Unix seconds, the same in every chunk. choices:
    how many; an `index` selects one."""

    def __init__(
        self,
        kind: ChunkKind,
        response_id: str,
        model: str,
        created: int,
        *,
        include_usage: bool = False,
        usage_so_far: UsageSoFar | None = None,
        choices: int = 1,
    ) -> None:
        self._kind = kind
        self._include_usage = include_usage
        self._usage_so_far = usage_so_far
        self._common_fields = {
            "id": response_id,
            "object": kind.value,
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        self._unfinished = set(range(choices))
        self._failed = False
        self._templates = [self._template(index) for index in range(choices)]

    @property
    def is_finished(self) -> bool:
        """Whether every choice has a finish reason, or an error has been written."""
        return not self._unfinished

    def _template(self, index: int) -> tuple[bytes, bytes]:
        """Returns what comes before and after the text in a chunk."""
        # From the right: an id before the placeholder may contain the same text.
        template = self._event([self._choice(index, _TEXT_PLACEHOLDER, None)], None)
        before_text, _, after_text = template.rpartition(_TEXT_PLACEHOLDER_JSON)
        return before_text, after_text

    def content(self, text: str, index: int = 0) -> bytes:
        """Returns one chunk of text. Raises TypeError for a lone surrogate, which is not valid
        UTF-8."""
        assert index in self._unfinished, "content after the end"
        before_text, after_text = self._templates[index]
        return b"".join((before_text, orjson.dumps(text), after_text))

    def fragment(
        self, fragment: dict[str, Any], index: int = 0, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        """Returns one chunk with this part of a choice: the `delta` of a chat, or fields of a
        completion's choice."""
        assert index in self._unfinished, "content after the end"
        content = {"delta": fragment} if self._kind is ChunkKind.CHAT else fragment
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": None}
        return self._event([choice], self._counts(index))

    def role(self, index: int = 0) -> bytes:
        """Returns the first chunk of a chat response, with the role; completions have none."""
        assert self._kind is ChunkKind.CHAT, "only chat has roles"
        assert index in self._unfinished, "role after the end"
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._event([_chat_choice(index, delta, None)], self._counts(index))

    def finish(
        self, reason: OpenAIFinishReason, index: int = 0, nvext: Mapping[str, object] | None = None
    ) -> bytes:
        assert index in self._unfinished, "a choice finishes once"
        self._unfinished.discard(index)
        return self._event([self._choice(index, None, reason)], self._counts(index), nvext)

    def _counts(self, index: int) -> CompletionUsage | None:
        return None if self._usage_so_far is None else self._usage_so_far.of_choice(index)

    def usage(self, usage: CompletionUsage) -> bytes:
        """Returns the chunk with the counts, after `finish`; empty unless the client requested
        it."""
        assert self.is_finished, "the counts come after the finish reason"
        assert not self._failed, "an error is the last event"
        return self._event([], usage) if self._include_usage else b""

    def error(self, error: BaseException) -> bytes:
        """Returns the last event of a failed response; no `DONE` may follow it."""
        assert not self.is_finished, "an error after the end"
        self._unfinished.clear()
        self._failed = True
        return error_event(error)

    def _choice(
        self, index: int, text: str | None, reason: OpenAIFinishReason | None
    ) -> dict[str, object]:
        if self._kind is ChunkKind.CHAT:
            return _chat_choice(index, {} if text is None else {"content": text}, reason)
        return {"index": index, "text": text or "", "logprobs": None, "finish_reason": reason}

    def _event(
        self,
        choices: list[dict[str, object]],
        usage: CompletionUsage | None,
        nvext: Mapping[str, object] | None = None,
    ) -> bytes:
        chunk: dict[str, object] = {**self._common_fields, "choices": choices}
        if nvext:
            chunk["nvext"] = nvext
        if self._include_usage:
            chunk["usage"] = None if usage is None else usage_object(usage)
        return event(orjson.dumps(chunk))


# Any: JSON.
def _chat_choice(
    index: int, delta: dict[str, Any], reason: OpenAIFinishReason | None
) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
