"""`meshctl scale`: changes the number of members of a running mesh."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from meshctl.commands.operate import log_dir_flag, run_operation
from meshctl.options import json_flag
from meshctl.usage import Command


@click.command("scale", cls=Command)
@click.argument("counts", nargs=-1, required=True, metavar="GROUP=NUMBER...")
@log_dir_flag
@json_flag
def command(counts: tuple[str, ...], log_dir: Path, as_json: bool) -> int:
    """Changes the number of members of a running mesh.

    GROUP is frontend, router, indexer, or the name of a group of workers: worker=4, or prefill=2
    decode=6. New members are waited for until their peers can use them; those with the highest
    numbers drain. The mesh file keeps its numbers, which the next meshctl up uses.
    """
    return scale(log_dir, counts, as_json=as_json)


def scale(log_dir: Path, counts: Sequence[str], *, as_json: bool) -> int:
    """Returns the exit status. counts: `GROUP=NUMBER` each."""
    found: dict[str, int] = {}
    for text in counts:
        group, _, number = text.partition("=")
        if not group or not number.isdecimal() or group in found:
            raise click.UsageError(f"{text!r}: needs GROUP=NUMBER, each group once")
        found[group] = int(number)
    return run_operation(log_dir, {"command": "scale", "counts": found}, as_json=as_json)
