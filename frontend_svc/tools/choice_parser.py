"""The deltas of one choice (pure). Each tool call has an id."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from frontend_svc.tools.deltas import CallStart, Content, Delta, Reasoning
from frontend_svc.tools.harmony import HarmonyParser
from frontend_svc.tools.parser import ToolCallParser
from frontend_svc.tools.reasoning import ReasoningParser, SplitText

_ID_CHARS = 24


def call_id(response_id: str, index: int, chars: int) -> str:
    """Returns an id for a call without one. chars: the length that the model requires; 0: any."""
    digest = hashlib.sha256(f"{response_id} {index}".encode()).hexdigest()
    return digest[:chars] if chars else f"call_{digest[:_ID_CHARS]}"


class ChoiceParser:
    """Parses the text of one choice.

    tools: parser of tool calls; None if the choice has none.
    reasoning: parser of the reasoning; None if the choice has none.
    response_id: unique for the choice.
    id_chars: see `CallFormat`.
    """

    def __init__(
        self,
        tools: ToolCallParser | HarmonyParser | None,
        reasoning: ReasoningParser | None,
        response_id: str,
        *,
        id_chars: int = 0,
    ) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._response_id = response_id
        self._id_chars = id_chars

    @property
    def is_done(self) -> bool:
        """Whether the response is complete although the model may continue."""
        return self._tools is not None and self._tools.is_done

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.calls > 0

    @property
    def has_reasoning(self) -> bool:
        """Whether the model marks its reasoning."""
        return self._reasoning is not None or isinstance(self._tools, HarmonyParser)

    @property
    def is_past_reasoning(self) -> bool:
        return not self.has_reasoning or (self._reasoning is not None and self._reasoning.is_over)

    def feed(self, text: str) -> list[Delta]:
        """Returns the deltas that the next piece of text completes."""
        if self._reasoning is None:
            return self._answer(text)
        parts = self._reasoning.feed(text)
        return [*_reasoning(parts.reasoning), *self._answer(parts.answer)]

    def finish(self) -> list[Delta]:
        """Returns the rest after the last piece."""
        parts = SplitText("", "") if self._reasoning is None else self._reasoning.finish()
        deltas = [*_reasoning(parts.reasoning), *self._answer(parts.answer)]
        return deltas if self._tools is None else [*deltas, *self._with_ids(self._tools.finish())]

    def _answer(self, text: str) -> list[Delta]:
        if self._tools is None or not text:
            return [Content(text)] if text else []
        return self._with_ids(self._tools.feed(text))

    def _with_ids(self, deltas: Iterable[Delta]) -> list[Delta]:
        return [
            replace(delta, id=call_id(self._response_id, delta.index, self._id_chars))
            if isinstance(delta, CallStart) and not delta.id
            else delta
            for delta in deltas
        ]


def _reasoning(text: str) -> list[Delta]:
    return [Reasoning(text)] if text else []
