"""`--set NAME=VALUE`: settings of the replayed routers, with their names in the router (pure)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from router_svc.core.admission import NO_QUEUE, QueuePolicy, QueueSettings
from router_svc.core.cost import DEFAULT_COST_SETTINGS, CostSettings
from router_svc.core.pairing import NO_BYPASS, Bypass, BypassPolicy
from router_svc.core.policy import DEFAULT_POLICY, Policy

_CHOICES = {"queue_policy": get_args(QueuePolicy), "bypass_policy": get_args(BypassPolicy)}
# Settings by the start of their names. Those of the cost have none.
_GROUPS: dict[str, QueueSettings | Bypass | CostSettings] = {
    "queue_": NO_QUEUE,
    "bypass_": NO_BYPASS,
    "": DEFAULT_COST_SETTINGS,
}
_FLAGS = {
    field.name
    for field in fields(DEFAULT_COST_SETTINGS)
    if isinstance(getattr(DEFAULT_COST_SETTINGS, field.name), bool)
}
SETTING_NAMES = [
    f"{prefix}{field.name}" for prefix, group in _GROUPS.items() for field in fields(group)
]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """cost: of the policies `kv` and `kv_approx`; rules: of all."""

    cost: CostSettings = DEFAULT_COST_SETTINGS
    rules: Policy = DEFAULT_POLICY


def parse_settings(texts: Sequence[str]) -> RouterSettings:
    """Raises ValueError, with a text for users."""
    changes: dict[str, dict[str, Any]] = {prefix: {} for prefix in _GROUPS}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in SETTING_NAMES:
            raise ValueError(f"{name!r}: no such setting; one of {', '.join(SETTING_NAMES)}")
        prefix = next(prefix for prefix in _GROUPS if name.startswith(prefix))
        changes[prefix][name.removeprefix(prefix)] = _parse_value(name, value)
    queue = replace(NO_QUEUE, **changes["queue_"])
    # As the router: without a threshold of its own, the bypass has that of the queue.
    bypass_changes = {"prefill_busy_threshold": queue.threshold, **changes["bypass_"]}
    rules = replace(DEFAULT_POLICY, queue=queue, bypass=replace(NO_BYPASS, **bypass_changes))
    return RouterSettings(replace(DEFAULT_COST_SETTINGS, **changes[""]), rules)


def _parse_value(name: str, text: str) -> Any:
    if choices := _CHOICES.get(name):
        if text not in choices:
            raise ValueError(f"{name}: {text!r} is none of {', '.join(choices)}")
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    is_number = isinstance(value, int | float) and 0 <= value < math.inf
    if is_number and isinstance(value, bool) == (name in _FLAGS):
        return value
    expected = "true or false" if name in _FLAGS else "a number of 0 or more"
    raise ValueError(f"{name}: {text!r} is not {expected}")
