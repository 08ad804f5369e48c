"""What the engines of a model refuse of requests, and which responses they continue (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Self, get_args

from common.errors import Unsupported
from common.registry.instances import (
    CONTINUES_PENALTIES_META_KEY,
    ENGINE_META_KEY,
    UNSUPPORTED_OPTIONS_META_KEY,
    Instance,
)
from common.request.preprocessed import (
    CONSTRAINT_PREFIX,
    PreprocessedRequest,
    option_names,
    unsupported_fields,
)

LocalField = Literal[
    "router_config_override", "agent_context", "request_timestamp_ms", "mm_routing_info"
]
# Fields for frontends and routers, which workers refuse.
LOCAL_FIELDS: tuple[LocalField, ...] = get_args(LocalField)


def refused_options(workers: Iterable[Instance]) -> frozenset[str]:
    """Returns the options that every worker refuses; empty if a worker does not report its own."""
    sets = [_refused_by(worker) for worker in workers]
    return frozenset.intersection(*sets) if sets else frozenset()


def _refused_by(worker: Instance) -> frozenset[str]:
    return frozenset(worker.meta.get(UNSUPPORTED_OPTIONS_META_KEY, "").split(","))


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What decides whether a worker can continue a response that another one has begun."""

    name: str | None = ""
    """The engine that computes its tokens; another engine computes other tokens. "": it does not
    state it, as in earlier releases; None: it cannot be determined."""

    counts_output: bool = False
    """Whether it counts the output of another worker for penalties. A worker of an earlier release
    does not, and would not refuse it."""

    continues_constraints: bool = True
    """Whether a constraint continues there after the output of another worker. One that does not
    state it refuses such a request itself."""


@dataclass(frozen=True, slots=True)
class ModelEngines:
    """The engines of the workers of a model or an adapter, as of one snapshot."""

    refused_options: frozenset[str]
    """Options of requests that all of them refuse."""

    traits: Mapping[int, EngineTraits]
    """By the id of the worker."""

    @classmethod
    def of(cls, workers: Iterable[Instance]) -> Self:
        workers = tuple(workers)
        traits = {
            worker.id: EngineTraits(
                worker.meta.get(ENGINE_META_KEY, ""),
                worker.meta.get(CONTINUES_PENALTIES_META_KEY) == "1",
                CONSTRAINT_PREFIX not in _refused_by(worker),
            )
            for worker in workers
        }
        return cls(refused_options(workers), traits)

    def traits_of(self, worker_id: int) -> EngineTraits:
        """Returns the traits of a worker. One that the snapshot does not have counts as having the
        engine of all others, None if they differ, and as not counting the output of another one."""
        known = self.traits.get(worker_id)
        if known is not None:
            return known
        names = {other.name for other in self.traits.values()}
        return EngineTraits(None if len(names) > 1 else next(iter(names), ""))


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
