"""What seeds have met, so that no rule holds for want of a case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.sim.world import run_seed

SEEDS_PER_CHUNK = 2


class Coverage:
    """Runs each seed once. seen: seeds in which a thing happened, by its name; a fault's is its
    kind. sums: how often it happened in all of them."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._seeds_run: set[int] = set()

    def run(self, seeds: Iterable[int]) -> list[str]:
        """Runs those that have not run yet; what broke, with how to replay it."""
        broken = []
        for seed in seeds:
            if seed in self._seeds_run:
                continue
            self._seeds_run.add(seed)
            report = run_seed(seed)
            self.totals.update(report.counts)
            self.totals.update(report.counters)
            self.seen.update(key for key, count in report.counts.items() if count)
            self.slowest_s = max(self.slowest_s, report.recovered_s)
            if report.violations:
                broken.append(str(report))
        return broken

    def missing_counts(self, minimum_counts: Mapping[str, int]) -> dict[str, int]:
        """What happened less often than it must, and how often it did."""
        return {
            key: self.totals[key]
            for key, count in minimum_counts.items()
            if self.totals[key] < count
        }


def chunks(seeds: Sequence[int]) -> list[Sequence[int]]:
    """Them, CHUNK at a time."""
    return [
        seeds[start : start + SEEDS_PER_CHUNK] for start in range(0, len(seeds), SEEDS_PER_CHUNK)
    ]


def chunk_name(seeds: Sequence[int]) -> str:
    """How a test of some seeds is named."""
    return f"{seeds[0]}-{seeds[-1]}"
