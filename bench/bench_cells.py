"""`make bench-cells`: fleets of up to 100,000 workers in cells, in virtual time; the last line is
JSON.

- `layouts`: fleets as one mesh and in cells, whose workers are as busy in each: hit rate, TTFT, and
  the requests of the busiest cell as a multiple of the mean (`bench/scale/cells.py`);
- `router`: the shares of a core of each router of a cell of 1,000 workers at one request a second
  and worker: `computed` from unit costs of another run (10 routers, a fifth of the load), by the
  arithmetic of docs/adr/0057, and `simulated`, both without a network.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict

from bench.bench_scale import alone
from bench.measure import print_report
from bench.scale import fleet, registry
from bench.scale.cells import PARTS, Layout, computed_shares, run_layout, simulated_shares

LAYOUTS = (
    Layout(400, 1, 60.0, tenants=80),
    Layout(400, 4, 60.0, tenants=80),
    Layout(400, 4, 60.0, tenants=80, key_blocks=1),
    Layout(4000, 1, 20.0),
    Layout(4000, 4, 20.0),
    Layout(100_000, 100, 2.0),
)
CELL_WORKERS, CELL_ROUTERS = 1000, 4
# Of the run that the unit costs are of.
UNIT_ROUTERS, UNIT_RATE, UNIT_S = 10, 0.2, 2.0
SIMULATED_S = 5.0


def check_router() -> dict[str, dict[str, float]]:
    """Returns the shares of a router, computed and simulated."""
    costs = alone(fleet.measure, CELL_WORKERS, UNIT_ROUTERS, UNIT_RATE, UNIT_S, os.getpid())
    members = alone(registry.measure, CELL_WORKERS)
    found = {
        "computed": computed_shares(costs, CELL_ROUTERS, members),
        "simulated": alone(simulated_shares, CELL_WORKERS, CELL_ROUTERS, SIMULATED_S),
    }
    return {
        name: {**{part: round(shares[part], 4) for part in PARTS}, "sum": round(total(shares), 4)}
        for name, shares in found.items()
    }


def total(shares: dict[str, float]) -> float:
    return sum(shares[part] for part in PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers-max", type=int, default=LAYOUTS[-1].workers)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    router = check_router()
    for name, shares in router.items():
        sys.stdout.write(f"router, {name}: {shares}\n")
    layouts = {}
    for layout in LAYOUTS:
        if layout.workers <= args.workers_max:
            found = layouts[layout.name] = alone(run_layout, layout, args.seed)
            sys.stdout.write(f"{layout.name}: {found}\n")
            sys.stdout.flush()
    rows = {
        name: {key: round(value, 4) for key, value in asdict(found).items()}
        for name, found in layouts.items()
    }
    print_report("cells", vars(args), {"router": router, "layouts": rows})


if __name__ == "__main__":
    main()
