"""Errors of invalid request bodies and headers, in OpenAI's wording (pure)."""

from __future__ import annotations

import reprlib

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from common.errors import InvalidRequest, Unsupported
from frontend_svc.openai.body.fields import TAG_PREFIX

# Reasons, which become OpenAI's `code` in lower case.
INVALID_JSON = "INVALID_JSON"
INVALID_TYPE = "INVALID_TYPE"
INVALID_VALUE = "INVALID_VALUE"
MISSING_PARAMETER = "MISSING_REQUIRED_PARAMETER"
UNKNOWN_PARAMETER = "UNKNOWN_PARAMETER"

_EXPECTED_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
# Type of error -> key of the bound in pydantic's context, and the text.
_BOUNDS = {
    "greater_than_equal": ("ge", "a value >= {}"),
    "greater_than": ("gt", "a value > {}"),
    "less_than_equal": ("le", "a value <= {}"),
    "less_than": ("lt", "a value < {}"),
    "string_too_short": ("min_length", "{} or more characters"),
    "string_too_long": ("max_length", "at most {} characters"),
    "too_short": ("min_length", "{} or more items"),
    "too_long": ("max_length", "at most {} items"),
    "literal_error": ("expected", "one of {}"),
    "expected_value": ("expected", "{}"),
}


def invalid_value(validation_error: ValidationError, name: str = "") -> InvalidRequest:
    """Returns the error for the first fault. name: what is invalid; "" is the path in the body."""
    # Models have few keys and lists fail fast, so the list of errors is short.
    error = validation_error.errors(include_url=False)[0]
    path = name or _field_path(error["loc"], error["type"] == "extra_forbidden") or "body"
    return _to_invalid_request(error, path)


def missing_parameter(path: str) -> InvalidRequest:
    """Returns the error for a required field that is absent."""
    return InvalidRequest(f"Missing required parameter: '{path}'.", path, reason=MISSING_PARAMETER)


def _to_invalid_request(error: ErrorDetails, path: str) -> InvalidRequest:
    kind, context, actual = error["type"], error.get("ctx", {}), error["input"]
    if kind == "unsupported":
        return Unsupported(path, context["message"])
    if kind == "missing":
        return missing_parameter(path)
    if kind == "extra_forbidden":
        return InvalidRequest(f"Unknown parameter: '{path}'.", path, reason=UNKNOWN_PARAMETER)
    expected = context.get("expected") if kind == "expected_type" else _EXPECTED_TYPES.get(kind)
    if expected is not None:
        text = f"expected {expected}, but got {type_name(actual)} instead"
        return InvalidRequest(f"Invalid type for '{path}': {text}.", path, reason=INVALID_TYPE)
    if kind in _BOUNDS:
        name, phrase = _BOUNDS[kind]
        text = f"expected {phrase.format(context[name])}, but got {_describe_value(actual)}"
    else:
        text = error["msg"]
    return InvalidRequest(f"Invalid '{path}': {text}.", path, reason=INVALID_VALUE)


def _field_path(location: tuple[int | str, ...], ends_in_key: bool) -> str:
    """`messages[1].content` from pydantic's location. ends_in_key: the last step is client data."""
    path = ""
    last = len(location) - 1
    for index, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith(TAG_PREFIX) or (ends_in_key and index == last):
            name = step if len(step) <= 80 else f"{step[:80]}…"
            path += f".{name}" if path else name
    return path


def type_name(value: object) -> str:
    """Returns the JSON type of a value, with its article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal number"
        case str():
            return "a string"
        case list():
            return "a list"
    return "an object"


def _describe_value(value: object) -> str:
    match value:
        case list():
            return f"a list of {len(value)}"
        case str() if len(value) > 80:
            return f"a string of {len(value)} characters"
        case dict():
            return f"an object of {len(value)} keys"
    return reprlib.repr(value)
