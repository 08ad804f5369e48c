from __future__ import annotations

from typing import Any

import jsonschema
import orjson
import pytest
from openapi_spec_validator import validate
from pydantic import ValidationError

from frontend_svc.openai.body.schema import ChatRequest
from frontend_svc.routes.document import api_document
from frontend_svc.routes.table import ROUTES

# Any: JSON.
DOCUMENT: dict[str, Any] = api_document(ROUTES, version="1")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_the_document_is_a_valid_openapi_document() -> None:
    validate(orjson.loads(orjson.dumps(DOCUMENT)))


def is_valid(schema_name: str, body: object) -> bool:
    schema = {"$ref": f"#/components/schemas/{schema_name}", **DOCUMENT}
    validator = jsonschema.Draft202012Validator(schema)
    return bool(validator.is_valid(body))


@pytest.mark.parametrize(
    "fields",
    [
        *({"stop": stop} for stop in ("a", ["a", "b"], None, 5, "", [""], [5])),
        *({"tool_choice": choice} for choice in ("none", "any", {"type": "function"}, 1)),
        *({"logit_bias": bias} for bias in ({"5": 1}, {"5": 101}, 5)),
        *({"service_tier": tier} for tier in (None, "auto", "flex", 1)),
        *({"temperature": value} for value in (0, 2, 2.1, "1")),
        *({"max_thinking_tokens": value} for value in (None, 1)),
        *({"messages": messages} for messages in ([], None, [{"role": "x", "content": "a"}])),
        *({"nvext": {"backend_instance_id": one}} for one in (1, "1", True, -1)),
        {"unknown": 1},
    ],
)
def test_the_schema_of_a_body_accepts_what_the_server_accepts(fields: dict[str, Any]) -> None:
    body = CHAT | fields
    try:
        ChatRequest.model_validate(body)
    except ValidationError:
        is_accepted = False
    else:
        is_accepted = True
    assert is_valid("ChatRequest", body) == is_accepted
