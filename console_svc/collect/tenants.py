"""Tenants: their keys and limits, and what they use (pure)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from common.api_keys import ApiKey, KeyDocument, Tenant
from common.usage import UsageCounts, UsageKey
from console_svc.state.tenants import Key, Tenants, TenantView

# Of the shares of tenants.
SHARE_WINDOW_S = 60.0
TENANTS_MAX = 2000


class TenantShares:
    """The tokens of each tenant in the last SHARE_WINDOW_S."""

    def __init__(self) -> None:
        # Tokens by tenant that each frontend had counted at the last call.
        self._counted: dict[str, dict[str, float]] = {}
        # Tokens by tenant since the start of the console; and at which times they were so many.
        self._used: dict[str, float] = {}
        self._totals: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, now_s: float, usages: Mapping[str, Mapping[UsageKey, UsageCounts]]) -> None:
        """Keeps the counts of a moment. now_s: of a monotonic clock. usages: by frontend, since its
        start; one without a count before starts with this one."""
        before, self._counted = self._counted, {n: _tokens(usage) for n, usage in usages.items()}
        for name in before.keys() & self._counted.keys():
            for tenant, count in self._counted[name].items():
                known = before[name].get(tenant, 0.0)
                # A frontend that has started again counts from zero.
                used = count - known if count >= known else count
                self._used[tenant] = self._used.get(tenant, 0.0) + used
        self._totals.append((now_s, self._used.copy()))
        while len(self._totals) > 2 and now_s - self._totals[1][0] >= SHARE_WINDOW_S:
            self._totals.popleft()

    def recent(self) -> dict[str, float]:
        """Returns the tokens of the tenants that used some."""
        if not self._totals:
            return {}
        (_, before), (_, after) = self._totals[0], self._totals[-1]
        used = {name: total - before.get(name, 0.0) for name, total in after.items()}
        return {name: tokens for name, tokens in used.items() if tokens > 0}


def _tokens(usage: Mapping[UsageKey, UsageCounts]) -> dict[str, float]:
    """Returns the tokens by tenant."""
    tokens: dict[str, float] = {}
    for key, used in usage.items():
        tokens[key.tenant] = tokens.get(key.tenant, 0.0) + used.tokens
    return tokens


def view_tenants(
    document: KeyDocument | None,
    usage: Mapping[UsageKey, UsageCounts],
    recent: Mapping[str, float],
    *,
    can_revoke: bool,
    now_s: float,
    problem: str = "",
) -> Tenants:
    """Returns the tenants of the key file, and those that frontends count, by name.

    - document: None: the console has no key file.
    - recent: tokens by tenant, as of `TenantShares`.
    - now_s: Unix seconds.
    """
    known = {} if document is None else document.tenants
    by_tenant: dict[str, dict[UsageKey, UsageCounts]] = {}
    for key, used in usage.items():
        by_tenant.setdefault(key.tenant, {})[key] = used
    total = sum(recent.values())
    weights = {name: _weight(known.get(name)) for name in recent}
    names = sorted(known.keys() | by_tenant.keys())[:TENANTS_MAX]
    return Tenants(
        has_keys=document is not None,
        can_revoke=can_revoke,
        tenants=tuple(
            _view(
                name,
                known.get(name, Tenant()),
                by_tenant.get(name, {}) if usage else None,
                recent[name] / total if name in recent else None,
                weights[name] / sum(weights.values()) if name in recent else None,
                now_s,
            )
            for name in names
        ),
        problem=problem,
    )


def _view(
    name: str,
    tenant: Tenant,
    used: Mapping[UsageKey, UsageCounts] | None,
    recent_share: float | None,
    fair_share: float | None,
    now_s: float,
) -> TenantView:
    counts = {} if used is None else used
    total = sum_by(counts, lambda _: "").get("", UsageCounts())
    limits = tenant.limits
    return TenantView(
        name=name,
        keys=tuple(_key(key, now_s) for key in tenant.keys),
        requests_per_s=limits.requests_per_s,
        tokens_per_min=limits.tokens_per_min,
        concurrency=limits.concurrency,
        weight=limits.weight,
        usage=None if used is None else total,
        by_model=sum_by(counts, lambda key: key.model),
        by_key=sum_by(counts, lambda key: key.key),
        by_adapter=sum_by(counts, lambda key: key.adapter or None),
        recent_share=recent_share,
        fair_share=fair_share,
    )


def sum_by(
    usage: Mapping[UsageKey, UsageCounts], group: Callable[[UsageKey], str | None]
) -> dict[str, UsageCounts]:
    """Returns the sums of groups. group: returns the name; None: it does not count."""
    sums: dict[str, UsageCounts] = {}
    for key, used in usage.items():
        if (name := group(key)) is not None:
            sums[name] = sums.get(name, UsageCounts()) + used
    return sums


def _key(key: ApiKey, now_s: float) -> Key:
    expires_s = None if key.expires is None else key.expires.timestamp()
    return Key(
        id=key.id,
        scopes=tuple(sorted(key.scopes)),
        created_s=key.created.timestamp(),
        expires_s=expires_s,
        is_expired=expires_s is not None and expires_s <= now_s,
    )


def _weight(tenant: Tenant | None) -> float:
    return 1.0 if tenant is None else tenant.limits.weight
