"""Reads the query of a request (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError

from frontend_svc.openai.body.fields import StrictModel
from frontend_svc.openai.body.validation_errors import invalid_value

# Parameters that are lists, of all routes.
_LISTS = frozenset({"include", "group_by"})

Q = TypeVar("Q", bound=StrictModel)


def parse_query(model: type[Q], pairs: Iterable[tuple[str, str]]) -> Q:
    """pairs: names and values; a list has a name of `_LISTS`, also with `[]`. Raises InvalidRequest
    with the name of the first invalid parameter."""
    # Any: texts, and lists of texts.
    values: dict[str, Any] = {}
    for name, value in pairs:
        name = name.removesuffix("[]")
        if name in _LISTS:
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise invalid_value(error) from None
