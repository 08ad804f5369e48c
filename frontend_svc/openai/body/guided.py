"""The constraint that a body puts on the text of its response (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
    if isinstance(request, ChatRequest):
        found += _response_format(request)
    if len(found) > 1:
        raise not_combined(found[1].field, f"'{found[0].field}'; set only one")
    whitespace = top_level_or_nvext(request, "guided_whitespace_pattern")
    if whitespace is not None and not any(constraint.guided.json for constraint in found):
        text = "'guided_whitespace_pattern' needs a JSON constraint."
        raise InvalidRequest(text, "guided_whitespace_pattern", reason=INVALID_VALUE)
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
    return GuidedDecoding(json=value, whitespace_pattern=_whitespace(request))


def _response_format(request: ChatRequest) -> list[Constraint]:
    form = request.response_format
    if form is None:
        return []
    if form.json_schema is not None and form.type != "json_schema":
        text = "'response_format.json_schema' needs the type json_schema."
        raise InvalidRequest(text, "response_format.json_schema", reason=INVALID_VALUE)
    whitespace = _whitespace(request)
    match form.type:
        case "text":
            return []
        case "json_object":
            guided = GuidedDecoding(json=_ANY_OBJECT, whitespace_pattern=whitespace)
            return [Constraint(guided, "response_format")]
    if form.json_schema is None:
        raise missing_parameter("response_format.json_schema")
    schema = form.json_schema.json_schema
    guided = GuidedDecoding(
        json=_ANY_OBJECT if schema is None else schema, whitespace_pattern=whitespace
    )
    return [Constraint(guided, "response_format.json_schema.schema")]


def _whitespace(request: GenerationRequest) -> str | None:
    pattern: str | None = top_level_or_nvext(request, "guided_whitespace_pattern")
    return pattern


def not_combined(field: str, other: str) -> InvalidRequest:
    """Returns the error for a field that cannot be combined with others. other: names them."""
    text = f"'{field}' cannot be combined with {other}."
    return InvalidRequest(text, field, reason=INVALID_VALUE)
