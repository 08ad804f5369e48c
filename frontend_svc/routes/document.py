"""The OpenAPI document of the HTTP API (pure).

The schema of a body is that of the pydantic model which validates it, so the document states what
the server accepts. Rules that no schema can state (combinations of fields) are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from frontend_svc.endpoints.route import PATH_PARAMETER, Operation, Route

# Any, here and below: JSON.
Json = Mapping[str, Any]

OPENAPI_VERSION: Final = "3.1.0"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_EMPTY_BRANCHES: Final[tuple[Json, ...]] = ({}, {"enum": [None]})
_COMPONENT: Final = "#/components/schemas/{model}"


def api_document(routes: Iterable[Route], *, version: str) -> dict[str, Any]:
    """Returns the document of these routes."""
    routes = tuple(routes)
    models = list(dict.fromkeys(body for route in routes for body in route.operation.bodies))
    references, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template=_COMPONENT
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        schemas = [references[body, "validation"] for body in route.operation.bodies]
        path = PATH_PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schemas)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "KVMesh", "version": version},
        "paths": paths,
        "components": {"schemas": _clean(definitions.get("$defs", {}))},
    }


def _operation(route: Route, path: str, body_schemas: Sequence[Json]) -> dict[str, Any]:
    """Returns the description of a route.

    - path: with parameters as `{name}`.
    """
    operation = route.operation
    content: dict[str, Any] = {operation.media_type: {"schema": _response_schema(operation)}}
    if operation.streams:
        content[EVENTS] = {}  # a schema would be that of one event
    result = {"200": {"description": operation.result, "content": content}}
    document: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": _operation_id(route.method, path),
        "responses": {
            **(result if operation.result else {}),
            "default": {
                "description": "an error",
                "content": {JSON: {"schema": route.errors.schema}},
            },
        },
    }
    if operation.failure is not None:
        document["responses"][str(operation.failure)] = document["responses"]["200"]
    if parameters := [*_path_parameters(path), *_query_parameters(operation.query)]:
        document["parameters"] = parameters
    if body_schemas:
        schema = body_schemas[0] if len(body_schemas) == 1 else {"anyOf": [*body_schemas]}
        body: dict[str, Any] = {"schema": schema}
        if operation.example is not None:
            body["example"] = operation.example
        document["requestBody"] = {"required": True, "content": {operation.body_type: body}}
    return document


def _path_parameters(path: str) -> Iterator[Json]:
    for name, _ in PATH_PARAMETER.findall(path):
        schema = {"type": "string"}
        yield {"name": name, "in": "path", "required": True, "schema": schema}


def _query_parameters(query: type[BaseModel] | None) -> Iterator[Json]:
    if query is not None:
        found = query.model_json_schema()
        required = found.get("required", ())
        for name, schema in found["properties"].items():
            parameter = {"name": name, "in": "query", "schema": _clean(schema)}
            yield parameter | ({"required": True} if name in required else {})


def _response_schema(operation: Operation) -> Json:
    if operation.media_type != JSON:
        return {"type": "string"}
    item = {"type": "object"}
    return {"type": "array", "items": item} if operation.is_list else item


def _operation_id(method: str, path: str) -> str:
    words = path.replace("{", "by_").replace("}", "").replace(".", "_").split("/")
    return "_".join([method.lower(), *filter(None, words)])


def _clean(schema: Any) -> Any:
    """Returns a schema without the branches of unions that raise the error of all others, which
    accept nothing."""
    match schema:
        case dict():
            cleaned = {key: _clean(value) for key, value in schema.items()}
            if "oneOf" in cleaned:
                branches = cleaned.pop("oneOf")
                cleaned["anyOf"] = [branch for branch in branches if branch not in _EMPTY_BRANCHES]
                cleaned.pop("discriminator", None)
            return cleaned
        case list():
            return [_clean(item) for item in schema]
    return schema
