"""Checks the language, the names and the commits of the repository; part of `make lint`.

usage: python -m tools.style             print the figures; exit status 1 if a check fails
       python -m tools.style --where     also print each place that counts as figurative
       python -m tools.style --diff REV  count only prose that was added since the commit REV

Each module of this folder states its rules in its docstring.
"""

from __future__ import annotations

import argparse
import sys

from tools.style.commits import check_commits
from tools.style.docstrings import check_packed_docstrings
from tools.style.functions import check_function_lengths
from tools.style.loops import check_loops
from tools.style.names import check_class_names, check_log_events
from tools.style.sleeps import check_sleeps
from tools.style.words import added_texts, all_texts, check_words


def main() -> int:
    """Runs the checks of the command line and returns the exit status."""
    parser = argparse.ArgumentParser(prog="style", description="Check language and names.")
    parser.add_argument("--where", action="store_true", help="print each place that counts")
    parser.add_argument("--diff", metavar="REV", help="count only prose added since REV")
    args = parser.parse_args()
    texts = added_texts(args.diff) if args.diff else all_texts()
    checks = [
        check_words(texts, args.where),
        check_log_events(),
        check_class_names(),
        check_function_lengths(),
        check_packed_docstrings(),
        check_sleeps(),
        check_loops(),
        check_commits(),
    ]
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
