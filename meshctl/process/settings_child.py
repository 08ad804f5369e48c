"""A program that checks settings with the parsers of the services.

It is a process of its own, because meshctl imports no service, and depends on nothing that a
supported version lacks. Standard input: a JSON list of `{"service", "args", "environ"}`. Standard
output: the problems of each, as a JSON list.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from common.runtime.config import ConfigError, read_config


def find_problems(service: str, args: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns why a service would refuse these flags and variables."""
    config_class = getattr(import_module(f"{service}_svc.config"), f"{service.title()}Config")
    try:
        read_config(config_class, service.upper(), environ, args)
    except ConfigError as error:
        return list(error.problems)
    return []


def main() -> None:
    checks = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # An engine of your own may print.
        problems = [find_problems(**check) for check in checks]
    json.dump(problems, sys.stdout)


if __name__ == "__main__":
    main()
