"""Whether the router's knowledge of the workers' caches is true (pure).

Each placement predicts how many prompt tokens will be found in the cache; the engine says how many
it found. Where events are lost, hashed otherwise, or not followed at all, nothing fails: requests
only become slow. So the two are compared, per source, over a window:

    drift = sum |predicted - actual| / sum max(predicted, actual)

of the requests that ended in it: 0 when every prediction was right (also when nothing was predicted
and nothing found), 1 when none was. Some drift is natural: two requests that share a beginning and
come at once are both placed before either is computed.

Invariants: a window is WINDOW_S / 2 to WINDOW_S long; few requests degrade nobody; a source is
reported at most once a window; who has left is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WINDOW_S = 60.0
# Fewer requests than this in a window are no evidence: a burst of siblings, say.
REQUESTS_MIN = 20

# (worker id, dp rank)
Source = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Standing:
    """How predictions about a source have fared.

    predicted, actual, requests: tokens and requests since it is known. ratio: the drift of the
    window. is_degraded: it is above the bar, on evidence.
    """

    source: Source
    predicted: int
    actual: int
    requests: int
    ratio: float
    is_degraded: bool


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    wrong: int = 0
    largest: int = 0


@dataclass(slots=True)
class _Account:
    began_at: float
    predicted: int = 0
    actual: int = 0
    requests: int = 0
    # Of the last full half window, and of this one.
    halves: list[_Counts] = field(default_factory=lambda: [_Counts(), _Counts()])
    reported_at: float = float("-inf")

    def roll(self, now: float) -> None:
        half = WINDOW_S / 2
        elapsed = now - self.began_at
        if elapsed < half:
            return
        self.halves = [self.halves[1] if elapsed < 2 * half else _Counts(), _Counts()]
        self.began_at = now - elapsed % half

    def evidence(self) -> tuple[int, float]:
        """Requests of the window, and their drift."""
        requests = sum(half.requests for half in self.halves)
        largest = sum(half.largest for half in self.halves)
        wrong = sum(half.wrong for half in self.halves)
        return requests, wrong / largest if largest else 0.0


class Drift:
    """All sources of one frontend. ratio_max: drift above it degrades a source, 0..1."""

    def __init__(self, ratio_max: float) -> None:
        self._ratio_max = ratio_max
        self._accounts: dict[Source, _Account] = {}

    def observe(self, source: Source, predicted: int, actual: int, now: float) -> Standing | None:
        """A request ended; the source's standing when it is to be reported, once a window."""
        account = self._accounts.get(source)
        if account is None:
            account = self._accounts[source] = _Account(now)
        account.roll(now)
        account.predicted += predicted
        account.actual += actual
        account.requests += 1
        counts = account.halves[1]
        counts.requests += 1
        counts.wrong += abs(predicted - actual)
        counts.largest += max(predicted, actual)
        if now - account.reported_at < WINDOW_S:
            return None
        standing = self._standing(source, account)
        if not standing.is_degraded:
            return None
        account.reported_at = now
        return standing

    def standings(self, now: float) -> list[Standing]:
        """All sources, as they came."""
        found = []
        for source, account in self._accounts.items():
            account.roll(now)
            found.append(self._standing(source, account))
        return found

    def keep(self, present: Iterable[int]) -> None:
        """Forgets the sources of workers that have left."""
        present = set(present)
        for source in [s for s in self._accounts if s[0] not in present]:
            del self._accounts[source]

    def _standing(self, source: Source, account: _Account) -> Standing:
        requests, ratio = account.evidence()
        return Standing(
            source=source,
            predicted=account.predicted,
            actual=account.actual,
            requests=account.requests,
            ratio=ratio,
            is_degraded=requests >= REQUESTS_MIN and ratio > self._ratio_max,
        )
