"""The constraint that a body puts on the text of its response (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from common.errors import InvalidRequest
from common.request.preprocessed import GuidedDecoding
from frontend_svc.openai.body.parsing import top_level_or_nvext
from frontend_svc.openai.body.schema import ChatRequest, GenerationRequest
from frontend_svc.openai.body.validation_errors import INVALID_VALUE, missing_parameter

_GUIDED_FIELDS: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_ANY_OBJECT: Final = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint, and the field of the body that requested it."""

    guided: GuidedDecoding
    field: str


def requested_constraint(request: GenerationRequest) -> Constraint | None:
    """Returns the constraint of a request; None if its text is free. Raises InvalidRequest for two
    constraints, and for fields that cannot be combined with one."""
    found = [
        Constraint(_guided_decoding(request, name), name)
        for name in _GUIDED_FIELDS
        if top_level_or_nvext(request, name) is not None
    ]
    found += _constraints_by_other_names(request)
    if isinstance(request, ChatRequest):
        found += _response_format(request)
    if len(found) > 1:
        raise not_combined(found[1].field, f"'{found[0].field}'; set only one")
    whitespace, field = _whitespace(request)
    if whitespace is not None and not any(constraint.guided.json for constraint in found):
        text = f"'{field}' needs a JSON constraint."
        raise InvalidRequest(text, field, reason=INVALID_VALUE)
    if not found:
        return None
    check_end(request, found[0].field)
    return found[0]


def check_end(request: GenerationRequest, field: str) -> None:
    """Raises InvalidRequest if the end of a response is fixed by other fields than `field`, whose
    constraint decides the end."""
    if request.min_tokens:
        raise not_combined("min_tokens", f"'{field}', which decides the end")
    if top_level_or_nvext(request, "ignore_eos"):
        raise not_combined("ignore_eos", f"'{field}', which decides the end")


def _guided_decoding(request: GenerationRequest, name: str) -> GuidedDecoding:
    value = top_level_or_nvext(request, name)
    match name:
        case "guided_regex":
            return GuidedDecoding(regex=value)
        case "guided_choice":
            return GuidedDecoding(choice=tuple(value))
        case "guided_grammar":
            return GuidedDecoding(grammar=value)
    return _json_form(request, value)


def _constraints_by_other_names(request: GenerationRequest) -> Iterator[Constraint]:
    """Yields the constraints under the names of `ConstraintFields`."""
    if request.regex is not None:
        yield Constraint(GuidedDecoding(regex=request.regex), "regex")
    if request.ebnf is not None:
        yield Constraint(GuidedDecoding(grammar=request.ebnf), "ebnf")
    if (schema := _schema(request.json_schema, "json_schema")) is not None:
        yield Constraint(_json_form(request, schema), "json_schema")
    if (outputs := request.structured_outputs) is None:
        return
    path = "structured_outputs"
    if (schema := _schema(outputs.json_schema, f"{path}.json")) is not None:
        yield Constraint(_json_form(request, schema), f"{path}.json")
    if outputs.json_object:
        yield Constraint(_json_form(request, _ANY_OBJECT), f"{path}.json_object")
    if outputs.regex is not None:
        yield Constraint(GuidedDecoding(regex=outputs.regex), f"{path}.regex")
    if outputs.choice is not None:
        yield Constraint(GuidedDecoding(choice=tuple(outputs.choice)), f"{path}.choice")
    if outputs.grammar is not None:
        yield Constraint(GuidedDecoding(grammar=outputs.grammar), f"{path}.grammar")


# Any, here and below: a JSON schema.
def _schema(value: dict[str, Any] | str | None, field: str) -> dict[str, Any] | None:
    """Returns a schema that is an object or JSON text. Raises InvalidRequest."""
    if not isinstance(value, str):
        return value
    try:
        schema = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        text = f"Invalid '{field}': not valid JSON: {error.msg} (character {error.pos})."
        raise InvalidRequest(text, field, reason=INVALID_VALUE) from None
    if not isinstance(schema, dict):
        text = f"Invalid '{field}': expected the JSON of an object."
        raise InvalidRequest(text, field, reason=INVALID_VALUE)
    return schema


def _json_form(request: GenerationRequest, schema: dict[str, Any]) -> GuidedDecoding:
    return GuidedDecoding(json=schema, whitespace_pattern=_whitespace(request)[0])


def _response_format(request: ChatRequest) -> list[Constraint]:
    form = request.response_format
    if form is None:
        return []
    if form.json_schema is not None and form.type != "json_schema":
        text = "'response_format.json_schema' needs the type json_schema."
        raise InvalidRequest(text, "response_format.json_schema", reason=INVALID_VALUE)
    match form.type:
        case "text":
            return []
        case "json_object":
            return [Constraint(_json_form(request, _ANY_OBJECT), "response_format")]
    if form.json_schema is None:
        raise missing_parameter("response_format.json_schema")
    schema = form.json_schema.json_schema
    guided = _json_form(request, _ANY_OBJECT if schema is None else schema)
    return [Constraint(guided, "response_format.json_schema.schema")]


def _whitespace(request: GenerationRequest) -> tuple[str | None, str]:
    """Returns the pattern of white space in JSON, and the field that sets it."""
    outputs = request.structured_outputs
    if outputs is not None and outputs.whitespace_pattern is not None:
        return outputs.whitespace_pattern, "structured_outputs.whitespace_pattern"
    name = "guided_whitespace_pattern"
    return top_level_or_nvext(request, name), name


def not_combined(field: str, other: str) -> InvalidRequest:
    """Returns the error for a field that cannot be combined with others. other: names them."""
    text = f"'{field}' cannot be combined with {other}."
    return InvalidRequest(text, field, reason=INVALID_VALUE)
