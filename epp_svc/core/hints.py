"""What the headers of a request state: model, priority, tenant (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.errors import InvalidRequest

# Each name also with the prefix that a successor of the extension uses.
OBJECTIVE_HEADERS = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
FAIRNESS_HEADERS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
MODEL_HEADERS = ("x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite")
# Of the tenant: it is a key of the router's queue.
FAIRNESS_CHARS_MAX = 128
PRIORITY_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request states beside its body."""

    model: str = ""
    """Replaces the model of the body; "": none."""

    tenant: str = ""
    priority: int = 0
    """Of its objective. Below 0: it is shed rather than queued."""

    @property
    def level(self) -> int:
        """The level in the router's queue."""
        return max(0, self.priority)

    @property
    def is_sheddable(self) -> bool:
        return self.priority < 0


def read_hints(headers: Mapping[str, str], objectives: Mapping[str, int]) -> Hints:
    """Returns the hints in the headers of a request. objectives: priority by name; an unknown
    objective has priority 0, as one that is not configured yet. Raises InvalidRequest for a
    fairness id that is too long."""
    tenant = _first(headers, FAIRNESS_HEADERS)
    if len(tenant) > FAIRNESS_CHARS_MAX:
        name = FAIRNESS_HEADERS[0]
        text = f"Invalid header '{name}': {len(tenant)} characters, at most {FAIRNESS_CHARS_MAX}."
        raise InvalidRequest(text, name)
    objective = _first(headers, OBJECTIVE_HEADERS)
    return Hints(_first(headers, MODEL_HEADERS), tenant, objectives.get(objective, 0))


def parse_objectives(texts: Iterable[str]) -> dict[str, int]:
    """Returns the priorities of `NAME=PRIORITY` texts. Raises ValueError with the text."""
    found: dict[str, int] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not (name and equals and number.removeprefix("-").isdecimal()):
            raise ValueError(f"{text!r} is not NAME=PRIORITY")
        if name in found:
            raise ValueError(f"{name!r} has two priorities")
        found[name] = int(number)
        if abs(found[name]) > PRIORITY_MAX:
            raise ValueError(f"{text!r}: priorities are at most {PRIORITY_MAX}")
    return found


def _first(headers: Mapping[str, str], names: Iterable[str]) -> str:
    return next((value for name in names if (value := headers.get(name, ""))), "")
