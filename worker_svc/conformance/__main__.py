"""`python -m worker_svc.conformance MODULE:ENGINE [--arg NAME=VALUE]...`: prints one line per
check.

ENGINE is a class, or any callable, that returns an engine. Arguments are passed by name, their
values parsed as JSON, else as text; if ENGINE takes one dataclass (`config`), they are its fields.
Exit status: 0 if no check failed, 1 if one did, 2 if the engine cannot be constructed.
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

from common.runtime.config import flag_name
from worker_svc.conformance.harness import TimeLimits
from worker_svc.conformance.report import Verdict, run_checks
from worker_svc.engines.contract import LLMEngine

EXIT_NO_ENGINE = 2
# Help texts of the fields of TimeLimits.
_LIMIT_HELP = {
    "start_s": "to start",
    "answer_s": "to answer a request",
    "stop_s": "to end a stopped or closed stream; the mesh relies on the default",
    "end_s": "to become idle, to drain and to clean up",
}


# Any: arguments of an engine.
def load_engine_factory(engine_spec: str, arguments: dict[str, Any]) -> Callable[[], LLMEngine]:
    """Returns a constructor of the engine. Raises ValueError with the reason."""
    module_name, _, name = engine_spec.partition(":")
    if not name:
        raise ValueError(f"{engine_spec!r} is not MODULE:ENGINE")
    try:
        make_engine = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{engine_spec}: {error}") from error
    if not callable(make_engine):
        raise ValueError(f"{engine_spec} cannot be called")
    config = _config_class(make_engine)
    if config is None:
        return lambda: typing.cast(LLMEngine, make_engine(**arguments))
    if unknown := _unknown_fields(config, arguments):
        raise ValueError(f"{engine_spec}: {config.__name__} has no {', '.join(unknown)}")
    try:
        config_value: object = TypeAdapter(config).validate_python(arguments)
    except ValidationError as error:
        raise ValueError(f"{engine_spec}: {error}") from error
    return lambda: typing.cast(LLMEngine, make_engine(config_value))


def _config_class(make_engine: Callable[..., Any]) -> type | None:
    """Returns the dataclass if it is the only required argument."""
    required = [
        parameter
        for parameter in inspect.signature(make_engine).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY)
    ]
    if len(required) != 1:
        return None
    source = make_engine.__init__ if inspect.isclass(make_engine) else make_engine
    kind = typing.get_type_hints(source).get(required[0].name)
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _unknown_fields(config: type, arguments: dict[str, Any], path: str = "") -> list[str]:
    """Returns the names that are not fields, including those of nested dataclasses."""
    hints = typing.get_type_hints(config)
    found = []
    for name, value in arguments.items():
        if name not in hints:
            found.append(path + name)
        elif isinstance(value, dict) and dataclasses.is_dataclass(hints[name]):
            found += _unknown_fields(hints[name], value, f"{path}{name}.")
    return found


def _parse_argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


async def run(make_engine: Callable[[], LLMEngine], limits: TimeLimits) -> int:
    counts = dict.fromkeys(Verdict, 0)
    async for result in run_checks(make_engine, limits):
        counts[result.verdict] += 1
        print(result, flush=True)
    print(", ".join(f"{count} {verdict.lower()}" for verdict, count in counts.items()))
    return 1 if counts[Verdict.FAIL] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m worker_svc.conformance",
        description="Checks an engine against the contract of worker_svc/engines/contract.py.",
    )
    parser.add_argument(
        "engine", metavar="MODULE:ENGINE", help="a class, or any callable, that returns an engine"
    )
    parser.add_argument(
        "--arg",
        action="append",
        type=_parse_argument,
        default=[],
        metavar="NAME=VALUE",
        help="argument of ENGINE, repeatable; the value is parsed as JSON, else as text;"
        " if ENGINE takes one dataclass, these are its fields",
    )
    for name, default in dataclasses.asdict(TimeLimits()).items():
        parser.add_argument(
            flag_name(name),
            type=float,
            default=default,
            metavar="SECONDS",
            help=f"time limit {_LIMIT_HELP[name]} (default {default:g})",
        )
    args = parser.parse_args(arguments)
    try:
        make_engine = load_engine_factory(args.engine, dict(args.arg))
        make_engine()
    except Exception as error:
        print(f"cannot construct the engine: {error}", file=sys.stderr)
        return EXIT_NO_ENGINE
    limits = {field.name: getattr(args, field.name) for field in dataclasses.fields(TimeLimits)}
    return asyncio.run(run(make_engine, TimeLimits(**limits)))


if __name__ == "__main__":
    sys.exit(main())
