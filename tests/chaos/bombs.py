"""Inputs without end against a frontend under load: `python -m tests.chaos.bombs [--seconds 20]`.

One tenant has paced streams, another one sends a new constraint every 0.2 s, a third one sends the
bombs of `tests/kit/bombs.py`: constraints and images in requests, tokenizers and templates in cards
of the registry. The last line is JSON:

- gap_p99_ms, gap_p99_bombs_ms: time between two events of a stream, without and with bombs.
- memory_mb, memory_after_mb: of the frontend and its processes, in proportion.
- constraints, constraints_failed, constraint_slowest_s: of the other tenant, while bombs run.
- refused, served: outcomes of the bombs. A constraint that compiles within its limits is served.

The exit status is 1 if a constraint of the other tenant failed, the memory has grown by more than
10 %, a stream failed, or a model of a card is served.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, redirect_stdout
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from common.registry.card import Artifact, ModelCard
from common.registry.file import FileRegistry
from common.registry.instances import Instance
from meshctl.cli import run_command
from tests.kit.bombs import (
    CONSTRAINT_BOMBS,
    MEDIA_BOMBS,
    TEMPLATE_BOMBS,
    TOKENIZER_BOMBS,
    image_url,
)
from tests.kit.processes import MODEL, Mesh
from tests.kit.waiting import until, wait_for
from worker_svc.engines.sim.config import SIM_MODEL_DIR
from worker_svc.engines.sim.make_model import write_model

STREAMS = 8
TENANTS = ("streams", "other", "hostile")
CONSTRAINT_PAUSE_S = 0.2
AT_ONCE = 2
CARD_S = 180.0
MEMORY_GROWTH_MAX = 1.1
REST_S = 20.0
NUMBERS = count(1)

Headers = Mapping[str, str]


def create_keys(path: Path) -> dict[str, Headers]:
    """Returns the headers of each tenant."""
    headers: dict[str, Headers] = {}
    for tenant in TENANTS:
        with redirect_stdout(io.StringIO()) as output:
            arguments = ["create", tenant, "--scopes=infer,admin"]
            assert run_command(["keys", f"--api-keys={path}", *arguments], {}) == 0
        headers[tenant] = {"authorization": f"Bearer {output.getvalue().strip()}"}
    return headers


def memory_mb(pid: int) -> float:
    """The memory of a process and its children; shared pages count in proportion."""
    try:
        status = Path(f"/proc/{pid}/smaps_rollup").read_text()
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [(thread / "children").read_text().split() for thread in threads]
    except OSError:  # it has ended
        return 0.0
    own = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Pss:"))
    return own / 1024 + sum(memory_mb(int(child)) for pids in children for child in pids)


@asynccontextmanager
async def offered(folder: Path, name: str, files: Mapping[str, bytes]) -> AsyncIterator[None]:
    """A card in the registry of a mesh, with a worker that does not respond."""
    registry = FileRegistry(folder / "registry")
    artifacts = {file: Artifact.of(content) for file, content in files.items()}
    card = ModelCard(name=name, artifacts=artifacts)
    await registry.put_card(card)
    worker = Instance(
        next(NUMBERS),
        "default",
        "worker",
        "",
        "127.0.0.1:9",
        model=name,
        card_checksum=card.checksum,
        kv_index="none",
    )
    lease = await registry.register(worker)
    try:
        yield
    finally:
        await lease.close()
        await registry.close()


class Run:
    """One run. gaps: seconds between events of the streams since the last `take_gaps`."""

    def __init__(self, mesh: Mesh, headers: Mapping[str, Headers]) -> None:
        self.mesh = mesh
        self.headers = headers
        self.http = httpx.AsyncClient(base_url=mesh.url, timeout=300.0, trust_env=False)
        self.gaps: list[float] = []
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.waits_s: list[float] = []

    def take_gaps_p99_ms(self) -> float:
        gaps, self.gaps = self.gaps, []
        return round(float(np.percentile(gaps, 99)) * 1e3, 1)

    async def stream(self) -> None:
        """Reads streams, one after the other."""
        body = {
            "model": MODEL,
            "prompt": "x",
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
        }
        while True:
            call = self.http.stream(
                "POST", "/v1/completions", json=body, headers=self.headers["streams"]
            )
            async with call as response:
                last = 0.0
                async for _ in response.aiter_raw():
                    now = time.perf_counter()
                    if last:
                        self.gaps.append(now - last)
                    last = now
            if response.status_code != 200:
                self.failures.append(f"stream: {response.status_code}")
                # Sleep: the pace of a client that tries again.
                await asyncio.sleep(1.0)

    async def constraints(self) -> None:
        """Sends new constraints of the other tenant."""
        while True:
            begin = time.perf_counter()
            fields = {"guided_regex": f"(yes|no){{1,3}} {next(NUMBERS)}"}
            response = await self.complete("other", fields)
            self.waits_s.append(time.perf_counter() - begin)
            if response.status_code != 200:
                self.failures.append(f"constraint: {response.text[:200]}")
            # Sleep: the pace of the tenant.
            await asyncio.sleep(CONSTRAINT_PAUSE_S)

    # Any: JSON.
    async def complete(self, tenant: str, fields: Mapping[str, Any]) -> httpx.Response:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 32, **fields}
        return await self.http.post("/v1/completions", json=body, headers=self.headers[tenant])

    async def send(self, name: str, response: httpx.Response) -> None:
        """Counts the outcome of a bomb in a request."""
        outcome = "served" if response.status_code == 200 else "refused"
        if response.status_code >= 500 and response.status_code != 503:
            self.failures.append(f"{name}: {response.status_code} {response.text[:200]}")
        self.outcomes[outcome] += 1
        print(f"{name}: {response.status_code} {response.text[:160]!r}", file=sys.stderr)

    async def send_constraint(self, name: str, fields: Mapping[str, Any]) -> None:
        await self.send(name, await self.complete("hostile", fields))

    async def send_image(self, name: str, media_type: str, content: bytes) -> None:
        part = {"type": "image_url", "image_url": {"url": image_url(media_type, content)}}
        messages = [{"role": "user", "content": [part]}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 4}
        headers = self.headers["hostile"]
        await self.send(
            name, await self.http.post("/v1/chat/completions", json=body, headers=headers)
        )

    async def offer(self, name: str, files: Mapping[str, bytes]) -> None:
        """Offers a card until the frontend refuses it."""
        model = f"bomb-{next(NUMBERS)}"
        reason = ""

        async def is_decided() -> bool:
            nonlocal reason
            headers = self.headers["other"]
            health = (await self.http.get("/health", headers=headers)).json()
            reason = str(health["models_not_ready"].get(model, ""))
            models = (await self.http.get("/v1/models", headers=headers)).json()["data"]
            is_served = any(entry["id"] == model for entry in models)
            if is_served:
                self.failures.append(f"{name}: the model is served")
            return is_served or "tokenizer.json: " in reason or "template" in reason

        async with offered(self.mesh.folder, model, files):
            await until(is_decided, f"the card is refused: {name}", CARD_S, 0.2)
        self.outcomes["refused"] += 1
        print(f"{name}: {reason[:160]!r}", file=sys.stderr)

    async def send_bombs(self) -> None:
        """Sends all bombs, AT_ONCE at once."""
        tokenizer = (SIM_MODEL_DIR / "tokenizer.json").read_bytes()
        work = [self.send_constraint(name, bomb) for name, bomb in CONSTRAINT_BOMBS.items()]
        work += [self.send_image(name, *bomb) for name, bomb in MEDIA_BOMBS.items()]
        work += [
            self.offer(name, {"tokenizer.json": make(), "tokenizer_config.json": b"{}"})
            for name, make in TOKENIZER_BOMBS.items()
        ]
        work += [
            self.offer(
                name,
                {
                    "tokenizer.json": tokenizer,
                    "tokenizer_config.json": json.dumps({"chat_template": source}).encode(),
                },
            )
            for name, source in TEMPLATE_BOMBS.items()
        ]
        slots = asyncio.Semaphore(AT_ONCE)

        # Any: what a coroutine sends and receives.
        async def run(bomb: Any) -> None:
            async with slots:
                await bomb

        await asyncio.gather(*map(run, work))

    async def run(self, seconds: float) -> dict[str, Any]:
        """Returns the figures of the last line."""
        streams = [asyncio.create_task(self.stream()) for _ in range(STREAMS)]
        constraints = asyncio.create_task(self.constraints())
        pid = self.mesh.frontend.pid
        # Sleep: caches fill.
        await asyncio.sleep(seconds / 4)
        before_mb, self.gaps, self.waits_s = memory_mb(pid), [], []
        # Sleep: the time that is measured.
        await asyncio.sleep(seconds)
        plain_ms, self.waits_s = self.take_gaps_p99_ms(), []
        begin = time.perf_counter()
        await self.send_bombs()
        bombs_s = time.perf_counter() - begin
        bombs_ms, waits_s = self.take_gaps_p99_ms(), self.waits_s
        with contextlib.suppress(AssertionError):
            await until(
                lambda: memory_mb(pid) <= MEMORY_GROWTH_MAX * before_mb, "memory", REST_S, 0.5
            )
        for task in (*streams, constraints):
            task.cancel()
        await asyncio.gather(*streams, constraints, return_exceptions=True)
        await self.http.aclose()
        after_mb = memory_mb(pid)
        return {
            "bombs": sum(self.outcomes.values()),
            **{outcome: self.outcomes[outcome] for outcome in ("refused", "served")},
            "seconds": round(bombs_s, 1),
            "gap_p99_ms": plain_ms,
            "gap_p99_bombs_ms": bombs_ms,
            "gap_ratio": round(bombs_ms / plain_ms, 2),
            "memory_mb": round(before_mb, 1),
            "memory_after_mb": round(after_mb, 1),
            "constraints": len(waits_s),
            "constraint_slowest_s": round(max(waits_s, default=0.0), 2),
            "constraints_failed": sum(text.startswith("constraint") for text in self.failures),
            "failures": self.failures,
        }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0, help="without bombs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name) / "mesh", Path(name) / "model"
        folder.mkdir()
        model.mkdir()
        write_model(model, takes_media=True)
        headers = create_keys(Path(name) / "keys.json")
        with Mesh(folder, workers=1, frontends=0, worker_flags=[f"--model-path={model}"]) as mesh:
            mesh.http.headers.update(headers["other"])
            mesh.spawn("frontend", f"--api-keys={name}/keys.json").wait_ready()
            wait_for(mesh.is_complete, "the frontend uses the router and the worker")
            figures = asyncio.run(Run(mesh, headers).run(options.seconds))
    print(json.dumps(figures))
    grown = figures["memory_after_mb"] > MEMORY_GROWTH_MAX * figures["memory_mb"]
    return 1 if grown or figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
