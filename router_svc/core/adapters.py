"""Which adapters a model's workers have, and had until lately (pure).

An adapter that left with its worker is "nobody there" (503) for MODEL_MEMORY_S, as its model would
be, and only then "unknown" (404): requests that it was serving look for another worker just then.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import NotFound, Unavailable
from common.registry.instances import Instance
from router_svc.core.eligibility import RETRY_AFTER_S
from router_svc.core.fleet import GONE_MODEL_TTL_S
from router_svc.core.query import Query

RECENTLY_REMOVED_MAX = 1024


class AdapterResidency:
    """Invariant: an adapter is either resident somewhere or remembered as gone, never both."""

    def __init__(self) -> None:
        self._resident: frozenset[tuple[str, str]] = frozenset()
        # (model, adapter) -> when it was seen to be gone; oldest first.
        self._recently_removed: dict[tuple[str, str], float] = {}

    def update(self, workers: Iterable[Instance], now: float) -> None:
        """These are the workers now."""
        resident = frozenset(
            (worker.model, adapter_name) for worker in workers for adapter_name in worker.loras
        )
        for adapter_key in sorted(self._resident - resident):
            self._recently_removed[adapter_key] = now
        for adapter_key in resident & self._recently_removed.keys():
            del self._recently_removed[adapter_key]
        for adapter_key in [
            p for p, at in self._recently_removed.items() if now - at >= GONE_MODEL_TTL_S
        ]:
            del self._recently_removed[adapter_key]
        while len(self._recently_removed) > RECENTLY_REMOVED_MAX:
            del self._recently_removed[next(iter(self._recently_removed))]
        self._resident = resident

    def check(self, query: Query, now: float) -> None:
        """Whether some worker of the model has the adapter that the query names, if it names one.

        Raises Unavailable where one had it lately, NotFound where none did; both name it.
        """
        adapter_name = query.routing.lora_name if query.routing is not None else None
        if not adapter_name or (query.model, adapter_name) in self._resident:
            return
        metadata = {"model": query.model, "adapter": adapter_name}
        removed_at = self._recently_removed.get((query.model, adapter_name))
        if removed_at is not None and now - removed_at < GONE_MODEL_TTL_S:
            raise Unavailable(
                f"nobody can serve {query.model!r}: the last worker with the adapter "
                f"{adapter_name!r} left",
                RETRY_AFTER_S,
                reason="NO_ADAPTER_WORKER",
                metadata=metadata,
            )
        raise NotFound(
            f"no worker of {query.model!r} has the adapter {adapter_name!r}",
            field="query.routing.lora_name",
            reason="UNKNOWN_ADAPTER",
            metadata=metadata,
        )
