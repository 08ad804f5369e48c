"""What holds for placements beside the cost: the rules that a router is configured with (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from router_svc.core.admission import NO_QUEUE, QueueSettings
from router_svc.core.busy import NO_LIMITS, BusyLimits
from router_svc.core.eligibility import LoraResidency
from router_svc.core.pairing import ANY_DOMAIN, NO_BYPASS, Bypass, TransferDomain
from router_svc.core.sessions import AffinityMode

SESSION_TTL_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """session_ttl_s: how long an idle session stays bound; 0: no sessions are kept.

    lora_residency: what it takes to serve a request for an adapter. domain: where KV may travel.
    bypass: when a request is not split although it could be. queue: when requests wait. busy: when
    workers get none.
    """

    session_ttl_s: float = SESSION_TTL_S
    session_mode: AffinityMode = "hard"
    lora_residency: LoraResidency = "required"
    domain: TransferDomain = ANY_DOMAIN
    bypass: Bypass = NO_BYPASS
    queue: QueueSettings = NO_QUEUE
    busy: BusyLimits = NO_LIMITS


DEFAULT_POLICY = Policy()
