"""The HTTP API, from the table of routes and its OpenAPI document."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise

# Any: of JSON.
from typing import Any, Final

from pydantic import BaseModel

from frontend_svc.endpoints.route import PATH_PARAMETER, Route
from frontend_svc.routes.document import api_document
from frontend_svc.routes.table import ROUTES
from tools.docs.markdown import slug
from tools.docs.references.text import code, page, prose, table

# Any: JSON.
Schema = Mapping[str, Any]

_NOTE: Final = """[The HTTP API](../http.md) describes keys, limits and what each API does; \
`GET /openapi.json` of a frontend is the source of this page. `null` in a field means absent."""
_LIMITS: Final = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "minLength": "characters ≥",
    "maxLength": "characters ≤",
    "minItems": "items ≥",
    "maxItems": "items ≤",
}
# Limits of 32 and 64 bits are those of any number.
_NO_LIMIT: Final = 2**31 - 1


def http_page() -> str:
    """Returns the page of all routes and of the objects in their bodies."""
    document = api_document(ROUTES, version="")
    schemas: dict[str, Schema] = document["components"]["schemas"]
    bodies = {body.__name__ for route in ROUTES for body in route.operation.bodies}
    parts = [_NOTE, "## Routes"]
    for route in ROUTES:
        parts += _route(route)
    parts.append("## Bodies")
    for name in [*sorted(bodies & set(schemas)), *sorted(set(schemas) - bodies)]:
        parts += _object(name, schemas[name])
    return page("HTTP routes and bodies", "the table of routes", *parts)


def _route(route: Route) -> Iterator[str]:
    operation = route.operation
    path = PATH_PARAMETER.sub(r"{\1}", route.path)
    yield f"### {code(f'{route.method} {path}')}"
    key = "none" if route.is_open else route.permission.value if route.permission else "any"
    facts = [f"{prose(operation.summary)}.", f"Scope of the key: `{key}`."]
    if operation.bodies:
        bodies = [_reference(body.__name__) for body in operation.bodies]
        facts.append(f"Body: {' or '.join(bodies)}.")
    if operation.query is not None:
        names = operation.query.model_json_schema()["properties"]
        facts.append(f"Query: {', '.join(map(code, names))}.")
    if operation.result not in ("", "the result"):
        facts.append(f"Response: {prose(operation.result)}.")
    if operation.streams:
        facts.append("With `stream` the response is `text/event-stream`.")
    yield " ".join(facts)
    if operation.example is not None:
        yield f"```json\n{json.dumps(operation.example, ensure_ascii=False)}\n```"


def _object(name: str, schema: Schema) -> Iterator[str]:
    yield f"### {name}"
    if description := schema.get("description"):
        yield prose(description)
    required = set(schema.get("required", ()))
    fields = schema.get("properties", {})
    if not fields:
        yield f"{_type(schema)}."
        return
    meanings = {key: text for cls in _models(name) for key, text in _field_texts(cls).items()}
    yield table(
        ["field", "value", "default", "meaning"],
        (
            [
                code(field),
                _type(value),
                _default(value, field in required),
                prose(meanings.get(field, "")),
            ]
            for field, value in fields.items()
        ),
    )


def _models(name: str) -> Iterator[type]:
    """Yields the models of a name with their bases, the most general first."""
    waiting: list[type] = [BaseModel]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls.__name__ == name and cls.__module__.startswith("frontend_svc."):
            yield from (base for base in reversed(cls.__mro__) if issubclass(base, BaseModel))


@cache
def _field_texts(cls: type) -> Mapping[str, str]:
    """Returns the texts below the fields of a class, without those of its bases."""
    if not cls.__module__.startswith("frontend_svc."):
        return {}
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, below in pairwise(node.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                found[name] = text
    return found


def _default(schema: Schema, is_required: bool) -> str:
    if is_required:
        return "required"
    default = schema.get("default")
    return "" if default is None else code(json.dumps(default))


def _type(schema: Schema) -> str:
    """Returns the type of a value with its limits, in words."""
    if "$ref" in schema:
        return _reference(schema["$ref"].rpartition("/")[2])
    if branches := schema.get("anyOf"):
        names = [_type(branch) for branch in branches if branch.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(code(json.dumps(value)) for value in values)
    kind = schema.get("type", "any value")
    if kind == "array":
        kind = f"list of {_type(schema.get('items', {}))}"
    return ", ".join([kind, *_limits(schema)])


def _limits(schema: Schema) -> Iterator[str]:
    for name, sign in _LIMITS.items():
        value = schema.get(name)
        if value is not None and abs(value) < _NO_LIMIT:
            yield f"{sign} {value}"


def _reference(name: str) -> str:
    return f"[{name}](#{slug(name)})"
