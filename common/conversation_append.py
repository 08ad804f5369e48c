"""Where the items of a response go when it has ended (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Append:
    """The conversation of a response; "": none. first_item: the first of its input items that is
    not in the conversation."""

    conversation_id: str = ""
    first_item: int = 0


NO_CONVERSATION: Final = Append()
