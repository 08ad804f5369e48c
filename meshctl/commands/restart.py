"""`meshctl restart`: replaces members of a running `meshctl up`, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from meshctl.commands.operate import complete_names, log_dir_flag, run_operation
from meshctl.options import json_flag
from meshctl.usage import Command


@click.command("restart", cls=Command)
@click.argument("names", nargs=-1, shell_complete=complete_names)
@click.option("--wait", is_flag=True, help="Wait until all are replaced; print the progress.")
@click.option(
    "--surge/--no-surge",
    "new_first",
    default=None,
    help="Start each new process beside the old one, or after it. By default beside it for"
    " frontends and for the only live member of a role.",
)
@log_dir_flag
@json_flag
def command(
    names: tuple[str, ...], wait: bool, new_first: bool | None, log_dir: Path, as_json: bool
) -> int:
    """Replaces members of a running `meshctl up`, one at a time.

    NAMES are members, services or roles: worker-0, router, prefill. Without names all members
    except drained ones are replaced. The new processes run the code on disk and the settings that
    the mesh file has now. It stops at the first member that its peers cannot use.
    """
    return restart(log_dir, names, wait=wait, new_first=new_first, as_json=as_json)


def restart(
    log_dir: Path,
    names: Sequence[str],
    *,
    wait: bool,
    new_first: bool | None,
    as_json: bool,
) -> int:
    """Returns the exit status.

    - names: members, services or roles; empty: all members.
    - wait: until all are replaced.
    - new_first: whether the new process is routable before the old one ends. None: for frontends,
      and for the only live member of a role.
    """
    line = {"command": "restart", "names": list(names), "new_first": new_first, "wait": wait}
    return run_operation(log_dir, line, as_json=as_json)
