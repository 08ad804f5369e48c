"""The metrics of the services, read from the services themselves.

Each app is built as at a start, with a registry in memory, and not started: what it would expose is
known before it has a value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics import MetricWrapperBase

from batch_svc.app import BatchApp
from batch_svc.config import BatchConfig
from common.registry.registry import MemoryRegistry
from common.service.base import ServiceApp
from epp_svc.app import EppApp
from epp_svc.config import EppConfig
from frontend_svc.app import FrontendApp
from frontend_svc.config import FrontendConfig
from indexer_svc.app import IndexerApp
from indexer_svc.config import IndexerConfig
from router_svc.app import RouterApp
from router_svc.config import RouterConfig
from worker_svc.app import WorkerApp
from worker_svc.config import WorkerConfig
from worker_svc.metrics import worker_registry

SERVICES = ("frontend", "router", "indexer", "worker", "batch", "epp")
# Samples of each type, by what is added to the name, with the label that is added.
SUFFIXES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "counter": {"_total": ()},
    "gauge": {"": ()},
    "histogram": {"_bucket": ("le",), "_sum": (), "_count": ()},
}
# Units by the end of a name, without `_total`.
_UNITS = ("seconds", "bytes", "tokens", "blocks", "requests", "ratio")


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """One metric, as its services declare it."""

    name: str
    """Of a counter, with `_total`."""

    kind: str
    """counter, gauge or histogram."""

    labels: tuple[str, ...]
    help: str
    services: tuple[str, ...]

    @property
    def unit(self) -> str:
        """What its values are; "" if the name states none."""
        words = self.name.removesuffix("_total").split("_")
        return next((unit for unit in _UNITS if unit in words[-2:]), "")

    @property
    def samples(self) -> Mapping[str, frozenset[str]]:
        """The labels of its samples, by their names."""
        base = self.name.removesuffix("_total") if self.kind == "counter" else self.name
        return {
            f"{base}{suffix}": frozenset((*self.labels, *added))
            for suffix, added in SUFFIXES[self.kind].items()
        }


def catalog() -> list[MetricInfo]:
    """Returns the metrics of all services by name."""
    found: dict[str, MetricInfo] = {}
    for service, registry in asyncio.run(_registries()).items():
        for metric in declared(registry, service):
            known = found.get(metric.name)
            services = (service,) if known is None else (*known.services, service)
            found[metric.name] = replace(metric, services=services)
            if known is not None and found[metric.name] != replace(known, services=services):
                raise ValueError(f"{metric.name} differs between {', '.join(services)}")
    return [found[name] for name in sorted(found)]


def declared(registry: CollectorRegistry, service: str) -> Iterator[MetricInfo]:
    """Yields the metrics of a registry. Families without a sample count too, so the labels are
    those that the families were made with, which prometheus_client keeps to itself."""
    for collector in list(registry._collector_to_names):
        families: Iterable[Metric] = collector.collect()
        labels: Sequence[str] | None = None
        if isinstance(collector, MetricWrapperBase):
            families, labels = collector.describe(), collector._labelnames
        for family in families:
            names = family._labelnames if labels is None else labels  # type: ignore[attr-defined]
            suffix = "_total" if family.type == "counter" else ""
            yield MetricInfo(
                family.name + suffix,
                family.type,
                tuple(names),
                family.documentation,
                (service,),
            )


async def _registries() -> dict[str, CollectorRegistry]:
    """Returns the registry of each service."""
    frontend = FrontendApp(FrontendConfig(registry="memory"), registry=MemoryRegistry())
    epp = EppApp(EppConfig(registry="memory"), registry=MemoryRegistry())
    router = RouterApp(RouterConfig(registry="memory"), registry=MemoryRegistry())
    indexer = IndexerApp(IndexerConfig(registry="memory"), registry=MemoryRegistry())
    worker = WorkerApp(WorkerConfig(registry="memory"), registry=MemoryRegistry())
    batch = BatchApp(BatchConfig(registry="memory"), registry=MemoryRegistry())
    registries = {
        "frontend": frontend.build_metrics(),
        "router": router.metrics.registry,
        "indexer": indexer.metrics.registry,
        "worker": worker_registry(worker.runner),
        "batch": batch.metrics,
        "epp": epp.metrics.registry,
    }
    members: dict[str, ServiceApp[Any]] = {
        "router": router,
        "indexer": indexer,
        "worker": worker,
        "batch": batch,
        "epp": epp,
    }
    for name, app in members.items():
        app.add_member_metrics(registries[name])
    for each in (frontend, *members.values()):
        await each.close()
    return registries
