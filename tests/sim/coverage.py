"""What seeds have met, so that no rule holds for want of a case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.sim.world import run_seed

CHUNK = 2


class Coverage:
    """Runs each seed once. seen: seeds in which a thing happened, by its name; a fault's is its
    kind. sums: how often it happened in all of them."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._have_run: set[int] = set()

    def run(self, seeds: Iterable[int]) -> list[str]:
        """Runs those that have not run yet; what broke, with how to replay it."""
        broken = []
        for seed in seeds:
            if seed in self._have_run:
                continue
            self._have_run.add(seed)
            report = run_seed(seed)
            self.sums.update(report.counts)
            self.sums.update(report.counters)
            self.seen.update(key for key, count in report.counts.items() if count)
            self.slowest_s = max(self.slowest_s, report.recovered_s)
            if report.breaches:
                broken.append(str(report))
        return broken

    def lacks(self, least: Mapping[str, int]) -> dict[str, int]:
        """What happened less often than it must, and how often it did."""
        return {key: self.sums[key] for key, count in least.items() if self.sums[key] < count}


def chunks(seeds: Sequence[int]) -> list[Sequence[int]]:
    """Them, CHUNK at a time."""
    return [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]


def name_of(seeds: Sequence[int]) -> str:
    """How a test of some seeds is named."""
    return f"{seeds[0]}-{seeds[-1]}"
