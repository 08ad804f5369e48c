"""Settings that name a part of the package, or `module:factory` for one of another package."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

# The engines of the worker, which `meshctl up` also offers.
ENGINES = ("sim", "echo", "sglang", "openai")


def check_plugin_name(name: str, built_in: Iterable[str]) -> str:
    """Returns the name. Raises ValueError if it is neither built in nor `module:factory`."""
    module_name, _, factory_name = name.partition(":")
    if name in built_in or (module_name and factory_name):
        return name
    raise ValueError(f"must be one of {', '.join(built_in)}, or module:factory")


def import_factory(name: str, result: str) -> Callable[..., Any]:
    """Returns the callable that `module:factory` names. Raises ValueError with the reason.

    result: the type of what the factory has to return, for the message.
    """
    module_name, _, factory_name = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
    except Exception as error:
        # Importing runs foreign code, which may raise anything.
        raise ValueError(f"cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise ValueError(f"is not callable; it must return {result}")
    found: Callable[..., Any] = factory
    return found
