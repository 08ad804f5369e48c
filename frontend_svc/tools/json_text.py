"""Finds the end of a JSON object or array in a text that arrives in pieces (pure)."""

from __future__ import annotations

import re

_STRING_STEP = re.compile(r'["\\]')
_VALUE_STEP = re.compile(r'["{}\[\]]')


class JsonScanner:
    """Reads one object or array; the first character opens it. The text is not validated."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def find_end(self, text: str) -> int | None:
        """Processes the next piece. Returns the index after the value; None if it goes on."""
        position = 0
        if self._is_escaped and text:
            self._is_escaped, position = False, 1
        while match := (_STRING_STEP if self._is_in_string else _VALUE_STEP).search(text, position):
            position = match.end()
            character = match[0]
            if character == "\\":
                if position == len(text):
                    self._is_escaped = True
                position += 1
            elif character == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth == 0:
                    return position
        return None
