"""The models of the mesh: their cards, workers and adapters."""

from __future__ import annotations

from collections.abc import Sequence

from nicegui import ui

from console_svc.charts.units import NONE, number, plural, size
from console_svc.pages.frame import frame, refresh
from console_svc.pages.paging import Column
from console_svc.pages.parts import Disclosure, Empty, Facts, Notice, section
from console_svc.pages.table import Table
from console_svc.state.console_state import ConsoleState
from console_svc.state.members import Adapter, Model

_EMPTY = (
    "No model is served",
    "A model appears when a worker registers with it: `python -m worker_svc --model-name NAME`.",
)
_ROLES = ("aggregated", "prefill", "decode")


def _workers(model: Model) -> str:
    parts = [f"{len(names)} {role}" for role, names in _by_role(model)]
    return ", ".join(parts) or "none"


def _by_role(model: Model) -> list[tuple[str, tuple[str, ...]]]:
    order = {role: at for at, role in enumerate(_ROLES)}
    return sorted(model.workers.items(), key=lambda item: order.get(item[0], len(order)))


def _canary_tone(model: Model) -> str:
    if not model.canary:
        return "unknown"
    return "ok" if model.canary == "ok" else "bad"


def _canary(model: Model) -> str:
    mark = {"ok": "● ", "bad": "■ "}.get(_canary_tone(model), "")
    return f"{mark}{model.canary or 'no result'}"


COLUMNS: Sequence[Column[Model]] = (
    Column("name", "Model", lambda m: m.name, lambda m: m.name),
    Column("workers", "Workers", _workers, lambda m: sum(map(len, m.workers.values()))),
    Column(
        "adapters",
        "Adapters",
        lambda m: number(len(m.adapters)),
        lambda m: len(m.adapters),
        is_number=True,
    ),
    Column("kinds", "APIs", lambda m: ", ".join(m.kinds) or NONE),
    Column(
        "context",
        "Context",
        lambda m: number(m.context_length),
        lambda m: m.context_length,
        is_number=True,
    ),
    Column("canary", "Canary", _canary, lambda m: m.canary, tone=_canary_tone),
    Column(
        "problem",
        "Problem",
        lambda m: m.problem or "none",
        tone=lambda m: "bad" if m.problem else "",
    ),
)
_ADAPTERS: Sequence[Column[Adapter]] = (
    Column("name", "Adapter", lambda a: a.name, lambda a: a.name),
    Column(
        "count",
        "Workers",
        lambda a: number(len(a.workers)),
        lambda a: len(a.workers),
        is_number=True,
    ),
    Column("workers", "Names", lambda a: _names(a.workers), is_long=True),
)
_FILES: Sequence[Column[tuple[str, int]]] = (
    Column("name", "File of the card", lambda f: f[0], lambda f: f[0], is_code=True),
    Column("size", "Size", lambda f: size(f[1]), lambda f: f[1], is_number=True),
)
_NAMES_MAX = 12


def define(state: ConsoleState) -> None:
    @ui.page("/models", title="Models · KVMesh")
    def page() -> None:
        lead = "What clients can request, the card that frontends serve it with, and its adapters."
        with frame(state, "/models", "Models", lead):
            _ModelsPage(state)


class _ModelsPage:
    def __init__(self, state: ConsoleState) -> None:
        self._state = state
        self._shown: Sequence[Model] | None = None
        self._empty = Empty(*_EMPTY)
        self._table = Table("Models", COLUMNS, lambda m: m.name, _EMPTY)
        self._details = ui.element("div").classes("kv-section").style("gap: 24px")
        refresh(state, self._render)

    def _render(self) -> None:
        models = self._state.models
        self._empty.show(False)
        self._table.show(models)
        if models == self._shown:
            return
        self._shown = models
        self._details.clear()
        with self._details:
            for model in models:
                _show_model(model)


def _show_model(model: Model) -> None:
    with section(model.name, plural(sum(map(len, model.workers.values())), "worker")):
        problem = Notice("bad")
        problem.show(model.problem and f"Not ready at a frontend: {model.problem}")
        Facts("kv-facts kv-panel").show(
            {
                "Card": model.card_checksum[:16] or "none: requests pass through to the engine",
                "Also called": ", ".join(model.aliases) or NONE,
                "APIs": ", ".join(model.kinds) or NONE,
                "Context": f"{number(model.context_length)} tokens"
                if model.context_length
                else NONE,
                "Block size": f"{number(model.block_size)} tokens" if model.block_size else NONE,
                "Hash scheme": model.hash_scheme or NONE,
                "Tool calls": model.tool_parser or NONE,
                "Reasoning": model.reasoning_parser or NONE,
                "Canary": _canary(model),
                **{f"Workers, {role}": _names(names) for role, names in _by_role(model)},
            }
        )
        if model.adapters:
            table = Table(
                f"Adapters of {model.name}", _ADAPTERS, lambda a: a.name, ("No adapter", "")
            )
            table.show(model.adapters)
        if model.artifacts:
            files = Disclosure(f"Files of the card ({len(model.artifacts)})", lambda: None)
            with files.element:
                card = Table(f"Card of {model.name}", _FILES, lambda f: f[0], ("No file", ""))
                card.show(sorted(model.artifacts.items()))


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_MAX
    listed = ", ".join(names[:_NAMES_MAX])
    return f"{listed} and {more} more" if more > 0 else listed or "none"
