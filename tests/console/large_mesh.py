"""Serves the pages of a mesh that exists only as values, without a login: for looks and for size.

python -m tests.console.large_mesh --port 8090 --workers 1000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from dataclasses import replace
from random import Random

from nicegui import app, ui

from console_svc import pages
from console_svc.state.members import Member, Rank
from tests.kit.console import FakeState, full_state, large_mesh, small_mesh

CHANGE_S = 1.0
SMALL_MAX = 10


def _moved(member: Member, random: Random) -> Member:
    """Returns the member with another load."""
    ranks = tuple(_moved_rank(rank, random) for rank in member.ranks)
    return replace(member, ranks=ranks, running=random.randrange(40)) if ranks else member


def _moved_rank(rank: Rank, random: Random) -> Rank:
    return replace(rank, kv_used_blocks=random.randrange(101), running=random.randrange(40))


async def change(state: FakeState) -> None:
    """Changes all loads each second. Ends: with the server."""
    random = Random(1)
    # Ends: the server cancels it.
    while True:
        # Sleep: the interval of the console.
        await asyncio.sleep(CHANGE_S)
        state.members = [_moved(member, random) for member in state.members]
        state.change()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1000)
    arguments = parser.parse_args()
    small = arguments.workers <= SMALL_MAX
    state = full_state(small_mesh() if small else large_mesh(arguments.workers))
    state.interval_s = 1.0
    pages.register(state)
    tasks: list[asyncio.Task[None]] = []

    async def begin() -> None:
        tasks.append(asyncio.create_task(change(state)))

    async def end() -> None:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    app.on_startup(begin)
    app.on_shutdown(end)
    ui.run(
        host="127.0.0.1",
        port=arguments.port,
        dark=None,
        tailwind=False,
        unocss="mini",
        reload=False,
        show=False,
        show_welcome_message=False,
    )


if __name__ == "__main__":
    main()
