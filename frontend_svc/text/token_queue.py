"""Aligns tokens with the text that a client receives (pure).

A token is released with the last part of its text. A token without text of its own, such as a part
of a character, is released with the next one that has text. After a stop string, exactly the tokens
that have a part of their text before its end remain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Entry(NamedTuple, Generic[T]):
    token: T
    start: int
    end: int


class TokenQueue(Generic[T]):
    """Tokens whose text has not been sent completely. Offsets are characters of the whole text."""

    def __init__(self) -> None:
        self._entries: deque[_Entry[T]] = deque()
        self.end = 0  # of the text of all tokens
        self._sent = 0

    def add(self, token: T, characters: int) -> None:
        """characters: how many of them the token completes."""
        self._entries.append(_Entry(token, self.end, self.end + characters))
        self.end += characters

    def send(self, characters: int) -> list[T]:
        """Returns the tokens that are complete after so many more characters were sent."""
        self._sent += characters
        return self._release(lambda entry: entry.end <= self._sent)

    def stop(self) -> list[T]:
        """Returns the tokens of the text that was sent, after a stop string."""
        return self._release(lambda entry: entry.start < self._sent)

    def finish(self) -> list[T]:
        """Returns all remaining tokens, at the end of the text."""
        tokens = [entry.token for entry in self._entries]
        self._entries.clear()
        return tokens

    def _release(self, is_released: Callable[[_Entry[T]], bool]) -> list[T]:
        count = 0
        for number, entry in enumerate(self._entries, 1):
            if entry.start < entry.end:
                if not is_released(entry):
                    break
                count = number
        return [self._entries.popleft().token for _ in range(count)]
