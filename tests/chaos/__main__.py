"""Injects faults into real processes under load.

    python -m tests.chaos [--list] [--logs DIR] [CASE ...]

CASE is a name or a part of one; all cases by default. Prints one JSON line a case. The exit status
is 1 if a case misses a limit. `load` is the machine's one-minute average before and after.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.chaos.cases import GRAY_CASES, Case, GrayCase, all_cases
from tests.chaos.drive import run_case
from tests.chaos.gray import run_gray_case


def main(argv: list[str]) -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--logs", type=Path, help="keep the services' logs in folders under DIR")
    options = parser.parse_args(argv)
    name_parts = options.cases or [""]
    by_name: dict[str, Case | GrayCase] = {case.name: case for case in all_cases()}
    by_name |= {f"gray/{case.name}": case for case in GRAY_CASES}
    cases = {name: by_name[name] for name in by_name if any(part in name for part in name_parts)}
    if not cases:
        parser.error(f"no case name contains {' or '.join(name_parts)}; see --list")
    if options.list:
        print("\n".join(cases))
        return 0
    missed = 0
    for name, case in cases.items():
        folder = None
        if options.logs is not None:
            folder = options.logs / name.replace("/", "-")
            folder.mkdir(parents=True)
        if isinstance(case, GrayCase):
            line = run_gray_case(case, keep_logs=folder)
        else:
            line = run_case(case, keep_logs=folder)
        missed += bool(line["missed"])
        print(json.dumps(line), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
