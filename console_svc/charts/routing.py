"""Why a worker was chosen: the parts of each candidate's cost, and the expected against the actual
cache hit (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from console_svc.charts.bars import Part, labelled_bars, stacked_bars
from console_svc.charts.style import ACCENT, SERIES, Option
from console_svc.charts.units import number
from console_svc.state.requests import Candidate, Explanation

TERMS = ("prefill", "decode", "active", "misses")
"""Parts of a cost that add up; the router multiplies their sum by `taint_factor`."""
_NAMES = {
    "prefill": "prompt to compute",
    "decode": "decode load",
    "active": "active requests",
    "misses": "KV misses",
}


def leg_name(leg: str) -> str:
    """Returns the leg of candidates in words."""
    return {"prefill": "Prefill", "decode": "Decode"}.get(leg, "Whole request")


def legs(explanation: Explanation) -> dict[str, list[Candidate]]:
    """Returns the candidates of each leg, those with a cost first, the excluded ones last."""
    found: dict[str, list[Candidate]] = {}
    for candidate in explanation.candidates:
        found.setdefault(candidate.leg, []).append(candidate)
    return {leg: sorted(rows, key=_order) for leg, rows in found.items()}


def candidate_name(candidate: Candidate) -> str:
    rank = f"/{candidate.dp_rank}" if candidate.dp_rank else ""
    return f"{candidate.worker or candidate.worker_id}{rank}"


def compared(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates whose cost has parts."""
    return [c for c in candidates if c.cost is not None and any(term in c.terms for term in TERMS)]


def costs(leg: str, candidates: Sequence[Candidate]) -> Option:
    """Returns a bar for each candidate with a cost, of its parts."""
    drawn = compared(candidates)
    names = [f"{'▶ ' if c.is_chosen else ''}{candidate_name(c)}" for c in drawn]
    used = [term for term in TERMS if any(c.terms.get(term) for c in drawn)] or ["prefill"]
    parts = [
        Part(
            _NAMES[term],
            SERIES[TERMS.index(term)],
            [_scaled(c, term) for c in drawn],
            [number(_scaled(c, term), 3) for c in drawn],
        )
        for term in used
    ]
    chosen = next((candidate_name(c) for c in drawn if c.is_chosen), "none of them")
    description = f"{leg_name(leg)}: cost of {len(drawn)} candidates; {chosen} was chosen."
    return stacked_bars(description, names, parts)


def hits(explanation: Explanation, prompt_tokens: int | None) -> Option:
    """Returns the expected and the actual cached tokens beside the prompt."""
    actual = explanation.actual_cached_tokens
    rows: list[tuple[str, float | None]] = [
        ("predicted", explanation.predicted_cached_tokens),
        ("actual", actual),
        ("prompt", prompt_tokens),
    ]
    shown = [(name, value) for name, value in rows if value is not None]
    description = "Cached prompt tokens: " + ", ".join(f"{n} {number(v)}" for n, v in shown)
    return labelled_bars(
        description,
        [name for name, _ in shown],
        [value for _, value in shown],
        [number(value) for _, value in shown],
        ACCENT,
    )


def _scaled(candidate: Candidate, term: str) -> float:
    return candidate.terms.get(term, 0.0) * candidate.terms.get("taint_factor", 1.0)


def _order(candidate: Candidate) -> tuple[bool, bool, float]:
    return (
        not candidate.is_chosen,
        bool(candidate.excluded_reason),
        float("inf") if candidate.cost is None else candidate.cost,
    )
