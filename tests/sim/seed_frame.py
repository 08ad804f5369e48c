"""The tests of a table of seeds: no violations, minimum counts, repeatable runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from tests.sim.coverage import Coverage, chunk_name, chunks
from tests.sim.scenario import RECOVERY_MAX_S
from tests.sim.world import run_seed


class SeedSuite:
    """A subclass defines the table.

    minimum_counts: of each fault and of other events, in all seeds together. repeated_seeds: seeds
    that run twice.
    """

    seeds: ClassVar[Sequence[int]]
    minimum_counts: ClassVar[Mapping[str, int]]
    repeated_seeds: ClassVar[Sequence[int]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "some" in metafunc.fixturenames:
            metafunc.parametrize("some", chunks(self.seeds), ids=chunk_name)
        if "seed" in metafunc.fixturenames:
            metafunc.parametrize("seed", self.repeated_seeds)

    @pytest.fixture(scope="class")
    @classmethod
    def coverage(cls) -> Coverage:
        return Coverage()

    def test_seeded_runs_break_no_rule(self, some: Sequence[int], coverage: Coverage) -> None:
        broken = coverage.run(some)
        assert not broken, "\n".join(broken)

    @pytest.mark.timeout(600)  # if it runs alone
    def test_the_seeds_inject_every_fault_and_use_every_feature(self, coverage: Coverage) -> None:
        """Otherwise the rules would pass for lack of a case."""
        coverage.run(self.seeds)
        assert not coverage.missing_counts(self.minimum_counts)
        assert 2.0 < coverage.slowest_s < RECOVERY_MAX_S

    def test_a_seed_gives_the_same_run_event_for_event(self, seed: int) -> None:
        keep = [object() for _ in range(999)]  # so that addresses differ
        first = run_seed(seed)
        del keep
        again = run_seed(seed)
        assert first.trace == again.trace
        assert first.digest == again.digest
