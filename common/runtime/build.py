"""Which form of the modules runs: the compiled one, or their source."""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import Literal

# One of the modules that tools/compile.py compiles. It compiles all or none.
_SAMPLE = "common.kv.prefix_index"


@lru_cache(maxsize=1)
def is_compiled() -> bool:
    """Returns whether the processes of this installation run compiled modules.
    docs/operate/versions.md states what they change."""
    spec = find_spec(_SAMPLE)
    origin = spec.origin if spec is not None else None
    return origin is not None and origin.endswith(tuple(EXTENSION_SUFFIXES))


def build_name() -> Literal["compiled", "source"]:
    """Returns the name of the form, as `/health` shows it."""
    return "compiled" if is_compiled() else "source"


def build_id() -> str:
    """Returns version and form, as members advertise them: `0.1.0 compiled`."""
    try:
        # Without the local part, which names the form too.
        version = metadata.version("kvmesh").partition("+")[0]
    except metadata.PackageNotFoundError:
        version = "uninstalled"
    return f"{version} {build_name()}"
