"""`meshctl start`: starts a drained member of a running `meshctl up`."""

from __future__ import annotations

from pathlib import Path

import click

from meshctl.commands.operate import complete_names, log_dir_flag, run_operation
from meshctl.options import json_flag
from meshctl.usage import Command


@click.command("start", cls=Command)
@click.argument("name", shell_complete=complete_names)
@log_dir_flag
@json_flag
def command(name: str, log_dir: Path, as_json: bool) -> int:
    """Starts a drained or failed member of a running `meshctl up`, and waits until its peers can
    use it."""
    return start(log_dir, name, as_json=as_json)


def start(log_dir: Path, name: str, *, as_json: bool) -> int:
    """Returns the exit status."""
    return run_operation(log_dir, {"command": "start", "names": [name]}, as_json=as_json)
