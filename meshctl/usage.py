"""Groups of commands, and what is wrong with a command line as one text.

It imports no module of the project that is slow to load, so that `meshctl --help` is fast.
"""

from __future__ import annotations

from collections.abc import Sequence

# Any: of click.
from typing import Any

import click

from common.runtime.suggestion import suggest


class UnusableSettings(click.UsageError):
    """The flags and variables give no valid settings. problems: a sentence for each problem."""

    def __init__(self, problems: Sequence[str], ctx: click.Context) -> None:
        super().__init__("the configuration cannot be used", ctx)
        self.problems = problems


class Command(click.Command):
    """A command without settings. Its errors name it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            # That of a missing value has none.
            error.ctx = error.ctx or ctx
            raise


class Group(click.Group):
    """A command with commands of its own, in the order of their declaration."""

    def __init__(self, name: str, **attributes: Any) -> None:
        super().__init__(
            name,
            callback=self._require_command,
            invoke_without_command=True,
            options_metavar="[FLAGS]",
            subcommand_metavar="COMMAND ...",
            context_settings={"help_option_names": ["-h", "--help"]},
            **attributes,
        )

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args[0] not in names and not ctx.resilient_parsing:
            message = f"{args[0]!r}: no such command{suggest(args[0], names)}"
            raise click.UsageError(message, ctx)
        return super().resolve_command(ctx, args)

    def _require_command(self, **_params: object) -> None:
        ctx = click.get_current_context()
        if ctx.invoked_subcommand is None:
            names = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"a command is required: {names}", ctx)


def describe(error: click.ClickException) -> str:
    """Returns the lines to print: they name the command, the argument at fault and the help."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    program = "meshctl" if ctx is None else ctx.command_path
    match error:
        case UnusableSettings(problems=problems):
            return "".join(
                [f"{program}: {error.message}:\n", *(f"  {text}\n" for text in problems)]
            )
        case click.NoSuchOption(option_name=name):
            known = (
                [] if ctx is None else [opt for p in ctx.command.get_params(ctx) for opt in p.opts]
            )
            message = f"{name}: no such flag{suggest(name, known)}"
        case click.BadOptionUsage(option_name=name):
            message = f"{name}: {error.message.removeprefix(f'Option {name!r} ')}"
        case click.MissingParameter(param=click.Parameter() as param):
            message = f"{_name(param)}: required and not given"
        case click.BadParameter(param=click.Parameter() as param):
            message = f"{_name(param)}: {error.message}"
        case _:
            message = error.message
    message = message.removesuffix(".")
    return f"{program}: {message} (see {program} --help)\n"


def _name(param: click.Parameter) -> str:
    return (
        param.opts[0]
        if isinstance(param, click.Option)
        else f"argument {param.human_readable_name}"
    )
