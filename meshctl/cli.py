"""The command line of `meshctl`: a table of commands, each of which is imported when it runs.

Exit status of every command:

- 0: done. A command that runs until Ctrl-C (`top`, `logs -f`) ends with 0, too.
- 1: the mesh has a problem, or what was asked for does not exist or has failed.
- 2: nothing was done: an invalid command line or setting, or a registry that cannot be reached.
- 128 + n: ended by signal n; 130: by Ctrl-C.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence

import click
from click.shell_completion import CompletionItem

from common.errors import MeshError, NotFound
from meshctl.usage import Group, describe

# Name: help. The command is `command` of the module of this name in meshctl/commands.
COMMANDS = {
    "up": "start a mesh on this host and keep it running",
    "status": "show members, health, load and KV use",
    "top": "show load and traffic, refreshed each second",
    "chat": "send messages to a model",
    "explain": "show why a router chose the worker of a request",
    "trace": "show where the time of a request went",
    "requests": "show the last requests of all frontends",
    "batches": "show batches and their progress",
    "logs": "show the logs of the services of `up`",
    "doctor": "find what is wrong with a mesh and this host, and what to do",
    "restart": "replace members of `meshctl up`, one at a time, under load",
    "drain": "stop a member of `meshctl up` after its requests have ended",
    "start": "start a drained member of `meshctl up`",
    "adapters": "add, remove and list the LoRA adapters that workers hold",
    "scale": "change the number of members of `meshctl up`",
    "down": "stop the mesh of `meshctl up`, also one on Ray",
    "export": "write the units of systemd that run a mesh",
    "health": "request the health of a gRPC port",
    "console": "print a link that logs in to the console once",
    "keys": "create, list, revoke and rotate the API keys of clients",
    "usage": "show the tokens that tenants, keys, models and adapters used",
    "replay": "compare routing policies on a trace, in virtual time",
    "plan": "find how many workers a trace needs, by measured speeds and replays",
    "demo": "run a disaggregated mesh, two requests with a common prefix, and show their trace",
}
EXIT_FAILED = 1
EXIT_NOTHING_DONE = 2
EXIT_INTERRUPTED = 130


class Application(Group):
    """All commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"meshctl.commands.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=text)
            for name, text in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)


application = Application("meshctl", help="Starts, observes and operates a mesh.")


def run_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a command line, prints what is wrong with it, and returns the exit status."""
    try:
        status: int | None = application.main(
            list(argv), prog_name="meshctl", standalone_mode=False, obj=environ
        )
    except click.ClickException as error:
        sys.stderr.write(describe(error))
        return EXIT_NOTHING_DONE
    except click.Abort:
        return EXIT_INTERRUPTED
    except MeshError as error:
        sys.stderr.write(f"meshctl: {error.message}\n")
        return EXIT_FAILED if isinstance(error, NotFound) else EXIT_NOTHING_DONE
    return status or 0
