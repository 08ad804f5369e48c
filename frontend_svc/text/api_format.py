"""How an API writes a response (pure).

A response has one or more choices, numbered from 0. Their output arrives interleaved; each has one
finish, after its output. A stream is begin, then output and finish of every choice, then end; or
any prefix of it followed by error. A response that is not streamed is recorded, then written whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from common.errors import MeshError
from common.request.preprocessed import CompletionUsage
from frontend_svc.tools.deltas import Content, Delta

OpenAIFinishReason = Literal["stop", "length", "content_filter", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token and its natural log probability; None: of a token of the prompt without one. raw: its
    bytes, which may be part of a character. top: the most probable tokens at its position, most
    probable first. offset: characters of the choice's text before it."""

    raw: bytes
    logprob: float | None
    top: Sequence[TokenText] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Why a choice ended. stop_string: the one that ended it, or None. nvext: the object with the
    extensions of the response; empty: none."""

    reason: OpenAIFinishReason
    stop_string: str | None = None
    nvext: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class ChoiceResult:
    """A whole choice. tokens: empty unless the client requested log probabilities."""

    end: ChoiceEnd
    deltas: list[Delta] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)


class ChoiceSink(Protocol):
    """Receives the output of choices."""

    def text(self, choice: int, pieces: Iterable[str]) -> bytes:
        """Returns content without log probabilities, one piece per token: `output` for a plain
        text."""
        ...

    def output(self, choice: int, deltas: Sequence[Delta], tokens: Sequence[TokenText]) -> bytes:
        """tokens: of the same text, empty unless the client requested log probabilities."""
        ...

    def finish(self, choice: int, end: ChoiceEnd) -> bytes: ...


class ApiFormat(ChoiceSink, Protocol):
    """Writes one response as an API defines it. keep_alive: sent while a stream is idle."""

    @property
    def keep_alive(self) -> bytes: ...

    def begin(self) -> bytes:
        """Returns the events before the first output."""
        ...

    async def settle(self, choices: Sequence[ChoiceResult], usage: CompletionUsage) -> None:
        """Stores the response, if the API stores responses. Called once, after every choice has
        finished and before `end` or `body`. choices: of a response that is not streamed."""
        ...

    def end(self, usage: CompletionUsage) -> bytes:
        """Returns the last events, after every choice has finished."""
        ...

    def error(self, error: MeshError) -> bytes:
        """Returns the last events of a stream that fails."""
        ...

    def body(self, choices: Sequence[ChoiceResult], usage: CompletionUsage) -> bytes:
        """Returns the body of a response that is not streamed."""
        ...


class ChoiceRecorder:
    """The ChoiceSink of a response that is not streamed."""

    def __init__(self, choices: int) -> None:
        self.results = [ChoiceResult(ChoiceEnd("stop")) for _ in range(choices)]

    def text(self, choice: int, pieces: Iterable[str]) -> bytes:
        self.results[choice].deltas.append(Content("".join(pieces)))
        return b""

    def output(self, choice: int, deltas: Sequence[Delta], tokens: Sequence[TokenText]) -> bytes:
        self.results[choice].deltas += deltas
        self.results[choice].tokens += tokens
        return b""

    def finish(self, choice: int, end: ChoiceEnd) -> bytes:
        self.results[choice].end = end
        return b""


class RecordedFormat:
    """An ApiFormat; `recorder` receives the output of a stream too."""

    def __init__(self, inner: ApiFormat, recorder: ChoiceRecorder) -> None:
        self.keep_alive = inner.keep_alive
        self.begin, self.settle, self.end = inner.begin, inner.settle, inner.end
        self.error, self.body = inner.error, inner.body
        self._inner = inner
        self._recorder = recorder

    def text(self, choice: int, pieces: Iterable[str]) -> bytes:
        pieces = list(pieces)
        self._recorder.text(choice, pieces)
        return self._inner.text(choice, pieces)

    def output(self, choice: int, deltas: Sequence[Delta], tokens: Sequence[TokenText]) -> bytes:
        self._recorder.output(choice, deltas, tokens)
        return self._inner.output(choice, deltas, tokens)

    def finish(self, choice: int, end: ChoiceEnd) -> bytes:
        self._recorder.finish(choice, end)
        return self._inner.finish(choice, end)
