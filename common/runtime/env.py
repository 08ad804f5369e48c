"""The process environment. Only this module reads it."""

from __future__ import annotations

import os


def environ() -> dict[str, str]:
    """A copy of the environment variables."""
    return dict(os.environ)
