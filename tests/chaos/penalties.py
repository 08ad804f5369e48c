"""A response with penalties loses its worker in a mesh of two versions.

Workers of some versions do not count the output of another worker for penalties, and do not refuse
to continue it: the rest of the response would silently differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from tests.chaos.client import Reply, body_of, fetch
from tests.kit.local_mesh import local_mesh
from tests.kit.processes import Mesh
from tests.kit.waiting import WAIT_S, until

# Any: JSON.
PENALTIES: dict[str, Any] = {"presence_penalty": 1.0, "frequency_penalty": 0.5}
PROMPT = "A response with penalties"
# Of the response when its worker is killed.
EVENTS_MIN = 20


@dataclass(frozen=True, slots=True)
class Loss:
    """A mesh of one worker of this version, which is killed in the middle of a response.

    joins: the version of the worker that joins. is_before: whether it joins before the loss.
    continues: whether the response continues on it. speedup: of the workers. tokens: of the
    response; at that speed it lasts until the loss.
    """

    joins: str
    is_before: bool = False
    continues: bool = False
    speedup: float = 1.0
    tokens: int = 300


LOSSES = {
    # A minute of tokens: a process starts meanwhile on a busy machine.
    "old-joins-before": Loss("old", is_before=True, speedup=0.2, tokens=2000),
    "old-joins-after": Loss("old"),
    "new-joins-after": Loss("new", continues=True),
}


async def expected_text(tokens: int) -> str:
    """Returns the response of this version without a loss."""
    body = {**body_of(PROMPT, tokens, stream=False), **PENALTIES}
    with capture_logs():
        async with local_mesh() as mesh, mesh.router(), mesh.worker():
            response = await mesh.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def lose_worker(mesh: Mesh, loss: Loss, joining: Path) -> Reply:
    """Returns the response whose worker was lost. joining: the source of the worker that joins."""
    reply = Reply(PROMPT, loss.tokens)
    call = asyncio.create_task(fetch(mesh.url, reply, **PENALTIES))
    await until(lambda: reply.events >= EVENTS_MIN, "the response has begun")
    (worker,) = mesh.workers
    if loss.is_before:
        await asyncio.to_thread(mesh.spawn("worker", tree=joining).wait_ready)
        await until(mesh.is_complete, "the frontend uses the worker that joined")
        assert not call.done(), "the response ended before the loss of its worker"
    worker.kill()
    if not loss.is_before:
        await until(lambda: mesh.awaiting_worker() == 1, "the response waits for a worker")
        await asyncio.to_thread(mesh.spawn("worker", tree=joining).wait_ready)
    return await asyncio.wait_for(call, 2 * WAIT_S)


def faults_of(reply: Reply, expected: str, loss: Loss) -> Iterator[str]:
    """Yields how the response differs from the one that its client must have."""
    if not expected.startswith(reply.text):
        pairs = zip(reply.text, expected, strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), len(expected))
        yield f"{reply.text[at:][:80]!r} after {at} characters, expected {expected[at:][:80]!r}"
    if loss.continues:
        if reply.error or reply.text != expected:
            yield f"it did not continue: {reply.error or 'it is too short'}"
    elif "because of presence_penalty" not in reply.error:
        yield f"it did not end as one that cannot continue: {reply.error or 'without an error'}"
