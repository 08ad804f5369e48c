"""The handlers of routes without a body: models, health, metrics and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import cached_property
from typing import NoReturn, TypeAlias

import orjson
import structlog

from common.errors import Unimplemented
from common.runtime.build import build_name
from frontend_svc.anthropic.models import ModelsQuery, model_info, models_page
from frontend_svc.endpoints.plain import PlainRequest, PlainResponse
from frontend_svc.endpoints.query import parse_query
from frontend_svc.endpoints.request_context import MODEL_OWNER
from frontend_svc.endpoints.route import Route
from frontend_svc.members import Members
from frontend_svc.metrics.targets import metrics_targets
from frontend_svc.models.catalog import ModelCatalog
from frontend_svc.models.served_model import ServedModel
from frontend_svc.openai.output.completion_objects import model_list, model_object
from frontend_svc.readiness import Readiness
from frontend_svc.routes.document import api_document

API_VERSION = "1"
# Takes an Accept header; returns the metrics as text, and its media type.
EncodeMetrics: TypeAlias = Callable[[str], tuple[bytes, str]]

log = structlog.get_logger()


class HealthHandlers:
    """Whether the frontend serves."""

    def __init__(
        self,
        models: ModelCatalog,
        readiness: Callable[[], Readiness],
        combine: Callable[[Readiness], Awaitable[Readiness]],
    ) -> None:
        """
        - readiness: of this process.
        - combine: adds the readiness of the other processes of this frontend.
        """
        self._models = models
        self._readiness = readiness
        self._combine = combine

    async def health(self, _: PlainRequest) -> PlainResponse:
        now = await self._combine(self._readiness())
        return _json_response(
            {
                "status": "healthy" if now.is_ready else "unhealthy",
                "reasons": now.reasons,
                "degraded": now.degraded,
                "models": sorted(self._models.names() - now.models_not_ready.keys()),
                "models_not_ready": dict(now.models_not_ready),
                "canaries": now.canaries,
                "instances": now.instances,
                "build": build_name(),
            },
            200 if now.is_ready else 503,
        )

    async def ready(self, _: PlainRequest) -> PlainResponse:
        now = await self._combine(self._readiness())
        return _json_response(
            {
                "ready": now.is_ready,
                "reasons": now.reasons,
                "degraded": now.degraded,
                "canaries": now.canaries,
            },
            200 if now.is_ready else 503,
        )

    async def live(self, _: PlainRequest) -> PlainResponse:
        return _json_response({"status": "live"})

    async def hello(self, _: PlainRequest) -> PlainResponse:
        return _json_response({"message": "hello"})


class ModelHandlers:
    """The models that can be served now."""

    def __init__(self, models: ModelCatalog, readiness: Callable[[], Readiness]) -> None:
        self._models = models
        self._readiness = readiness

    async def list(self, request: PlainRequest) -> PlainResponse:
        if request.is_anthropic:
            query = parse_query(ModelsQuery, request.query)
            return PlainResponse(models_page(self._entries(), query))
        return PlainResponse(model_list(self._entries()))

    async def get(self, request: PlainRequest) -> PlainResponse:
        entry = self._entry(request.parameters["name"])
        return _json_response(model_info(entry) if request.is_anthropic else entry)

    def _entries(self) -> Sequence[dict[str, object]]:
        """Returns the entry of each model that can be served now."""
        models, missing = self._models, self._readiness().models_not_ready
        ready = {model.name: model for model in models.all() if model.name not in missing}
        weighted = models.weighted_aliases
        entries = [_model_entry(model) for model in ready.values() if model.name not in weighted]
        entries += [
            entry for name in sorted(weighted) if (entry := self._alias_entry(name)) is not None
        ]
        entries += [
            _model_entry(ready[name], alias)
            for alias, name in sorted(models.aliases.items())
            if name in ready and alias not in weighted
        ]
        entries += [
            model_object(engine.name, engine.created, MODEL_OWNER)
            for engine in models.pass_through
            if engine.name not in missing and engine.name not in weighted
        ]
        return entries

    def _entry(self, name: str) -> dict[str, object]:
        """Returns the entry of a model. Raises UnknownModel."""
        if (entry := self._alias_entry(name)) is not None:
            return entry
        for engine in self._models.pass_through:
            if engine.name == name:
                return model_object(name, engine.created, MODEL_OWNER)
        return _model_entry(self._models.get(name), name)

    def _alias_entry(self, name: str) -> dict[str, object] | None:
        """Returns the entry of a configured alias; None if there is none that is served. Its limits
        are the least of its models."""
        models = self._models
        if (alias := models.weighted_aliases.get(name)) is None:
            return None
        names = [*(variant.model for variant in alias.variants), *alias.fallback]
        served = [one for one in models.all() if one.name in map(models.resolve, names)]
        if not any(map(models.is_served, names)):
            return None
        lengths = [one.card.context_length for one in served if one.card.context_length]
        created = min((one.created for one in served), default=0)
        length = min(lengths, default=None)
        entry = model_object(
            name, created, MODEL_OWNER, root=alias.main_model, max_model_len=length
        )
        return entry | {"variants": [variant.model_dump() for variant in alias.variants]}


class MetricsHandler:
    """The Prometheus metrics as text, with exemplars for clients that accept OpenMetrics. Metrics
    that cannot be encoded as UTF-8 text are a 500 and are logged."""

    def __init__(self, encode: EncodeMetrics, path: str) -> None:
        self._encode = encode
        self._path = path

    async def scrape(self, request: PlainRequest) -> PlainResponse:
        # In a thread, so that a large scrape does not delay streams.
        return await asyncio.to_thread(self._scrape, request.accept)

    def _scrape(self, accept: str) -> PlainResponse:
        try:
            text, media_type = self._encode(accept)
            text.decode()
        except Exception:  # a collector may raise anything
            log.exception("metrics_not_encoded", path=self._path)
            text_type = "text/plain; charset=utf-8"
            return PlainResponse(b"Failed to encode metrics", 500, text_type)
        return PlainResponse(text, media_type=media_type)


class TargetsHandler:
    """Where the metrics of all members are, for Prometheus (`http_sd_configs`)."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def get(self, _: PlainRequest) -> PlainResponse:
        targets = await asyncio.to_thread(metrics_targets, self._members.snapshot)
        return PlainResponse(orjson.dumps(targets))


class DocumentHandler:
    """The OpenAPI document of these routes."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = routes

    async def get(self, _: PlainRequest) -> PlainResponse:
        return self._response

    @cached_property
    def _response(self) -> PlainResponse:
        return PlainResponse(orjson.dumps(api_document(self._routes, version=API_VERSION)))


async def refuse_compaction(_: PlainRequest) -> NoReturn:
    """Raises Unimplemented."""
    text = "this server compacts no conversations; send a shorter input, or one with a summary"
    raise Unimplemented(text)


async def refuse_tokenizer_info(_: PlainRequest) -> NoReturn:
    """Raises Unimplemented."""
    text = "this server shows no files of a tokenizer; use /tokenize and /detokenize instead"
    raise Unimplemented(text)


def _model_entry(model: ServedModel, name: str = "") -> dict[str, object]:
    """Returns the entry of a model. name: an alias; empty: the name of the model."""
    return model_object(
        name or model.name,
        model.created,
        MODEL_OWNER,
        base=model.base if model.adapter else None,
        root=None if name in ("", model.name) else model.name,
        max_model_len=model.card.context_length,
    )


def _json_response(value: object, status: int = 200) -> PlainResponse:
    return PlainResponse(orjson.dumps(value), status)
