"""Defaults for the fields that the requests of a model leave out (pure).

A file has one object, or a list of them: `{"model": "m", "temperature": 0.7,
"max_completion_tokens": 512}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from common.errors import InvalidRequest
from frontend_svc.openai.body.fields import (
    MODEL_CHARS_MAX,
    AtLeastOne,
    StrictModel,
)
from frontend_svc.openai.body.parsing import top_level_or_nvext
from frontend_svc.openai.body.sampling import CutoffFields, NucleusFields
from frontend_svc.openai.body.schema import GenerationRequest
from frontend_svc.openai.body.validation_errors import INVALID_JSON, INVALID_VALUE, invalid_value

R = TypeVar("R", bound=GenerationRequest)


class _ModelFields(StrictModel):
    model: Annotated[str, Field(min_length=1, max_length=MODEL_CHARS_MAX)]
    """The defaults are those of its adapters too, unless they have own ones."""
    max_completion_tokens: AtLeastOne | None = None
    """At most what the context leaves."""


# The bases stand in reverse, as those of `GenerationRequest`.
class RequestTemplate(CutoffFields, NucleusFields, _ModelFields):
    """The defaults of one model."""


_TEMPLATES = TypeAdapter(list[RequestTemplate])
_SAMPLING_FIELDS = (*NucleusFields.model_fields, *CutoffFields.model_fields)


def parse_templates(raw: bytes) -> Mapping[str, RequestTemplate]:
    """Returns the templates of a file by model. Raises InvalidRequest with the path of the first
    invalid field, which begins with the index of its object."""
    try:
        value = orjson.loads(raw)
        templates = _TEMPLATES.validate_python([value] if isinstance(value, dict) else value)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"not valid JSON: {error}", reason=INVALID_JSON) from None
    except ValidationError as error:
        raise invalid_value(error) from None
    by_model = {template.model: template for template in templates}
    if len(by_model) < len(templates):
        text = "Invalid 'model': two templates have the same model."
        raise InvalidRequest(text, "model", reason=INVALID_VALUE)
    return by_model


def with_defaults(request: R, template: RequestTemplate | None) -> R:
    """Returns the request with the sampling fields of the template that it leaves out."""
    if template is None:
        return request
    # Any: the types of the fields.
    defaults: dict[str, Any] = {
        name: default
        for name in _SAMPLING_FIELDS
        if (default := getattr(template, name)) is not None
        and top_level_or_nvext(request, name) is None
    }
    return request.model_copy(update=defaults) if defaults else request
