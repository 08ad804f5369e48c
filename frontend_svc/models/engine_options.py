"""Which options of requests the engines of a model refuse (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, get_args

from common.errors import Unsupported
from common.registry.instances import (
    CONTINUES_PENALTIES_META_KEY,
    ENGINE_META_KEY,
    UNSUPPORTED_OPTIONS_META_KEY,
    Instance,
)
from common.request.preprocessed import PreprocessedRequest, option_names, unsupported_fields

LocalField = Literal[
    "router_config_override", "agent_context", "request_timestamp_ms", "mm_routing_info"
]
# Fields for frontends and routers, which workers refuse.
LOCAL_FIELDS: tuple[LocalField, ...] = get_args(LocalField)


def refused_options(workers: Iterable[Instance]) -> frozenset[str]:
    """Returns the options that every worker refuses; empty if a worker does not report its own."""
    sets = [
        frozenset(worker.meta.get(UNSUPPORTED_OPTIONS_META_KEY, "").split(","))
        for worker in workers
    ]
    return frozenset.intersection(*sets) if sets else frozenset()


def continues_penalties(workers: Iterable[Instance]) -> dict[int, bool]:
    """Returns by the id of each worker whether it counts the output of another one for penalties. A
    worker of an earlier release does not, and would not refuse it."""
    return {worker.id: worker.meta.get(CONTINUES_PENALTIES_META_KEY) == "1" for worker in workers}


def engine_names(workers: Iterable[Instance]) -> dict[int, str]:
    """Returns by the id of each worker the engine that computes its tokens. "": it does not state
    it, as in earlier releases."""
    return {worker.id: worker.meta.get(ENGINE_META_KEY, "") for worker in workers}


def check_options(request: PreprocessedRequest, refused: frozenset[str]) -> None:
    """Raises Unsupported with the first option of a request that no worker can honour."""
    if "routing.cache_salt" in refused and request.routing and request.routing.cache_salt:
        raise _unsupported("routing.cache_salt", request.model)
    if unsupported := unsupported_fields(request, _supported_fields(refused)):
        raise _unsupported(unsupported[0], request.model)


@lru_cache(maxsize=64)
def _supported_fields(refused: frozenset[str]) -> frozenset[str]:
    return (option_names() - refused) | {"routing", *LOCAL_FIELDS}


def _unsupported(field: str, model: str) -> Unsupported:
    return Unsupported(field, f"no worker of {model!r} has an engine that does")
