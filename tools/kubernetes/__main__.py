"""Writes the generated files of deploy/kubernetes: network policies, alerts, Consul's policy.

usage: python -m tools.kubernetes           writes the files
       python -m tools.kubernetes --check   exit status 1 if one of them is not current
"""

from __future__ import annotations

import sys

from tools.generated import write_or_check
from tools.kubernetes.files import ROOT, generated_files

if __name__ == "__main__":
    sys.exit(write_or_check(ROOT, generated_files(), is_check="--check" in sys.argv[1:]))
