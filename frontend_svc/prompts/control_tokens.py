"""Keeps text of clients from acting as control tokens of the model (pure).

A chat template writes control tokens such as `<|im_end|>` around the text of the messages. If a
message contains the same characters, the tokenizer would take them for the control token, and the
text could forge a turn of the conversation. So strings of a client are marked before the template
renders them: a character that occurs nowhere else stands inside each control token. In the rendered
prompt, a control token without a mark is the template's; `split` returns the prompt cut at these,
and the encoder encodes all other text as ordinary text.

Only requests whose strings contain a control token are marked; all others take the ordinary path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

# The marks, of which the first is used that the request does not contain: hexagrams, which have no
# case, are no white space, and which Python's repr does not escape.
_MARKS = [chr(code) for code in range(0x4DC0, 0x4E00)]
# Some tokenizers do not declare their role and tool markers as special.
_MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)


def is_control_token(content: str, *, is_special: bool) -> bool:
    """Returns whether an added token of a tokenizer controls the model. is_special: as its
    tokenizer.json declares it."""
    # A mark needs two characters around it.
    return len(content) > 1 and (is_special or _MARKER.fullmatch(content) is not None)


class ControlTokens:
    """The control tokens of a model, by content."""

    def __init__(self, contents: Iterable[str]) -> None:
        # Longest first, as tokenizers match them.
        self.contents = tuple(sorted(set(contents), key=lambda content: (-len(content), content)))
        any_token = "|".join(map(re.escape, self.contents))
        self._split = re.compile(f"({any_token})")
        self._start = re.compile(f"(?={any_token})")
        in_json = [orjson.dumps(content)[1:-1] for content in self.contents]
        self._in_json = re.compile(b"|".join(map(re.escape, in_json)))
        # Nearly all requests contain none of these, and the search for them takes no time.
        self._prefixes = tuple({content[:2] for content in in_json})

    def are_in(self, messages: Sequence[Any], *others: object) -> bool:
        """Returns whether a string of a client contains or could form a control token. messages:
        with content as text or as text parts, which templates join. others: more JSON values."""
        if not self.contents:
            return False
        joined = ["".join(part.strip() for part in texts) for texts in map(_part_texts, messages)]
        try:
            text = orjson.dumps((messages, others, joined))
        except TypeError:  # integers above 64 bits and lone surrogates, in arguments of calls
            return True
        return any(prefix in text for prefix in self._prefixes) and (
            self._in_json.search(text) is not None
        )

    # Any, here and below: JSON.
    def mark_messages(self, messages: Sequence[Any], mark: str) -> list[Any]:
        """`mark_value` of messages, and with marks between text parts."""
        return [self._mark_parts(self.mark_value(message, mark), mark) for message in messages]

    def mark_value(self, value: Any, mark: str) -> Any:
        """Returns the JSON value with a mark in each control token, also in keys."""
        match value:
            case str():
                return self._mark_text(value, mark)
            case dict():
                return {
                    self._mark_text(key, mark): self.mark_value(item, mark)
                    for key, item in value.items()
                }
            case list():
                return [self.mark_value(item, mark) for item in value]
        return value

    def split(self, prompt: str, mark: str) -> tuple[str, ...]:
        """Returns the prompt of marked strings without its marks: text and control token by
        turns, from text to text."""
        # A template may escape characters that are not ASCII.
        marks = re.compile(f"{mark}|{re.escape(_escape(mark))}")
        return tuple(marks.sub("", piece) for piece in self._split.split(prompt))

    def _mark_text(self, text: str, mark: str) -> str:
        starts = [found.start() + 1 for found in self._start.finditer(text)]
        if not starts:
            return text
        return mark.join(text[a:b] for a, b in zip([0, *starts], [*starts, None], strict=True))

    def _mark_parts(self, message: Any, mark: str) -> Any:
        if not _part_texts(message):
            return message
        first, *others = message["content"]
        # After the white space, which a template may strip.
        marked = [
            part | {"text": re.sub(r"\S", lambda found: mark + found[0], part["text"], count=1)}
            if "text" in part
            else part
            for part in others
        ]
        return message | {"content": [first, *marked]}


def unused_mark(*values: object) -> str | None:
    """Returns a mark that the values do not contain; None if they contain all."""
    text = repr(values)
    return next((mark for mark in _MARKS if mark not in text and _escape(mark) not in text), None)


def _escape(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _part_texts(message: Any) -> list[str]:
    content = message["content"]
    return [part["text"] for part in content if "text" in part] if isinstance(content, list) else []
