"""Counts of what happened in many seeds, so that no rule passes for lack of a case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tests.sim.world import run_seed

SEEDS_PER_CHUNK = 2


class Coverage:
    """Runs each seed once. seen: number of seeds in which something happened, by its name (of a
    fault: its kind). totals: how often it happened in all seeds.
    """

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._seeds_run: set[int] = set()

    def run(self, seeds: Iterable[int]) -> list[str]:
        """Runs the seeds that have not run yet. Returns the reports of failed runs."""
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
        """What happened less often than required, and how often it did."""
        return {
            key: self.totals[key]
            for key, count in minimum_counts.items()
            if self.totals[key] < count
        }


def chunks(seeds: Sequence[int]) -> list[Sequence[int]]:
    """The seeds in chunks of SEEDS_PER_CHUNK."""
    return [
        seeds[start : start + SEEDS_PER_CHUNK] for start in range(0, len(seeds), SEEDS_PER_CHUNK)
    ]


def chunk_name(seeds: Sequence[int]) -> str:
    """The parametrize id of a chunk of seeds."""
    return f"{seeds[0]}-{seeds[-1]}"
