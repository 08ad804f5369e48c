"""One choice of a response: its tokens become deltas (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from common.request.preprocessed import (
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
    TokenLogprob,
)
from frontend_svc.text.api_format import (
    ChoiceEnd,
    ChoiceSink,
    OpenAIFinishReason,
    TokenText,
)
from frontend_svc.text.output_text import RecordedText, TextStream
from frontend_svc.text.token_queue import TokenQueue
from frontend_svc.tools.choice_parser import ChoiceParser
from frontend_svc.tools.deltas import Content, Delta, Reasoning


@dataclass(slots=True)
class PromptTokens:
    """An echoed prompt. offsets: characters before each token. logprobs: of the tokens from the
    second on, which arrive in parts."""

    token_ids: Sequence[int]
    offsets: Sequence[int]
    logprobs: Sequence[TokenLogprob]

    @property
    def is_complete(self) -> bool:
        return len(self.logprobs) >= len(self.token_ids) - 1


class Choice:
    """Writes the output of one choice.

    - parser: None if the whole text is content.
    - echo: text that is written first.
    - recorded: receives the text; None: it is not needed.
    - token_bytes: returns the bytes of an id, for log probabilities; None: the client requested
      none.
    - counts: receives the output tokens up to each text, at `index`; None: nothing reads them.
    - is_complete: whether the response is complete although the model may continue.
    """

    def __init__(
        self,
        index: int,
        text: TextStream,
        parser: ChoiceParser | None,
        *,
        echo: str = "",
        token_bytes: Callable[[int], bytes] | None = None,
        counts: list[int] | None = None,
        recorded: RecordedText | None = None,
    ) -> None:
        self._index = index
        self.echo = echo
        self.recorded = recorded
        # Characters of the prompt in the text.
        self._echoed = 0
        self._text = text
        self._parser = parser
        self._token_bytes = token_bytes
        self._counts = counts
        self._is_by_token = token_bytes is not None or counts is not None
        self._queue = TokenQueue[TokenText]()
        # Until it is written.
        self._prompt: PromptTokens | None = None
        # Tokens that wait until the prompt is written.
        self._held: list[tuple[int, TokenLogprob]] = []
        self.is_complete = False
        self._reasoning_tokens = 0
        # Tokens since the last delta.
        self._pending_tokens = 0

    def echo_with(self, prompt: PromptTokens) -> None:
        """Before the start: the echoed prompt has log probabilities."""
        self._prompt = prompt

    def begin(self, sink: ChoiceSink) -> bytes:
        """Writes what comes before the first token."""
        if self._prompt is not None:
            return b""
        return sink.text(self._index, [self.echo]) if self.echo else b""

    def write_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], sink: ChoiceSink
    ) -> bytes:
        """Writes the text that the next tokens complete. logprobs: of each token."""
        if self._is_by_token:
            if len(token_ids) > 1:
                return self._write_each(token_ids, logprobs, sink)
            if self._counts is not None:
                self._counts[self._index] += 1
            if self._token_bytes is not None:
                return self._write_token(token_ids[0], logprobs[0], sink)
        parser = self._parser
        if parser is None:
            pieces = self._text.feed(token_ids)
            self.is_complete = self._text.matched_stop is not None
            return sink.text(self._index, pieces) if pieces else b""
        if parser.is_past_reasoning:
            pieces = self._text.feed(token_ids)
            deltas = [delta for piece in pieces for delta in parser.feed(piece)]
        else:
            deltas = [
                delta for token_id in token_ids for delta in self._count_token(token_id, parser)
            ]
        self.is_complete = self._text.matched_stop is not None or parser.is_done
        return sink.output(self._index, deltas, ()) if deltas else b""

    def _write_each(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], sink: ChoiceSink
    ) -> bytes:
        """As `write_tokens`, one token after another."""
        events = b""
        for number, token_id in enumerate(token_ids):
            if not self.is_complete:
                events += self.write_tokens((token_id,), logprobs[number : number + 1], sink)
        return events

    def _count_token(self, token_id: int, parser: ChoiceParser) -> Sequence[Delta]:
        """Returns the deltas that one token completes, which may be one of the reasoning."""
        if self._text.matched_stop is not None:
            return ()
        _, text = self._text.feed_token(token_id)
        return self._count(parser.feed(text))

    def _count(self, deltas: Sequence[Delta], tokens: int = 1) -> Sequence[Delta]:
        """Counts the tokens up to those that completed a delta, if it is reasoning."""
        self._pending_tokens += tokens
        if deltas:
            if isinstance(deltas[0], Reasoning):
                self._reasoning_tokens += self._pending_tokens
            self._pending_tokens = 0
        return deltas

    def _write_token(self, token_id: int, logprob: TokenLogprob, sink: ChoiceSink) -> bytes:
        if self.is_complete:
            return b""
        if self._prompt is not None:
            self._held.append((token_id, logprob))
            return self._write_prompt(self._prompt, sink)
        queue = self._queue
        entry = self._entry(logprob, self._echoed + queue.end)
        characters, text = self._text.feed_token(token_id)
        queue.add(entry, characters)
        tokens = queue.send(len(text))
        deltas = self._count(self._deltas(text))
        if self._text.matched_stop is not None:
            tokens += queue.stop()
            self.is_complete = True
        elif self._parser is not None:
            self.is_complete = self._parser.is_done
        return sink.output(self._index, deltas, tokens) if deltas or tokens else b""

    def _write_prompt(
        self, prompt: PromptTokens, sink: ChoiceSink, *, is_end: bool = False
    ) -> bytes:
        """Writes the prompt and the tokens that waited for it, when all its log probabilities have
        arrived, or none can arrive any more."""
        if not (prompt.is_complete or is_end):
            return b""
        self._prompt, self._echoed = None, len(self.echo)
        deltas = [Content(self.echo)] if self.echo else []
        events = sink.output(self._index, deltas, self._prompt_entries(prompt))
        held, self._held = self._held, []
        return events + b"".join([self._write_token(*token, sink) for token in held])

    def _prompt_entries(self, prompt: PromptTokens) -> list[TokenText]:
        assert self._token_bytes is not None, "the client requested log probabilities"
        first = TokenText(self._token_bytes(prompt.token_ids[0]), None)
        known = [first, *map(self._entry, prompt.logprobs, prompt.offsets[1:])]
        rest = slice(len(known), None)  # of an engine that computes none
        unknown = [
            TokenText(self._token_bytes(token_id), None, offset=offset)
            for token_id, offset in zip(prompt.token_ids[rest], prompt.offsets[rest], strict=True)
        ]
        return known + unknown

    def _entry(self, logprob: TokenLogprob, offset: int) -> TokenText:
        assert self._token_bytes is not None, "the client requested log probabilities"
        alternatives = [
            TokenText(self._token_bytes(alternative.token_id), alternative.logprob)
            for alternative in logprob.top
        ]
        raw = self._token_bytes(logprob.token_id)
        return TokenText(raw, logprob.logprob, alternatives, offset)

    def _deltas(self, text: str) -> Sequence[Delta]:
        if self._parser is not None:
            return self._parser.feed(text)
        return [Content(text)] if text else []

    def finish(
        self,
        reason: FinishReason | None,
        sink: ChoiceSink,
        nvext: Mapping[str, object] | None = None,
    ) -> bytes:
        """Writes the withheld text and the end. reason: why the model ended."""
        events = b""
        if self._prompt is not None:
            events = self._write_prompt(self._prompt, sink, is_end=True)
        rest = self._text.finish()
        deltas = self._deltas(rest)
        if self._parser is not None:
            deltas = self._count([*deltas, *self._parser.finish()], 0)
        tokens = self._queue.send(len(rest))
        is_stopped = self._text.matched_stop is not None
        tokens += self._queue.stop() if is_stopped else self._queue.finish()
        events += sink.output(self._index, deltas, tokens) if deltas or tokens else b""
        end = ChoiceEnd(self._finish_reason(reason), self._text.matched_stop, nvext or {})
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
        """Returns the counts without the tokens after a stop string. The reasoning's include its
        first marker."""
        if self._parser is not None and self._parser.has_reasoning:
            details = usage.completion_tokens_details or CompletionTokensDetails()
            details = replace(details, reasoning_tokens=self._reasoning_tokens)
            usage = replace(usage, completion_tokens_details=details)
        if self._text.matched_stop is None:
            return usage
        count = self._text.consumed
        return replace(usage, completion_tokens=count, total_tokens=usage.prompt_tokens + count)
