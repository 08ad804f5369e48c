"""One choice of a response: its tokens become deltas (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from common.request.preprocessed import CompletionUsage, FinishReason
from frontend_svc.core.response_format import ChoiceEnd, ChoiceSink, OpenAIFinishReason
from frontend_svc.core.text.output_text import TextStream
from frontend_svc.core.tools.response import ResponseParser


class Choice:
    """Writes the output of one choice. parser: None if the whole text is content. is_complete:
    whether the response is complete although the model may continue. echo: written first."""

    def __init__(
        self, index: int, text: TextStream, parser: ResponseParser | None, echo: str = ""
    ) -> None:
        self._index = index
        self._echo = echo
        self._text = text
        self._parser = parser
        self.is_complete = False

    def begin(self, sink: ChoiceSink) -> bytes:
        """Writes what comes before the first token."""
        return sink.text(self._index, [self._echo]) if self._echo else b""

    def feed(self, token_ids: Sequence[int], sink: ChoiceSink) -> bytes:
        """Writes the text that the next tokens complete."""
        pieces = self._text.feed(token_ids)
        parser = self._parser
        if parser is None:
            self.is_complete = self._text.matched_stop is not None
            return sink.text(self._index, pieces) if pieces else b""
        deltas = [delta for piece in pieces for delta in parser.feed(piece)]
        self.is_complete = self._text.matched_stop is not None or parser.is_done
        return sink.output(self._index, deltas, ()) if deltas else b""

    def finish(self, reason: FinishReason | None, sink: ChoiceSink) -> bytes:
        """Writes the withheld text and the end. reason: why the model ended."""
        rest = self._text.finish()
        if self._parser is not None:
            deltas = [*self._parser.feed(rest), *self._parser.finish()]
            events = sink.output(self._index, deltas, ()) if deltas else b""
        else:
            events = sink.text(self._index, [rest]) if rest else b""
        end = ChoiceEnd(self._finish_reason(reason), self._text.matched_stop)
        return events + sink.finish(self._index, end)

    def _finish_reason(self, reason: FinishReason | None) -> OpenAIFinishReason:
        parser = self._parser
        name: OpenAIFinishReason | None = "stop"
        if self._text.matched_stop is None and not (parser is not None and parser.is_done):
            name = None if reason is None else reason.openai
        assert name is not None, "an outcome without an OpenAI finish reason has an error"
        has_calls = parser is not None and parser.has_calls
        return "tool_calls" if name == "stop" and has_calls else name

    def usage(self, usage: CompletionUsage) -> CompletionUsage:
        """The counts without the tokens after a stop string."""
        if self._text.matched_stop is None:
            return usage
        count = self._text.consumed
        return replace(usage, completion_tokens=count, total_tokens=usage.prompt_tokens + count)
