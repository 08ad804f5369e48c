"""The OpenAPI document of the HTTP API (pure).

The schema of a body is that of the pydantic model which validates it, so the document states what
the server accepts. Rules that no schema can state (combinations of fields) are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

# Any, here and below: JSON.
Json = Mapping[str, Any]

OPENAPI_VERSION: Final = "3.1.0"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_EMPTY_BRANCHES: Final[tuple[Json, ...]] = ({}, {"enum": [None]})
_COMPONENT: Final = "#/components/schemas/{model}"

ERROR: Final[Json] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    path: with parameters as `{name}`. bodies: models of the request, of which one applies. example:
    of the body, for a mesh that serves the model `sim`. result: what a 200 contains; "": there is
    no such response. streams: whether
    it is a stream of events if the body has `stream`. media_type: of the response. failure: a
    status whose body is that of a 200; None: there is none. query: model of the query
    parameters. error: schema of every other error.
    """

    method: str
    path: str
    summary: str
    bodies: tuple[type[BaseModel], ...] = ()
    example: Json | None = None
    result: str = "the result"
    streams: bool = False
    media_type: str = JSON
    failure: int | None = None
    query: type[BaseModel] | None = None
    error: Json = field(default_factory=lambda: ERROR)


def api_document(operations: Iterable[Operation], *, version: str) -> dict[str, Any]:
    """The document of these operations."""
    operations = tuple(operations)
    models = list(dict.fromkeys(body for one in operations for body in one.bodies))
    references, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_COMPONENT
    )
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        schemas = [references[body, "validation"] for body in one.bodies]
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schemas)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "KVMesh", "version": version},
        "paths": paths,
        "components": {"schemas": _clean(definitions.get("$defs", {}))},
    }


def _operation(one: Operation, body_schemas: Sequence[Json]) -> dict[str, Any]:
    content: dict[str, Any] = {one.media_type: {"schema": _response_schema(one)}}
    if one.streams:
        content[EVENTS] = {}  # a schema would be that of one event
    document: dict[str, Any] = {
        "summary": one.summary,
        "operationId": _operation_id(one),
        "responses": {
            **({"200": {"description": one.result, "content": content}} if one.result else {}),
            "default": {
                "description": "an error",
                "content": {JSON: {"schema": one.error}},
            },
        },
    }
    if one.failure is not None:
        document["responses"][str(one.failure)] = document["responses"]["200"]
    if parameters := [*_path_parameters(one.path), *_query_parameters(one.query)]:
        document["parameters"] = parameters
    if body_schemas:
        schema = body_schemas[0] if len(body_schemas) == 1 else {"anyOf": [*body_schemas]}
        body: dict[str, Any] = {"schema": schema}
        if one.example is not None:
            body["example"] = one.example
        document["requestBody"] = {"required": True, "content": {JSON: body}}
    return document


def _path_parameters(path: str) -> Iterator[Json]:
    for part in path.split("/"):
        if part.startswith("{"):
            schema = {"type": "string"}
            yield {"name": part[1:-1], "in": "path", "required": True, "schema": schema}


def _query_parameters(query: type[BaseModel] | None) -> Iterator[Json]:
    if query is not None:
        for name, schema in query.model_json_schema()["properties"].items():
            yield {"name": name, "in": "query", "schema": _clean(schema)}


def _response_schema(one: Operation) -> Json:
    return {"type": "object"} if one.media_type == JSON else {"type": "string"}


def _operation_id(one: Operation) -> str:
    words = one.path.replace("{", "by_").replace("}", "").replace(".", "_").split("/")
    return "_".join([one.method.lower(), *filter(None, words)])


def _clean(schema: Any) -> Any:
    """A schema without the branches of unions that raise the error of all others, which accept
    nothing."""
    match schema:
        case dict():
            cleaned = {key: _clean(value) for key, value in schema.items()}
            if "oneOf" in cleaned:
                branches = cleaned.pop("oneOf")
                cleaned["anyOf"] = [one for one in branches if one not in _EMPTY_BRANCHES]
                cleaned.pop("discriminator", None)
            return cleaned
        case list():
            return [_clean(one) for one in schema]
    return schema
