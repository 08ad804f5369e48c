"""Runs of seeds on all processors."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

from tests.sim.draws import draw_scenario
from tests.sim.world import run_scenario

# Fewer take less time than the start of a process.
SEEDS_A_PROCESS_MIN = 10


@dataclass(frozen=True, slots=True)
class SeedResult:
    """The result of a seed, of built-in types only: frozen classes of compiled modules, which a
    report has, do not pass between processes.

    failure: what is printed, "" if the seed passed. The other fields are those of the report.
    """

    failure: str = ""
    trace: Sequence[str] = ()
    virtual_s: float = 0.0
    recovered_s: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)


def run_seeds(seeds: Sequence[int], *, storm: bool) -> Iterator[SeedResult]:
    """Yields the result of each seed, in order."""
    run = partial(_run, storm=storm)
    processes = min(os.cpu_count() or 1, len(seeds) // SEEDS_A_PROCESS_MIN)
    if processes < 2:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(run, seeds)


def _run(seed: int, *, storm: bool) -> SeedResult:
    """An error of the run itself is a failure of the seed."""
    scenario = draw_scenario(seed, storm=storm)
    try:
        report = run_scenario(scenario)
    except Exception:
        return SeedResult(f"seed {seed}:\n{traceback.format_exc()}  replay: {scenario.command}")
    return SeedResult(
        str(report) if report.violations else "",
        report.trace,
        report.virtual_s,
        report.recovered_s,
        dict(report.counts),
    )
