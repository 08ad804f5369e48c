"""Tokens to the text a client sees: detokenising, then stop strings with hold-back (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from frontend_svc.core.text.stop_strings import StopMachine


class Detokenises(Protocol):
    """Detokenizer or StreamDetokenizer."""

    def feed(self, token_ids: Sequence[int]) -> list[str]:
        """One text piece per token."""

    def finish(self) -> str:
        """What is left."""


class TextFlow:
    """One answer's text.

    consumed: tokens that the answer consists of; those after a stop string do not count.
    stopped: the stop string that ended the answer, or None.
    """

    __slots__ = ("_detokenizer", "_stop", "consumed", "stopped")

    def __init__(self, detokenizer: Detokenises, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stop = StopMachine(stops) if stops else None
        self.consumed = 0
        self.stopped: str | None = None

    def feed(self, token_ids: Sequence[int]) -> list[str]:
        """The text each token lets out, without empty pieces; nothing once `stopped` is set."""
        pieces = self._detokenizer.feed(token_ids)
        stop = self._stop
        if stop is None:
            self.consumed += len(token_ids)
            return [piece for piece in pieces if piece]
        out = []
        for piece in pieces:
            if self.stopped is not None:
                break
            self.consumed += 1
            step = stop.feed(piece)
            if step.emit:
                out.append(step.emit)
            self.stopped = step.matched
        return out

    def finish(self) -> str:
        """The text that was held back, once no more tokens come."""
        if self.stopped is not None:
            return ""
        rest = self._detokenizer.finish()
        if self._stop is None:
            return rest
        step = self._stop.feed(rest) if rest else None
        if step is not None and step.matched is not None:
            self.stopped = step.matched
            return step.emit
        return (step.emit if step is not None else "") + self._stop.finish()
