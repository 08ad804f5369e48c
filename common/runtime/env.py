"""The process environment; the services read it only here."""

from __future__ import annotations

import os


def environ() -> dict[str, str]:
    """Returns a copy of the environment variables."""
    return dict(os.environ)
