"""Which adapters a model's workers have, and had until lately (pure).

An adapter that left with its worker is "nobody there" (503) for MODEL_MEMORY_S, as its model would
be, and only then "unknown" (404): requests that it was serving look for another worker just then.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.errors import NotFound, Unavailable
from common.registry.instances import Instance
from router_svc.core.eligibility import RETRY_AFTER_S
from router_svc.core.fleet import MODEL_MEMORY_S
from router_svc.core.query import Query

GONE_MAX = 1024


class Adapters:
    """Invariant: an adapter is either resident somewhere or remembered as gone, never both."""

    def __init__(self) -> None:
        self._resident: frozenset[tuple[str, str]] = frozenset()
        # (model, adapter) -> when it was seen to be gone; oldest first.
        self._gone: dict[tuple[str, str], float] = {}

    def update(self, workers: Iterable[Instance], now: float) -> None:
        """These are the workers now."""
        resident = frozenset((worker.model, lora) for worker in workers for lora in worker.loras)
        for pair in sorted(self._resident - resident):
            self._gone[pair] = now
        for pair in resident & self._gone.keys():
            del self._gone[pair]
        for pair in [p for p, at in self._gone.items() if now - at >= MODEL_MEMORY_S]:
            del self._gone[pair]
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        self._resident = resident

    def check(self, query: Query, now: float) -> None:
        """Whether some worker of the model has the adapter that the query names, if it names one.

        Raises Unavailable where one had it lately, NotFound where none did; both name it.
        """
        lora = query.routing.lora_name if query.routing is not None else None
        if not lora or (query.model, lora) in self._resident:
            return
        facts = {"model": query.model, "adapter": lora}
        gone_at = self._gone.get((query.model, lora))
        if gone_at is not None and now - gone_at < MODEL_MEMORY_S:
            raise Unavailable(
                f"nobody can serve {query.model!r}: the last worker with the adapter {lora!r} left",
                RETRY_AFTER_S,
                reason="NO_ADAPTER_WORKER",
                metadata=facts,
            )
        raise NotFound(
            f"no worker of {query.model!r} has the adapter {lora!r}",
            field="query.routing.lora_name",
            reason="UNKNOWN_ADAPTER",
            metadata=facts,
        )
