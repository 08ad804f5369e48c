"""Writes dashboards, alerts, runbook and the reference of the metrics.

usage: python -m tools.dashboards           writes the files
       python -m tools.dashboards --check   exit status 1 if one of them is not current
"""

from __future__ import annotations

import sys

from tools.dashboards.files import ROOT, generated_files
from tools.generated import write_or_check

if __name__ == "__main__":
    sys.exit(write_or_check(ROOT, generated_files(), is_check="--check" in sys.argv[1:]))
