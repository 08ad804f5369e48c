"""The router's configuration."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, fields

from common.config import ServiceConfig, at_least, between, knob
from router_svc.core.cost import DEFAULT_KNOBS, CostKnobs
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


def _positive(value: float) -> str | None:
    return None if value > 0 else f"must be above 0, not {value:g}"


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
        default="kv",
        metadata=knob(
            f"Placement policy: {', '.join(SELECTORS)}, or module:factory of your own.",
            check=_selector_problem,
        ),
    )
    overlap_score_credit: float = field(
        default=DEFAULT_KNOBS.overlap_score_credit,
        metadata=knob(
            "Blocks of work that a cached block saves; lower it to weigh load more.",
            check=at_least(0),
        ),
    )
    overlap_score_credit_decay: float = field(
        default=DEFAULT_KNOBS.overlap_score_credit_decay,
        metadata=knob(
            "Raise it (1 halves the credit at one request's excess) when busy workers keep drawing "
            "what they hold.",
            check=at_least(0),
        ),
    )
    prefill_load_scale: float = field(
        default=DEFAULT_KNOBS.prefill_load_scale,
        metadata=knob(
            "Weight of prompt blocks against blocks held; raise it for time to first token.",
            check=at_least(0),
        ),
    )
    decode_active_request_weight: float = field(
        default=DEFAULT_KNOBS.decode_active_request_weight,
        metadata=knob(
            "Blocks that a running request counts beside its own; raise it for long answers.",
            check=at_least(0),
        ),
    )
    host_cache_hit_weight: float = field(
        default=DEFAULT_KNOBS.host_cache_hit_weight,
        metadata=knob("Credit of a block held in host memory only.", check=between(0.0, 1.0)),
    )
    disk_cache_hit_weight: float = field(
        default=DEFAULT_KNOBS.disk_cache_hit_weight,
        metadata=knob("Credit of a block held on disk only.", check=between(0.0, 1.0)),
    )
    router_temperature: float = field(
        default=DEFAULT_KNOBS.router_temperature,
        metadata=knob(
            "Above 0, workers are drawn by cost instead of taking the cheapest; for experiments.",
            check=at_least(0),
        ),
    )
    assume_kv_reuse: bool = field(
        default=DEFAULT_KNOBS.assume_kv_reuse,
        metadata=knob("Count cached blocks as in use already; set it where prompts share much."),
    )
    track_prefill_tokens: bool = field(
        default=DEFAULT_KNOBS.track_prefill_tokens,
        metadata=knob("Charge prompts to be computed; unset it where prefill costs nothing."),
    )
    track_active_blocks: bool = field(
        default=DEFAULT_KNOBS.track_active_blocks,
        metadata=knob("Charge blocks held; unset it where workers never run out of them."),
    )
    recent_miss_weight: float = field(
        default=DEFAULT_KNOBS.recent_miss_weight,
        metadata=knob(
            "How much a worker's recent prefill counts against it; 0 lets idle workers with a "
            "common beginning of prompts draw all of them.",
            check=at_least(0),
        ),
    )
    recent_miss_half_life_s: float = field(
        default=DEFAULT_KNOBS.recent_miss_half_life_s,
        metadata=knob("After this, recent prefill counts half.", check=_positive),
    )
    metrics_port: int | None = field(
        default=None,
        metadata=knob(
            "Serve Prometheus metrics over HTTP on this port (0: any); set it to be scraped.",
            check=between(0, 65535),
        ),
    )

    @property
    def cost_knobs(self) -> CostKnobs:
        """Those of the fields that are knobs of the cost."""
        return CostKnobs(**{spec.name: getattr(self, spec.name) for spec in fields(CostKnobs)})
