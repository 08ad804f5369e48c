"""The limits of tenants: requests, tokens, concurrent requests (pure).

Token buckets: a bucket refills at the rate of its limit and holds one second of requests, or one
minute of tokens. A request reserves its prompt and the most tokens that it may generate, and
returns at its end what it did not use. So a tenant uses at most `capacity + rate * T` in T seconds.

Several frontends divide each limit by their number: together they never exceed it, except for as
long as a new frontend is unknown to the others; a client whose requests all reach one frontend of N
gets an Nth. Each frontend allows at least one concurrent request.
"""

from __future__ import annotations

import math

from common.access.caller import Caller
from common.errors import Overloaded
from frontend_svc.errors import TENANT_REASON_PREFIX
from frontend_svc.members import Members

TOKENS_WINDOW_S = 60.0
CONCURRENCY_RETRY_S = 1.0

Headers = tuple[tuple[bytes, bytes], ...]


class Bucket:
    """What is left of one limit. level: may be negative, after a request that used more than it
    reserved."""

    def __init__(self, rate: float, capacity: float, now_s: float) -> None:
        self.rate, self.capacity = rate, capacity
        self.level = capacity
        self._filled_at_s = now_s

    def refill(self, rate: float, capacity: float, now_s: float) -> None:
        """Adds what the time brought. The limit may have changed."""
        brought = (now_s - self._filled_at_s) * self.rate
        self.level = min(capacity, self.level + brought)
        self.rate, self.capacity, self._filled_at_s = rate, capacity, now_s

    def wait_s(self, amount: float) -> float:
        """Returns the seconds until `amount` is there."""
        return max(0.0, (amount - self.level) / self.rate)


class TenantUse:
    """What one tenant uses at this frontend."""

    def __init__(self) -> None:
        self.running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None


class Quota:
    """The share of one request in its tenant's limits. concurrency_max: at this frontend; None: no
    limit."""

    def __init__(self, tenant: str, use: TenantUse, concurrency_max: int | None) -> None:
        self._tenant = tenant
        self._use = use
        self._concurrency_max = concurrency_max
        self._reserved = 0.0
        self._has_begun = False

    def begin(self) -> None:
        """Counts the request. Raises Overloaded if its tenant is at a limit."""
        use, most = self._use, self._concurrency_max
        if most is not None and use.running >= most:
            text = f"{use.running} requests run, the limit is {most}"
            raise _refused(self._tenant, "CONCURRENCY", text, CONCURRENCY_RETRY_S)
        if (bucket := use.requests) is not None:
            if wait_s := bucket.wait_s(1.0):
                text = f"more than {bucket.rate:g} requests a second"
                raise _refused(self._tenant, "REQUESTS", text, wait_s)
            bucket.level -= 1.0
        use.running += 1
        self._has_begun = True

    def reserve(self, tokens: int) -> None:
        """Takes the tokens of a request, at most those of one window. Raises Overloaded."""
        bucket = self._use.tokens
        if bucket is None:
            return
        wanted = min(float(tokens), bucket.capacity)
        if wait_s := bucket.wait_s(wanted):
            left = max(0, int(bucket.level))
            text = f"{tokens} tokens requested, {left} of {round(bucket.capacity)} a minute left"
            raise _refused(self._tenant, "TOKENS", text, wait_s)
        bucket.level -= wanted
        self._reserved = wanted

    def close(self, used_tokens: int) -> None:
        """Ends the request. used_tokens: of its prompts and its output."""
        if not self._has_begun:
            return
        self._use.running -= 1
        if self._use.tokens is not None:
            self._use.tokens.level += self._reserved - used_tokens

    @property
    def headers(self) -> Headers:
        """The limits and what is left of them, in the names of OpenAI."""
        return (*_headers(b"requests", self._use.requests), *_headers(b"tokens", self._use.tokens))


class TenantQuotas:
    """The use of all tenants of this frontend. frontends: how many share the limits, with this one.
    Tenants without limits have no quota."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._uses: dict[str, TenantUse] = {}

    def quota(self, caller: Caller, now_s: float) -> Quota | None:
        """Returns the quota of a new request."""
        limits = caller.limits
        if limits.is_unlimited:
            return None
        use = self._uses.setdefault(caller.tenant, TenantUse())
        share = max(1, len(self._members.snapshot.of("frontend")))
        rate = None if limits.requests_per_s is None else limits.requests_per_s / share
        use.requests = _refilled(use.requests, rate, 1.0, now_s)
        rate = None if limits.tokens_per_min is None else limits.tokens_per_min / 60 / share
        use.tokens = _refilled(use.tokens, rate, TOKENS_WINDOW_S, now_s)
        most = None if limits.concurrency is None else max(1, limits.concurrency // share)
        return Quota(caller.tenant, use, most)


def _headers(unit: bytes, bucket: Bucket | None) -> Headers:
    if bucket is None:
        return ()
    capacity, level = bucket.capacity, bucket.level
    return (
        (b"x-ratelimit-limit-%b" % unit, b"%d" % round(capacity)),
        (b"x-ratelimit-remaining-%b" % unit, b"%d" % max(0, math.floor(level))),
        (b"x-ratelimit-reset-%b" % unit, b"%.3fs" % bucket.wait_s(capacity)),
    )


def _refilled(
    bucket: Bucket | None, rate: float | None, window_s: float, now_s: float
) -> Bucket | None:
    if rate is None:
        return None
    # With room for two requests, none is lost because it arrives late.
    capacity = max(2.0, rate * window_s)
    if bucket is None:
        return Bucket(rate, capacity, now_s)
    bucket.refill(rate, capacity, now_s)
    return bucket


def _refused(tenant: str, limit: str, text: str, wait_s: float) -> Overloaded:
    message = f"rate limit of tenant {tenant!r}: {text}; retry after {wait_s:.3g} s"
    return Overloaded(wait_s, message, reason=f"{TENANT_REASON_PREFIX}{limit}")
