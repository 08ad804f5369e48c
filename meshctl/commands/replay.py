"""`meshctl replay`: runs `python -m replay` as a child process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import click

from meshctl.process.child import with_parent_guard


def run_child(module: str, flags: Sequence[str]) -> int:
    """Runs a module as a child; returns its exit status, 128 + n after signal n."""
    command = with_parent_guard([sys.executable, "-m", module, *flags])
    with subprocess.Popen(command) as child:
        while True:
            try:
                status = child.wait()
            except KeyboardInterrupt:
                # The terminal sends the signal to the child, too.
                continue
            return status if status >= 0 else 128 - status


@click.command("replay", add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(flags: tuple[str, ...]) -> int:
    return run_child("replay", flags)
