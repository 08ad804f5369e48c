"""What the rule reads and returns: samples of a pool, targets, reasons (pure).

A pool is the workers of one model and role. Shares are of what all present workers can do at most;
the share of the prompts exceeds 1 if more arrive than these compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a count is as it is: the label `reason`."""

    STEADY = "steady"
    """No signal asks for a change."""
    PREFILL = "prefill"
    """Prompt tokens arrive faster than fewer workers compute them."""
    KV = "kv"
    """KV blocks in use."""
    REQUESTS = "requests"
    """Requests against the largest batches."""
    TTFT = "ttft"
    """The time to the first token exceeds its target."""
    ITL = "itl"
    """The time between tokens exceeds its target."""
    QUEUE = "queue"
    """A request has waited in a queue for longer than the target of the first token."""
    DOWN_WINDOW = "down_window"
    """Fewer workers would do now, but not for the whole window yet."""
    CONSOLIDATED = "consolidated"
    """One worker fewer: the others meet the targets."""
    MISSING_DATA = "missing_data"
    """Workers do not report their load: the count is held."""
    PENDING = "pending"
    """Workers that were asked for are not there yet."""
    FLOOR = "floor"
    CEILING = "ceiling"
    BUDGET = "budget"
    ASLEEP = "asleep"
    """No worker is needed until a request arrives."""
    WAKE = "wake"
    """Requests wait for the first worker."""


@dataclass(frozen=True, slots=True)
class PoolSample:
    """What was observed of a pool since the sample before."""

    present: int
    """Workers that serve."""

    reporting: int
    """Those of them with load reports."""

    prefill: float = 0.0
    """Prompt tokens that arrived, those of the backlog included, as a share of what the workers
    compute in that time."""

    kv: float = 0.0
    """Share of KV blocks in use by requests."""

    requests: float = 0.0
    """Requests as a share of the largest batches."""

    ttft_s: float | None = None
    """95th percentile of the time to the first token in seconds; None: no first token."""

    itl_s: float | None = None
    """Seconds between two tokens of a request; None: no request was computed."""

    queue_s: float = 0.0
    """Age of the oldest request in the router's queue in seconds."""

    in_flight: int = 0
    """Requests at workers and in queues."""

    awaiting: int = 0
    """Requests that wait because no worker serves the model."""


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """Targets, limits and windows. Times are seconds."""

    ttft_target_s: float = 2.0
    itl_target_s: float = 0.1
    floor: int = 1
    """Fewest workers of a pool; 0: a pool without requests sleeps after `sleep_after_s`."""

    ceiling: int = 64
    budget: int | None = None
    """Most workers of all pools together; None: no limit."""

    up_window_s: float = 30.0
    """A count rises if more workers were needed all the time for so long."""

    down_window_s: float = 3600.0
    """A count falls if fewer workers were enough all the time for so long."""

    pending_s: float = 300.0
    """Longest start of a worker. Until then late tokens ask for no further ones."""

    sleep_after_s: float = 900.0


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommended number of workers of a pool."""

    replicas: int
    reason: Reason

    @property
    def is_asleep(self) -> bool:
        return self.replicas == 0
