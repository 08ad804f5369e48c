"""What bodies of pooling requests share (pure): their fields, and the limits of their prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from common.errors import InvalidRequest, PromptTooLong
from frontend_svc.openai.body.fields import MODEL_CHARS_MAX
from frontend_svc.openai.body.ignored import CallerFields

PROMPTS_MAX = 2048
# Of all prompts of one request together.
TOKENS_MAX = 300_000
# `code` of the error above it, in upper case.
TOO_MANY_TOKENS = "TOO_MANY_TOKENS"

Text = Annotated[str, Field(min_length=1)]


class PoolingRequest(CallerFields, ABC):
    """A body with prompts."""

    prompts_field: ClassVar[str]
    """The field with the prompts."""

    model: Annotated[str, Field(min_length=1, max_length=MODEL_CHARS_MAX)]
    user: str | None = None

    @property
    def is_stream(self) -> bool:
        return False

    @abstractmethod
    def prompt_name(self, index: int) -> str:
        """Returns the path of a prompt in the body."""


def check_lengths(request: PoolingRequest, counts: Sequence[int], context_length: int) -> None:
    """Raises PromptTooLong if a prompt does not fit, and InvalidRequest if all together have more
    than TOKENS_MAX tokens. counts: tokens of each prompt, or lower bounds. context_length: 0:
    unknown; engines need one position for themselves."""
    for index, count in enumerate(counts):
        if context_length and count >= context_length:
            name = request.prompt_name(index)
            text = f"expected at most {context_length - 1} tokens, but got {count}"
            raise PromptTooLong(f"Invalid '{name}': {text}.", name)
    if (total := sum(counts)) > TOKENS_MAX:
        field = request.prompts_field
        text = f"expected at most {TOKENS_MAX} tokens in all inputs together, but got {total}"
        message = f"Invalid '{field}': {text}; send several requests."
        raise InvalidRequest(message, field, reason=TOO_MANY_TOKENS)
