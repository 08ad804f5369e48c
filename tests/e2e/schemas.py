"""JSON schemas as clients send them, by name: pydantic's output, published examples, corners."""

from __future__ import annotations

from typing import Any


# Any: JSON schemas.
def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_STEP = _object(explanation=_STRING, output=_STRING)

SCHEMAS: dict[str, dict[str, Any]] = {
    "one string": _object(name=_STRING),
    "weather": _object(city=_STRING, unit={"type": "string", "enum": ["celsius", "fahrenheit"]}),
    "person": _object(name=_STRING, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "mathematics": _object(steps={"type": "array", "items": _STEP}, final_answer=_STRING),
    "calendar event": _object(
        name=_STRING, date={"type": "string", "format": "date"}, participants={"type": "array"}
    ),
    "optional fields": {"type": "object", "properties": {"a": _STRING, "b": _INTEGER}},
    "nullable": _object(note={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    "type list": _object(value={"type": ["string", "integer", "null"]}),
    "definitions": {
        "$defs": {"Colour": {"enum": ["red", "green"], "type": "string"}},
        **_object(colour={"$ref": "#/$defs/Colour"}, other={"$ref": "#/$defs/Colour"}),
    },
    "linked list": {
        "$defs": {
            "Node": _object(
                value=_INTEGER, next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}
            )
        },
        **_object(head={"$ref": "#/$defs/Node"}),
    },
    "tree": {
        "$defs": {
            "Tree": _object(
                label=_STRING,
                children={"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 2},
            )
        },
        "$ref": "#/$defs/Tree",
    },
    "tagged union": _object(
        item={
            "anyOf": [
                _object(kind={"const": "dog"}, barks={"type": "boolean"}),
                _object(kind={"const": "cat"}, lives=_INTEGER),
            ]
        }
    ),
    "one of": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "all of": {"allOf": [_object(a=_STRING)]},
    "constants": _object(version={"const": 1}, kind={"const": "x"}, flag={"const": True}),
    "number range": _object(ratio={"type": "number", "minimum": 0, "exclusiveMaximum": 1}),
    "exclusive integers": _object(n={"type": "integer", "exclusiveMinimum": 3, "maximum": 17}),
    "pattern": _object(zip={"type": "string", "pattern": "^[0-9]{5}(-[0-9]{4})?$"}),
    "string lengths": _object(code={"type": "string", "minLength": 3, "maxLength": 12}),
    "array bounds": _object(tags={"type": "array", "items": _STRING, "minItems": 2, "maxItems": 4}),
    "tuple": {
        "type": "array",
        "prefixItems": [_STRING, _INTEGER, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "formats": _object(
        id={"type": "string", "format": "uuid"},
        at={"type": "string", "format": "date-time"},
        host={"type": "string", "format": "ipv4"},
        mail={"type": "string", "format": "email"},
    ),
    "map": {"type": "object", "additionalProperties": _INTEGER},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_": _STRING},
        "additionalProperties": False,
    },
    "any object": {"type": "object"},
    "top-level array": {"type": "array", "items": _object(a=_INTEGER), "minItems": 1},
    "top-level enum": {"enum": ["yes", "no", 3, None, True]},
    "unicode": _object(naïve=_STRING, 名前={"enum": ["東京", "🎉"]}),
    "quotes in keys": _object(**{'a "b" \\ c': _STRING}),
    "nested": _object(
        a=_object(b=_object(c=_object(d={"type": "array", "items": {"type": "boolean"}})))
    ),
}
