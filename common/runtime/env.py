"""The process environment: the only file that reads it, so that nothing else depends on it."""

from __future__ import annotations

import os


def environ() -> dict[str, str]:
    """A copy of the environment variables; changing it changes nothing else."""
    return dict(os.environ)
