"""The HTTP routes: generation, models, health and metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
import structlog
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from common.api_keys import Scope as Permission
from common.errors import MeshError, Unimplemented
from frontend_svc.access.keys import admit
from frontend_svc.anthropic import errors as anthropic
from frontend_svc.anthropic.endpoint import CountTokensEndpoint, MessagesApi
from frontend_svc.edge.asgi import AsgiApp, Receive, Scope, Send
from frontend_svc.edge.error_response import error_response, send_error
from frontend_svc.embeddings.endpoint import EmbeddingEndpoint
from frontend_svc.endpoints.constraints import ConstraintChecks
from frontend_svc.endpoints.endpoint import EndpointParts, PostEndpoint
from frontend_svc.endpoints.generation import GenerationEndpoint
from frontend_svc.endpoints.generation_api import CHAT_COMPLETIONS, COMPLETIONS, GenerationApi
from frontend_svc.endpoints.request_context import MODEL_OWNER
from frontend_svc.errors import INVALID, error_body, http_error
from frontend_svc.media.fetcher import MediaFetcher
from frontend_svc.media.loader import MediaLoader
from frontend_svc.metrics.families import Endpoint
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.output.completion_objects import model_list, model_object
from frontend_svc.responses.endpoint import (
    InputTokensEndpoint,
    ResponsesApi,
    stored_response_routes,
)
from frontend_svc.responses.stored import StoredResponses
from frontend_svc.routes.document import api_document
from frontend_svc.routes.operations import DOCUMENT_PATH, operations
from frontend_svc.tokenizing.endpoints import DetokenizeEndpoint, TokenizeEndpoint
from frontend_svc.tokenizing.preprocess import PreprocessApi, PreprocessEndpoint

MESSAGES_PATH = "/v1/messages"
# They need no key.
_OPEN_PATHS = frozenset({"/live", "/ready"})
API_VERSION = "1"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the frontend can serve requests now. reasons: why not. degraded: what is served, but
    impaired. models_not_ready: reason by model."""

    is_ready: bool
    reasons: tuple[str, ...]
    degraded: tuple[str, ...]
    models_not_ready: Mapping[str, str]
    instances: tuple[Mapping[str, object], ...]


def build_api(
    parts: EndpointParts,
    registry: CollectorRegistry,
    readiness: Callable[[], Readiness],
    stored_responses: StoredResponses | None,
    encode_metrics: Callable[[CollectorRegistry], bytes] = generate_latest,
    combine: Callable[[Readiness], Awaitable[Readiness]] | None = None,
) -> Starlette:
    """Returns the whole HTTP API. registry: the registry behind /metrics. stored_responses: None:
    none are stored. combine: adds the readiness of the other processes of this frontend; None:
    there are none."""
    config, models = parts.config, parts.models

    async def frontend_readiness() -> Readiness:
        return await combine(readiness()) if combine is not None else readiness()

    async def health(_: Request) -> Response:
        now = await frontend_readiness()
        return _json_response(
            {
                "status": "healthy" if now.is_ready else "unhealthy",
                "reasons": now.reasons,
                "degraded": now.degraded,
                "models": sorted(models.names() - now.models_not_ready.keys()),
                "models_not_ready": dict(now.models_not_ready),
                "instances": now.instances,
            },
            200 if now.is_ready else 503,
        )

    async def ready(_: Request) -> Response:
        now = await frontend_readiness()
        return _json_response(
            {"ready": now.is_ready, "reasons": now.reasons, "degraded": now.degraded},
            200 if now.is_ready else 503,
        )

    async def live(_: Request) -> Response:
        return _json_response({"status": "live"}, 200)

    async def list_models(_: Request) -> Response:
        missing = readiness().models_not_ready
        ready = {model.name: model for model in models.all() if model.name not in missing}
        entries = [_model_entry(model) for model in ready.values()]
        entries += [
            _model_entry(ready[name], alias)
            for alias, name in sorted(models.aliases.items())
            if name in ready
        ]
        entries += [
            model_object(engine.name, engine.created, MODEL_OWNER)
            for engine in models.pass_through
            if engine.name not in missing
        ]
        return Response(model_list(entries), media_type="application/json")

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        for engine in models.pass_through:
            if engine.name == name:
                return _json_response(model_object(name, engine.created, MODEL_OWNER), 200)
        try:
            model = models.get(name)
        except MeshError as error:
            return error_response(http_error(error))
        return _json_response(_model_entry(model, name), 200)

    async def rerank(_: Request) -> Response:
        text = "no engine of this server ranks or scores texts; compare their embeddings instead"
        return error_response(http_error(Unimplemented(text)))

    # Any: Starlette takes ASGI applications and functions.
    text_tools: dict[str, Callable[..., Any]] = {
        "/tokenize": TokenizeEndpoint(Endpoint.TOKENIZE, parts),
        "/detokenize": DetokenizeEndpoint(Endpoint.DETOKENIZE, parts),
        "/rerank": rerank,
        "/score": rerank,
    }

    responses = ResponsesApi(stored_responses)
    constraints = ConstraintChecks(config.grammar_compile_s)
    fetcher = None
    if config.media_urls:
        fetcher = MediaFetcher(hosts=config.media_hosts, timeout_s=config.media_timeout_s)
    media = MediaLoader(fetcher, config.media_limit_mb << 20)

    def generation(api: GenerationApi) -> GenerationEndpoint:
        return GenerationEndpoint(api, parts, constraints, media)

    # It fetches nothing: its response would have the content.
    no_media = MediaLoader(None, config.media_limit_mb << 20)
    preprocess = PreprocessEndpoint(PreprocessApi(stored_responses), parts, constraints, no_media)

    @cache
    def document() -> bytes:
        return orjson.dumps(api_document(operations(config.metrics_path), version=API_VERSION))

    async def openapi(_: Request) -> Response:
        return Response(document(), media_type="application/json")

    api = Starlette(
        routes=[
            Route("/v1/chat/completions", generation(CHAT_COMPLETIONS), methods=["POST"]),
            Route("/v1/completions", generation(COMPLETIONS), methods=["POST"]),
            Route(MESSAGES_PATH, generation(MessagesApi()), methods=["POST"]),
            Route(
                f"{MESSAGES_PATH}/count_tokens",
                CountTokensEndpoint(Endpoint.COUNT_TOKENS, parts),
                methods=["POST"],
            ),
            Route(
                "/v1/embeddings", EmbeddingEndpoint(Endpoint.EMBEDDINGS, parts), methods=["POST"]
            ),
            *(
                Route(prefix + path, endpoint, methods=["POST"])
                for prefix in ("", "/v1")
                for path, endpoint in text_tools.items()
            ),
            Route("/v1/responses", generation(responses), methods=["POST"]),
            Route(
                "/v1/responses/input_tokens",
                InputTokensEndpoint(responses, parts),
                methods=["POST"],
            ),
            *stored_response_routes(stored_responses),
            Route("/v1/internal/preprocess", preprocess, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", get_model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/live", live),
            Route(DOCUMENT_PATH, openapi),
            metrics_route(registry, config.metrics_path, encode=encode_metrics),
        ],
        exception_handlers={404: _not_found, 405: _not_found},
    )
    # A redirect for a trailing slash would make the client send its body again.
    api.router.redirect_slashes = False
    return api


