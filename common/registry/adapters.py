"""Adapters that a namespace shall have, and what workers advertise about theirs (pure).

A desired adapter is a small document of the registry, one for each name. Workers decide by
themselves which of them holds it (`worker_svc/adapters`); what they hold is `loras` of their
entries, and an `AdapterState` in their meta states what they cannot load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256

# Any: JSON.
from typing import Any, Final

from pydantic import TypeAdapter

from common.errors import Conflict, InvalidRequest
from common.registry.instances import Instance, parse_json

ADAPTERS_MAX: Final = 1024
"""Of a namespace."""

ADAPTER_BYTES_MAX: Final = 16_384
NAME_CHARS_MAX: Final = 128
URI_CHARS_MAX: Final = 2048
COPIES_MAX: Final = 65_536
REASON_CHARS_MAX: Final = 200
REASONS_MAX: Final = 16
"""Further failures of a worker are advertised without their reason."""

# In a worker's meta: its AdapterState; without it the worker loads no adapters by itself.
ADAPTERS_META_KEY: Final = "adapters"

NAME_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]*"
_NAME = re.compile(NAME_PATTERN)

API_ORIGIN: Final = "api"


@dataclass(frozen=True, slots=True)
class DesiredAdapter:
    """An adapter that workers of a model shall hold. Raises InvalidRequest with the field."""

    name: str
    """The `model` of client requests."""

    model: str
    """The model whose workers load it."""

    uri: str = ""
    """Location of its files, as in LoadLoraRequest."""

    copies: int | None = None
    """Workers of each role that hold it; None: all."""

    copies_max: int | None = None
    """Up to so many while it is in much use; None: `copies`."""

    origin: str = API_ORIGIN
    """What stored it. `meshctl up` removes those of its mesh file that the file does not have any
    more."""

    is_removed: bool = False
    """No longer desired. The document stays, so that a removal differs from a store that lost its
    documents."""

    def __post_init__(self) -> None:
        if len(self.name) > NAME_CHARS_MAX or not _NAME.fullmatch(self.name):
            text = f"{self.name[:40]!r} is no name: at most {NAME_CHARS_MAX} letters, digits, "
            raise InvalidRequest(f"{text}'.', '_', ':', '/', '@', '+' and '-'", "name")
        if not self.model:
            raise InvalidRequest("model must not be empty", "model")
        if self.name == self.model:
            raise InvalidRequest(f"{self.name!r} is the name of the model itself", "name")
        if len(self.uri) > URI_CHARS_MAX:
            raise InvalidRequest(f"uri has {len(self.uri)}/{URI_CHARS_MAX} characters", "uri")
        for name, value in (("copies", self.copies), ("copies_max", self.copies_max)):
            if value is not None and not 1 <= value <= COPIES_MAX:
                raise InvalidRequest(f"{name} must be in 1 … {COPIES_MAX}, not {value}", name)
        if self.copies_max is not None and self.copies_max < (self.copies or COPIES_MAX + 1):
            least = "needs copies" if self.copies is None else f"must be at least {self.copies}"
            raise InvalidRequest(f"copies_max {least}", "copies_max")

    @property
    def key(self) -> str:
        """Its name in the store."""
        return sha256(self.name.encode()).hexdigest()[:32]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @staticmethod
    def from_json(raw: bytes) -> DesiredAdapter:
        """Raises InvalidRequest with the field. Unknown keys are ignored."""
        return parse_json(_DESIRED, raw, "adapter")


_DESIRED: TypeAdapter[DesiredAdapter] = TypeAdapter(DesiredAdapter)


def check_addition(
    adapter: DesiredAdapter, present: Iterable[DesiredAdapter], models: Iterable[str] = ()
) -> None:
    """Raises Conflict if an adapter cannot be added to those that are present: its name belongs to
    another model or is one of `models`, or there are ADAPTERS_MAX others."""
    others = {one.name: one for one in present}
    before = others.pop(adapter.name, None)
    if before is not None and before.model != adapter.model:
        text = f"{adapter.name!r} is an adapter of {before.model!r}; remove it first"
        raise Conflict(text, field="name", reason="ADAPTER_EXISTS")
    if adapter.name in models:
        raise Conflict(f"a model has the name {adapter.name!r}", field="name")
    if len(others) >= ADAPTERS_MAX:
        text = f"the namespace has {len(others)}/{ADAPTERS_MAX} adapters"
        raise Conflict(text, field="name", reason="TOO_MANY_ADAPTERS")


@dataclass(frozen=True, slots=True)
class AdapterState:
    """What a worker that places adapters advertises beside the ones that it holds."""

    is_leaving: bool = False
    """It ends: other workers load what it holds."""

    failed: Mapping[str, str] = field(default_factory=dict)
    """Adapters that it could not load, with the reason. It tries again."""

    busy: tuple[str, ...] = ()
    """Adapters with many requests here."""

    def to_text(self) -> str:
        """Returns the value of ADAPTERS_META_KEY."""
        failed = {
            name: reason[:REASON_CHARS_MAX] if i < REASONS_MAX else ""
            for i, (name, reason) in enumerate(sorted(self.failed.items()))
        }
        return json.dumps(
            {"is_leaving": self.is_leaving, "failed": failed, "busy": sorted(self.busy)},
            separators=(",", ":"),
        )

    @staticmethod
    def of(instance: Instance) -> AdapterState | None:
        """Returns the state that a worker advertises; None if it places no adapters, or if its
        version writes another form."""
        text = instance.meta.get(ADAPTERS_META_KEY)
        if text is None:
            return None
        try:
            raw = json.loads(text)
            return AdapterState(bool(raw["is_leaving"]), dict(raw["failed"]), tuple(raw["busy"]))
        except (ValueError, TypeError, KeyError):
            return None


# Any: JSON.
def describe_adapters(
    adapters: Iterable[DesiredAdapter], workers: Iterable[Instance]
) -> list[dict[str, Any]]:
    """Returns desired adapters as objects of JSON, each with the workers that hold it now and those
    that could not load it."""
    by_model: dict[str, list[Instance]] = {}
    for worker in workers:
        by_model.setdefault(worker.model, []).append(worker)
    return [_describe(adapter, by_model.get(adapter.model, ())) for adapter in adapters]


def _describe(adapter: DesiredAdapter, workers: Iterable[Instance]) -> dict[str, Any]:
    held, failed = [], []
    for worker in workers:
        # As text: the id exceeds the integers of many readers.
        named = {"id": str(worker.id), "name": worker.stable_name, "role": worker.role}
        state = AdapterState.of(worker) or AdapterState()
        if adapter.name in worker.loras:
            held.append(named)
        if adapter.name in state.failed:
            failed.append({**named, "reason": state.failed[adapter.name]})
    facts = asdict(adapter)
    del facts["is_removed"]
    return {"object": "adapter", **facts, "workers": held, "failed": failed}
