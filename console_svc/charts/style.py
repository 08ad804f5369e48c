"""What all pictures share: colours with a meaning, marks of health, and the plain parts of options
(pure)."""

from __future__ import annotations

# Any: JSON of ECharts.
from typing import Any, TypeAlias

from console_svc.state.members import FAILING, SERVING, UNKNOWN, Member

Option: TypeAlias = dict[str, Any]

TEXT = "var(--text)"
MUTED = "var(--muted)"
LINE = "var(--line)"
STRONG_LINE = "var(--line-strong)"
SURFACE = "var(--surface)"
PANEL = "var(--panel)"
ACCENT = "var(--accent)"
TRACK = "var(--track)"

FONT = "Roboto, sans-serif"

_ROLES = {
    "frontend": "var(--c-frontend)",
    "router": "var(--c-router)",
    "indexer": "var(--c-indexer)",
    "prefill": "var(--c-prefill)",
    "decode": "var(--c-decode)",
    "aggregated": "var(--c-worker)",
    "worker": "var(--c-worker)",
}

SERIES = tuple(f"var(--s-{n})" for n in range(1, 7))
"""Colours of parts that have no meaning of their own, in a fixed order."""

HEAT = tuple(f"var(--heat-{n})" for n in range(6))
"""Colours of shares, from 0 to 1."""


def role_color(role: str) -> str:
    return _ROLES.get(role, "var(--c-frontend)")


def tone(health: str) -> str:
    """Returns `ok`, `warn`, `bad` or `unknown`: the tone of a state of health."""
    match health:
        case _ if health == SERVING:
            return "ok"
        case _ if health == FAILING:
            return "warn"
        case _ if health in (UNKNOWN, ""):
            return "unknown"
    return "bad"


def member_tone(member: Member) -> str:
    """Returns the tone of a member: one that serves, but gets no work, is a warning."""
    found = tone(member.health)
    return "warn" if found == "ok" and member.is_routable is False else found


MARKS = {"ok": "●", "warn": "▲", "bad": "■", "unknown": "○"}
"""Shapes beside the colours, so that no state is a colour alone."""


def tone_color(name: str) -> str:
    return f"var(--{name})"


def tooltip() -> Option:
    """Returns tooltips that show the name of what is pointed at."""
    return {
        "trigger": "item",
        "formatter": "{b}",
        "confine": True,
        "transitionDuration": 0,
        "backgroundColor": SURFACE,
        "borderColor": STRONG_LINE,
        "borderWidth": 1,
        "padding": [6, 10],
        "textStyle": {"color": TEXT, "fontSize": 12, "fontFamily": FONT},
        "extraCssText": "box-shadow:none;border-radius:4px;white-space:pre-line;",
    }


def text_style(color: str = TEXT, size: int = 12) -> Option:
    return {"color": color, "fontSize": size, "fontFamily": FONT}


def value_axis(name: str = "", **more: Any) -> Option:
    """Returns an axis of numbers with thin lines."""
    return {
        "type": "value",
        "name": name,
        "nameLocation": "end",
        "nameTextStyle": {**text_style(MUTED, 11), "align": "left"},
        "axisLabel": text_style(MUTED, 11),
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "splitLine": {"lineStyle": {"color": LINE}},
        **more,
    }


def category_axis(names: list[str], **more: Any) -> Option:
    """Returns an axis of names, the first one at the top if it is vertical."""
    return {
        "type": "category",
        "data": names,
        "axisLabel": text_style(TEXT, 12),
        "axisLine": {"lineStyle": {"color": STRONG_LINE}},
        "axisTick": {"show": False},
        **more,
    }


def hidden_axis(low: float, high: float, *, inverse: bool = False) -> Option:
    return {"type": "value", "min": low, "max": high, "show": False, "inverse": inverse}


def picture(description: str, **parts: Any) -> Option:
    """Returns options without animation. description: what a screen reader says."""
    return {
        "animation": False,
        "useUTC": True,
        "aria": {"enabled": True, "label": {"description": description}},
        "textStyle": {"fontFamily": FONT},
        "tooltip": tooltip(),
        **parts,
    }
