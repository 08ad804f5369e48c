"""`meshctl drain`: stops a member of a running `meshctl up` after its requests have ended."""

from __future__ import annotations

from pathlib import Path

import click

from meshctl.commands.operate import complete_names, log_dir_flag, run_operation
from meshctl.options import json_flag
from meshctl.usage import Command


@click.command("drain", cls=Command)
@click.argument("name", shell_complete=complete_names)
@click.option("--force", is_flag=True, help="Also the last live member of a role.")
@log_dir_flag
@json_flag
def command(name: str, force: bool, log_dir: Path, as_json: bool) -> int:
    """Stops a member of a running `meshctl up` after its requests have ended.

    It does not start again before `meshctl start NAME`.
    """
    return drain(log_dir, name, force=force, as_json=as_json)


def drain(log_dir: Path, name: str, *, force: bool, as_json: bool) -> int:
    """Returns the exit status. force: also the last live member of its role."""
    line = {"command": "drain", "names": [name], "force": force}
    return run_operation(log_dir, line, as_json=as_json)
