"""The router's configuration."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from common.config import ServiceConfig, between, knob
from router_svc.core.select import SELECTORS, WorkerSelector


def load_selector(name: str) -> WorkerSelector:
    """A built-in selector by name, or what `module:factory` makes, called without arguments.

    Raises ValueError; its message continues a sentence that began with the name.
    """
    if name in SELECTORS:
        return SELECTORS[name]()
    module_name, colon, factory_name = name.partition(":")
    if not (module_name and colon and factory_name):
        raise ValueError(f"is none of {', '.join(SELECTORS)}, nor module:factory")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
        selector: WorkerSelector = factory()
    except Exception as error:
        # It is somebody else's code: whatever it raises means that there is no selector.
        raise ValueError(f"cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(selector, "name", None), str) or not callable(
        getattr(selector, "select", None)
    ):
        raise ValueError("makes something that is no WorkerSelector: it needs name and select")
    return selector


def _selector_problem(name: str) -> str | None:
    try:
        load_selector(name)
    except ValueError as error:
        return f"{name!r} {error}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ServiceConfig):
    """Flags and `KVMESH_ROUTER_*` variables of `python -m router_svc`."""

    selector: str = field(
        default="least_loaded",
        metadata=knob(
            f"Placement policy: {', '.join(SELECTORS)}, or module:factory of your own.",
            check=_selector_problem,
        ),
    )
    metrics_port: int | None = field(
        default=None,
        metadata=knob(
            "Serve Prometheus metrics over HTTP on this port (0: any); set it to be scraped.",
            check=between(0, 65535),
        ),
    )
