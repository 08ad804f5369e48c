"""Runs of seeds on all processors."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from tests.sim.draws import draw_scenario
from tests.sim.world import Report, run_scenario

# Fewer take less time than the start of a process.
SEEDS_A_PROCESS_MIN = 10


def run_seeds(seeds: Sequence[int], *, storm: bool) -> Iterator[Report | None]:
    """Yields the result of each seed, in order; None: the run itself failed."""
    run = partial(_run, storm=storm)
    processes = min(os.cpu_count() or 1, len(seeds) // SEEDS_A_PROCESS_MIN)
    if processes < 2:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(run, seeds)


def _run(seed: int, *, storm: bool) -> Report | None:
    """None if the run itself failed; the error is printed."""
    scenario = draw_scenario(seed, storm=storm)
    try:
        return run_scenario(scenario)
    except Exception:
        print(f"seed {seed}:\n{traceback.format_exc()}  replay: {scenario.command}", flush=True)
        return None
