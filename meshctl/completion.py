"""Completion of arguments in a shell; that of commands and flags is click's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import click

from common.errors import MeshError
from common.runtime.config import ConfigError
from meshctl.options import MeshCommand
from meshctl.view.members import read_members


def complete_members(ctx: click.Context, _param: click.Parameter, start: str) -> list[str]:
    """Returns the stable names of members; of members without one, the keys."""
    command = ctx.command
    assert isinstance(command, MeshCommand)
    environ: Mapping[str, str] = ctx.obj

    try:
        config, _ = command.read(ctx, environ)
        snapshot = asyncio.run(read_members(config))
    except (MeshError, ConfigError):
        return []
    names = [instance.stable_name or instance.key for instance in snapshot.instances.values()]
    return sorted(name for name in names if name.startswith(start))
