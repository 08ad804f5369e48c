"""`meshctl down`: stops a mesh that `meshctl up` started."""

from __future__ import annotations

from pathlib import Path

import click

from meshctl.commands.operate import log_dir_flag, run_operation
from meshctl.options import json_flag
from meshctl.usage import Command


@click.command("down", cls=Command)
@log_dir_flag
@json_flag
def command(log_dir: Path, as_json: bool) -> int:
    """Stops a mesh that `meshctl up` started, after its requests have ended.

    A mesh on Ray has no process that Ctrl-C could end: this command ends it, and waits until all
    its members have ended. Of a mesh on this host, `meshctl up` ends.
    """
    return down(log_dir, as_json=as_json)


def down(log_dir: Path, *, as_json: bool) -> int:
    """Returns the exit status."""
    return run_operation(log_dir, {"command": "stop", "names": []}, as_json=as_json)