def direct_routes(api: Starlette, admin_paths: Container[str]) -> AsgiApp:
    """The same API, but requests to a PostEndpoint bypass the layers of Starlette: an endpoint
    checks the key and reports its errors itself. admin_paths: need a key of an administrator."""
    endpoints = {
        route.path: route.endpoint
        for route in api.routes
        if isinstance(route, Route) and isinstance(route.endpoint, PostEndpoint)
    }

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        endpoint = endpoints.get(path) if scope["method"] == "POST" else None
        if endpoint is None and path not in _OPEN_PATHS:
            try:
                admit(scope, Permission.ADMIN if path in admin_paths else None)
            except MeshError as error:
                is_messages = path.startswith(MESSAGES_PATH)
                refusal = anthropic.http_error(error, None) if is_messages else http_error(error)
                await send_error(send, refusal)
                return
        await (api if endpoint is None else endpoint)(scope, receive, send)

    return serve


def metrics_route(
    registry: CollectorRegistry,
    path: str,
    *,
    encode: Callable[[CollectorRegistry], bytes] = generate_latest,
) -> Route:
    """Returns the scrape route of `registry`. A registry that cannot be encoded as UTF-8 text
    returns 500 and is logged."""

    # Not a coroutine: Starlette runs it in a thread, so a large scrape does not delay streams.
    def scrape(_: Request) -> Response:
        try:
            text = encode(registry).decode()
        except Exception:  # a collector may raise anything
            log.exception("metrics_not_encoded", path=path)
            return PlainTextResponse("Failed to encode metrics", status_code=500)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    route = Route(path, scrape, methods=["GET"])
    route.methods = {"GET"}  # Starlette adds HEAD
    return route


def _model_entry(model: ServedModel, name: str = "") -> dict[str, object]:
    """name: an alias, or that of the model."""
    return model_object(
        name or model.name,
        model.created,
        MODEL_OWNER,
        base=model.base if model.adapter else None,
        root=None if name in ("", model.name) else model.name,
        max_model_len=model.card.context_length,
    )


def _json_response(value: object, status: int) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    problem = "No such route" if status == 404 else "Method not allowed"
    path = request.url.path
    message = f"{problem}: {request.method} {path}"
    code = "not_found" if status == 404 else "method_not_allowed"
    if path.startswith(MESSAGES_PATH):
        body = anthropic.error_body(status, message, None, code, None)
    else:
        body = error_body(message, INVALID, None, code)
    response = Response(body, status, media_type="application/json")
    response.headers.update(getattr(error, "headers", None) or {})  # Allow, with 405
    return response
