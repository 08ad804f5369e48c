"""`python -m worker_svc.conformance MODULE:ENGINE [--arg NAME=VALUE]...`: one line a check.

ENGINE is a class, or any callable, that returns an engine. Arguments are given to it by name, their
values read as JSON, else as text; where it takes one dataclass (`config`), they are its fields.
Exit status: 0 when nothing failed, 1 when something did, 2 when there is no such engine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib
import inspect
import json
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from common.runtime.config import flag_of
from worker_svc.conformance.bench import Limits
from worker_svc.conformance.report import Verdict, results
from worker_svc.engines.contract import LLMEngine

NO_ENGINE = 2
# What the fields of Limits are for.
_LIMITS = {
    "start_s": "to start",
    "answer_s": "to answer a request",
    "stop_s": "to heed a stop and to let go of a stream; what the mesh counts on",
    "end_s": "to come to rest, to drain and to clean up",
}


class NoEngine(Exception):
    """Why no engine can be made of what was given."""


# Any: whatever an engine takes.
def maker(target: str, arguments: dict[str, Any]) -> Callable[[], LLMEngine]:
    """What makes the engine. Raises NoEngine."""
    module_name, _, name = target.partition(":")
    if not name:
        raise NoEngine(f"{target!r} is not MODULE:ENGINE")
    try:
        make = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise NoEngine(f"{target}: {error}") from error
    if not callable(make):
        raise NoEngine(f"{target} cannot be called")
    config = _config_of(make)
    if config is None:
        return lambda: typing.cast(LLMEngine, make(**arguments))
    unknown = _unknown(config, arguments)
    if unknown:
        raise NoEngine(f"{target}: {config.__name__} has no {', '.join(unknown)}")
    try:
        made: object = TypeAdapter(config).validate_python(arguments)
    except ValidationError as error:
        raise NoEngine(f"{target}: {error}") from error
    return lambda: typing.cast(LLMEngine, make(made))


def _config_of(make: Callable[..., Any]) -> type | None:
    """The dataclass that is the only argument which has to be given."""
    needed = [
        one
        for one in inspect.signature(make).parameters.values()
        if one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.POSITIONAL_ONLY)
    ]
    if len(needed) != 1:
        return None
    source = make.__init__ if inspect.isclass(make) else make
    kind = typing.get_type_hints(source).get(needed[0].name)
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _unknown(config: type, arguments: dict[str, Any], path: str = "") -> list[str]:
    """Names that no field has, down to dataclasses within it."""
    hints = typing.get_type_hints(config)
    found = []
    for name, value in arguments.items():
        if name not in hints:
            found.append(path + name)
        elif isinstance(value, dict) and dataclasses.is_dataclass(hints[name]):
            found += _unknown(hints[name], value, f"{path}{name}.")
    return found


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


async def run(make: Callable[[], LLMEngine], limits: Limits) -> int:
    """Prints the results and returns the exit status."""
    counts = dict.fromkeys(Verdict, 0)
    async for result in results(make, limits):
        counts[result.verdict] += 1
        print(result, flush=True)
    print(", ".join(f"{count} {verdict.lower()}" for verdict, count in counts.items()))
    return 1 if counts[Verdict.FAIL] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m worker_svc.conformance",
        description="Checks an engine against the contract of worker_svc/engines/contract.py.",
    )
    parser.add_argument(
        "engine", metavar="MODULE:ENGINE", help="a class, or any callable, that makes the engine"
    )
    parser.add_argument(
        "--arg",
        action="append",
        type=_argument,
        default=[],
        metavar="NAME=VALUE",
        help="given to ENGINE by name, again and again; the value is read as JSON, else as text;"
        " where ENGINE takes one dataclass, these are its fields",
    )
    for name, default in dataclasses.asdict(Limits()).items():
        parser.add_argument(
            flag_of(name),
            type=float,
            default=default,
            metavar="SECONDS",
            help=f"how long it may take {_LIMITS[name]} (default {default:g})",
        )
    given = parser.parse_args(arguments)
    try:
        make = maker(given.engine, dict(given.arg))
        make()
    except Exception as error:
        print(f"there is no engine to check: {error}", file=sys.stderr)
        return NO_ENGINE
    limits = {one.name: getattr(given, one.name) for one in dataclasses.fields(Limits)}
    return asyncio.run(run(make, Limits(**limits)))


if __name__ == "__main__":
    sys.exit(main())
