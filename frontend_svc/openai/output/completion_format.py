"""The ApiFormat of chat completions and completions (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from common.errors import MeshError
from common.request.preprocessed import CompletionUsage
from frontend_svc.errors import error_event
from frontend_svc.openai.output.chat_message import chunk_delta
from frontend_svc.openai.output.completion_objects import completion_json
from frontend_svc.openai.output.logprobs import logprobs_object
from frontend_svc.openai.output.sse import DONE, KEEP_ALIVE, ChunkKind, ChunkWriter, UsageSoFar
from frontend_svc.text.api_format import ChoiceEnd, ChoiceResult, TokenText
from frontend_svc.tools.deltas import Content, Delta


class CompletionFormat:
    """Writes one response. created: Unix seconds. See ChunkWriter."""

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        kind: ChunkKind,
        response_id: str,
        model: str,
        created: int,
        *,
        choices: int,
        include_usage: bool,
        usage_so_far: UsageSoFar | None = None,
    ) -> None:
        self._is_chat = kind is ChunkKind.CHAT
        self._choices = choices
        self._has_template = usage_so_far is None
        self._writer = ChunkWriter(
            kind,
            response_id,
            model,
            created,
            include_usage=include_usage,
            usage_so_far=usage_so_far,
            choices=choices,
        )
        self._whole = partial(completion_json, response_id, model, created, is_chat=self._is_chat)

    def begin(self) -> bytes:
        if not self._is_chat:
            return b""
        return b"".join(map(self._writer.role, range(self._choices)))

    def text(self, choice: int, pieces: Iterable[str]) -> bytes:
        if not self._has_template:
            return self.output(choice, [Content(piece) for piece in pieces], ())
        content = self._writer.content
        return b"".join([content(piece, choice) for piece in pieces])

    def output(self, choice: int, deltas: Sequence[Delta], tokens: Sequence[TokenText]) -> bytes:
        fragment = chunk_delta if self._is_chat else _text_fragment
        fragments = [fragment(delta) for delta in deltas]
        if not tokens:
            return b"".join([self._writer.fragment(fragment, choice) for fragment in fragments])
        first, *others = fragments or [{} if self._is_chat else {"text": ""}]
        logprobs = logprobs_object(tokens, is_chat=self._is_chat)
        return b"".join(
            [
                self._writer.fragment(first, choice, logprobs),
                *[self._writer.fragment(other, choice) for other in others],
            ]
        )

    def finish(self, choice: int, end: ChoiceEnd) -> bytes:
        return self._writer.finish(end.reason, choice, end.nvext)

    async def settle(self, choices: Sequence[ChoiceResult], usage: CompletionUsage) -> None:
        """Does nothing: completions are not stored."""

    def end(self, usage: CompletionUsage) -> bytes:
        return self._writer.usage(usage) + DONE

    def error(self, error: MeshError) -> bytes:
        return error_event(error)

    def body(self, choices: Sequence[ChoiceResult], usage: CompletionUsage) -> bytes:
        return self._whole(choices, usage)


# Any: JSON.
def _text_fragment(delta: Delta) -> dict[str, Any]:
    assert isinstance(delta, Content), "a text completion has only content"
    return {"text": delta.text}
