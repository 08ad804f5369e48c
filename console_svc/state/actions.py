"""What an operator may start from a page: its arguments and results (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Any: JSON.
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat of the playground. api_key: of the operator, sent to the frontend; "": none."""

    model: str
    messages: tuple[Mapping[str, Any], ...]
    """As OpenAI's API takes them."""

    max_tokens: int = 256
    temperature: float | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    """As OpenAI's API takes them."""

    tool_choice: str | None = None
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """One event of a streamed chat. Only what the event has is set."""

    at_ms: float
    """Since the request was sent."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """Pieces as OpenAI's API streams them: `index`, `id`, `function.name`,
    `function.arguments`."""

    finish_reason: str = ""
    usage: Mapping[str, Any] | None = None
    """With the last event: `prompt_tokens`, `completion_tokens`, `prompt_tokens_details`."""

    request_id: str = ""
    """Of the mesh; with the first event. `explain` and `trace` take it."""

    placement: Mapping[str, Any] = field(default_factory=dict)
    """`worker_id` and `timing` of `nvext`, if the key permits them."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A comparison of routing policies on a trace in virtual time."""

    trace: str
    """Name of a generated workload (`ConsoleState.replay_workloads`), or of a trace file of the
    configured folder (`ConsoleState.replay_traces`)."""

    policies: tuple[str, ...] = ("kv", "least_loaded", "random")
    workers: int = 4
    requests: int = 500


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """Figures of one policy; names and units are those of `python -m replay --json`: hit_rate,
    ttft_mean_s, ttft_p50_s, ttft_p90_s, ttft_p99_s, itl_mean_s, itl_p99_s, split, load_variation,
    duration_s, unanswered, truncated, preemptions. None: not measured."""

    policy: str
    figures: Mapping[str, float | None]
    ttft_cdf: tuple[tuple[float, float], ...] = ()
    """Seconds to the first token, and the share of requests that had it by then, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    trace: str
    facts: Mapping[str, Any]
    """The settings of the replay."""

    runs: tuple[ReplayRun, ...]
