"""Writes dashboards, alerts, runbook and the reference of the metrics.

usage: python -m tools.dashboards           writes the files
       python -m tools.dashboards --check   exit status 1 if one of them is not current
"""

from __future__ import annotations

import sys

from tools.dashboards.files import ROOT, generated_files


def main() -> int:
    """Returns the exit status."""
    is_check = "--check" in sys.argv[1:]
    changed = []
    for path, content in generated_files().items():
        if not path.exists() or path.read_text() != content:
            changed.append(str(path.relative_to(ROOT)))
            if not is_check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
    for name in changed:
        print(f"{name}: {'not current' if is_check else 'written'}")
    return 1 if is_check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
