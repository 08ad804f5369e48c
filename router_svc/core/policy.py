"""The configured rules of placement apart from the cost (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from router_svc.core.admission import NO_QUEUE, QueueSettings
from router_svc.core.eligibility import (
    DEFAULT_BACKGROUND,
    NO_LIMITS,
    BackgroundLimits,
    BusyLimits,
    LoraResidency,
)
from router_svc.core.pairing import ANY_DOMAIN, NO_BYPASS, Bypass, TransferDomain
from router_svc.core.sessions import AffinityMode
from router_svc.core.shortlist import CANDIDATES_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """session_ttl_s: how long an idle session keeps its placement; 0: no sessions are kept.
    candidates_max: most ranks that a cost is computed of (`shortlist`)."""

    session_ttl_s: float = 300.0
    session_mode: AffinityMode = "hard"
    lora_residency: LoraResidency = "required"
    domain: TransferDomain = ANY_DOMAIN
    bypass: Bypass = NO_BYPASS
    queue: QueueSettings = NO_QUEUE
    busy: BusyLimits = NO_LIMITS
    background: BackgroundLimits = DEFAULT_BACKGROUND
    candidates_max: int = CANDIDATES_MAX


DEFAULT_POLICY = Policy()
