"""The commands of `meshctl`, from their click commands."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Final

import click

from common.runtime.config import ConfigCommand
from meshctl.cli import application
from tools.docs.references.settings import setting_table
from tools.docs.references.text import code, page, prose, table

_NOTE: Final = """[The command line](../operations.md#the-command-line) describes how commands \
name members, print JSON and end."""


def commands_page() -> str:
    """Returns the page of all commands."""
    return page("meshctl", "the commands of `meshctl`", _NOTE, *_parts(application, "meshctl"))


def _parts(group: click.Group, name: str) -> Iterator[str]:
    context = click.Context(group, info_name=name)
    for child in group.list_commands(context):
        command = group.get_command(context, child)
        assert command is not None
        full = f"{name} {child}"
        yield f"## {full}" if name == "meshctl" else f"### {full}"
        if isinstance(command, click.Group):
            yield prose(_help(command))
            yield _own_options(command)
            yield from _parts(command, full)
            continue
        arguments = [
            param.make_metavar(click.Context(command))
            for param in command.params
            if isinstance(param, click.Argument)
        ]
        yield code(" ".join([full, "[FLAGS]", *arguments]))
        yield prose(_help(command))
        yield _own_options(command)
        if isinstance(command, ConfigCommand):
            yield setting_table(command.settings_with_flag)


def _help(command: click.Command) -> str:
    return inspect.cleandoc(command.help or "")


def _own_options(command: click.Command) -> str:
    """Returns the table of the options that are no settings; empty if there are none."""
    own = command.own_params if isinstance(command, ConfigCommand) else None
    rows = [
        [
            " ".join(map(code, [*param.opts, *param.secondary_opts])),
            "" if param.is_flag else (param.metavar or str(param.type.name)).upper(),
            prose(param.help or ""),
        ]
        for param in command.params
        if isinstance(param, click.Option) and (own is None or param.name in own)
    ]
    return table(["flag", "value", "meaning"], rows) if rows else ""
