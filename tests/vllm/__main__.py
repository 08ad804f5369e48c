"""`python -m tests.vllm [PYTEST ARGUMENT]...`: the last line is JSON with the counts.

A test that is skipped counts as a failure of the target: vLLM is not installed. So does a cell of
vLLM's column in docs/engines.md without a test that has passed, unless arguments choose some tests.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.adapters.__main__ import COUNTED, Outcomes
from tests.adapters.features import COLUMNS, proved_cells

COLUMN = "vllm"


def main() -> int:
    outcomes = Outcomes()
    status = int(pytest.main(["tests/vllm", *sys.argv[1:]], plugins=[outcomes]))
    cells = {cell for cell in proved_cells({**COLUMNS, COLUMN: "vLLM"}) if cell[0] == COLUMN}
    unproved = [] if sys.argv[1:] else sorted(row for _, row in cells - outcomes.proved())
    # Imported here: pytest rewrites the assertions of the kit before their first import.
    from tests.vllm.vllm_server import INSTALL, is_installed

    if not is_installed():
        print(INSTALL)
    found = {name: outcomes.found[name] for name in COUNTED}
    print(json.dumps({**found, "cells": len(cells) - len(unproved), "unproved": unproved}))
    is_incomplete = outcomes.found["skipped"] or not outcomes.found["passed"] or unproved
    return status or (1 if is_incomplete else 0)


if __name__ == "__main__":
    sys.exit(main())
