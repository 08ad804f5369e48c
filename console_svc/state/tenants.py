"""Tenants: keys, limits, usage and fairness (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from common.usage import UsageCounts


@dataclass(frozen=True, slots=True)
class Key:
    """An API key, without its text. Times are Unix seconds."""

    id: str
    scopes: tuple[str, ...]
    created_s: float
    expires_s: float | None
    """None: never."""

    is_expired: bool


@dataclass(frozen=True, slots=True)
class TenantView:
    """A tenant. Limits: None: no limit."""

    name: str
    keys: tuple[Key, ...]
    requests_per_s: float | None
    tokens_per_min: int | None
    concurrency: int | None
    weight: float
    usage: UsageCounts | None
    """Since the frontends started. None: they do not count it."""

    by_model: Mapping[str, UsageCounts] = field(default_factory=dict)
    by_key: Mapping[str, UsageCounts] = field(default_factory=dict)
    """By the id of the key."""

    by_adapter: Mapping[str, UsageCounts] = field(default_factory=dict)
    """By adapter; requests without one are not in it."""

    recent_share: float | None = None
    """Its share of the tokens of the last minute; None: there are none."""

    fair_share: float | None = None
    """Share by weight among the tenants that used tokens in the last minute; None: it used none."""


@dataclass(frozen=True, slots=True)
class Tenants:
    """All tenants. has_keys: whether the mesh demands API keys, as far as this console sees it."""

    has_keys: bool = False
    can_revoke: bool = False
    """Whether this console may change the file of the keys."""

    tenants: tuple[TenantView, ...] = ()
    problem: str = ""
    """Why the tenants are missing or old."""
