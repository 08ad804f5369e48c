"""Runs services of a supported version beside those of this tree: `python -m tests.chaos.skew`.

Each case is one mesh of real processes, in which the kinds of process of its name have the other
version, or one of two processes of each kind. It serves requests of all kinds; every response is
compared with that of this version alone. A case `upgrade` replaces each old process by a new one
under that load; `background` sends responses in the background beside it; in a case `penalties` a
response loses its worker while one of a version joins. Prints one JSON line for each case, then the
sums. The exit status is 1 if a case failed, or could not run: a missing commit is a failure, with
the git command that fetches it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from tests.chaos import penalties
from tests.chaos.cases import Shape
from tests.contract.consul_agent import ConsulAgent, running_agent
from tests.kit.local_mesh import local_mesh
from tests.kit.processes import KINDS, MODEL, ROLES, ROOT, Mesh, Service
from tests.kit.request_kinds import KindRequest, content_of, requests_of
from tests.kit.versions import MissingCommit, model_flags, old_version_tree
from tests.kit.waiting import WAIT_S, until
from tools.versions.supported import supported_versions

CLIENTS = 8
ROUNDS = 3
CALL_S = 60.0
# No supported version has a batch service: it is of this version wherever there is one.
_SKEWED = tuple(kind for kind in KINDS if kind != "batch")
# A busy machine causes some. Handoffs that two versions cannot do cause more than one a request.
RETRIES_MAX_SHARE = 0.5
ACCEPTED = 'kvmesh_worker_requests_total{outcome="accepted"}'
TOKEN = "the secret of the mesh, 32 bytes"
AGGREGATED = Shape(workers=2)
PAIRS = Shape(prefill=2, decode=2)


@dataclass(frozen=True, slots=True)
class SkewCase:
    """One mesh of two versions.

    other: kinds of process that have the other version. is_old_mesh: whether that is this version,
    in a mesh of the old one. is_mixed: one of two processes of each kind has the old version.
    is_upgrade: the mesh is old, and each process is replaced by a new one under load. has_batch:
    the mesh has a batch service, and runs responses in the background too. loss: the only request
    has penalties and loses its worker. rounds: of requests of all kinds, by each frontend.
    """

    name: str
    shape: Shape = AGGREGATED
    other: tuple[str, ...] = ()
    is_old_mesh: bool = False
    is_mixed: bool = False
    is_upgrade: bool = False
    has_token: bool = False
    has_consul: bool = False
    has_batch: bool = False
    loss: penalties.Loss | None = None
    rounds: int = ROUNDS


_DOUBLE = {"routers": 2, "indexers": 2, "frontends": 2}
MIXED = SkewCase("mixed/agg", replace(AGGREGATED, **_DOUBLE), is_mixed=True)
MIXED_PAIRS = SkewCase("mixed/pd", replace(PAIRS, **_DOUBLE), is_mixed=True)


def all_cases() -> list[SkewCase]:
    """Returns all cases in run order."""
    cases: list[SkewCase] = []
    for is_old_mesh, prefix in ((False, "old"), (True, "new")):
        cases += [
            SkewCase(
                f"{prefix}-{kind}", PAIRS if kind in ROLES else AGGREGATED, (kind,), is_old_mesh
            )
            for kind in _SKEWED
        ]
    cases += [MIXED, MIXED_PAIRS]
    cases += [replace(case, name=f"{case.name}/token", has_token=True) for case in cases[-2:]]
    cases.append(replace(MIXED, name="mixed/agg/consul", has_consul=True))
    cases.append(SkewCase("upgrade/agg", MIXED.shape, is_upgrade=True, rounds=1))
    cases.append(
        SkewCase("upgrade/pd", MIXED_PAIRS.shape, is_upgrade=True, has_token=True, rounds=1)
    )
    cases.append(replace(MIXED, name="background/agg", has_batch=True))
    cases += [
        SkewCase(f"penalties/{name}", Shape(workers=1), loss=loss)
        for name, loss in penalties.LOSSES.items()
    ]
    return cases


@dataclass(slots=True)
class Outcome:
    """The responses of a case."""

    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    inexact: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    """Attempts of requests after a first one that failed, as a handoff between versions may."""
    unused: list[str] = field(default_factory=list)
    """Workers without a request, and processes that ended."""

    def line(self, case: SkewCase, took_s: float) -> dict[str, Any]:
        """Returns the JSON line of the case."""
        failed = [name for name in ("errors", "inexact", "unused") if getattr(self, name)]
        if self.retries > RETRIES_MAX_SHARE * self.requests:
            failed.append("retries")
        line = {
            "case": case.name,
            "requests": self.requests,
            "errors": self.errors.total(),
            "inexact": self.inexact.total(),
            "retries": self.retries,
            "seconds": round(took_s, 1),
            "failed": failed,
        }
        why = [*self.errors, *self.inexact, *self.unused][:3]
        return {**line, **({"why": why} if why else {})}


async def reference_contents(rounds: int) -> dict[tuple[str, int], Any]:
    """Returns the content of each response of this version alone: by kind and number."""
    contents = {}
    with capture_logs():
        async with local_mesh() as mesh, mesh.router(), mesh.worker():
            for number in range(rounds):
                for request in requests_of(number):
                    response = await mesh.http.post(f"/v1/{request.path}", json=request.body)
                    assert response.status_code == 200, response.text
                    contents[request.kind, number] = content_of(request.path, response.text)
    return contents


def trees_of(case: SkewCase, old: Path) -> dict[str, list[Path]]:
    """Returns the sources of each kind of process, in turn."""
    if case.is_mixed:
        return {kind: [old, ROOT] for kind in _SKEWED}
    base, other = (old, ROOT) if case.is_old_mesh or case.is_upgrade else (ROOT, old)
    return {kind: [other if kind in case.other else base] for kind in _SKEWED}


@contextmanager
def mesh_of(case: SkewCase, old: Path, folder: Path, agent: ConsulAgent | None) -> Iterator[Mesh]:
    """Runs the mesh of a case until the block ends."""
    flags: list[str] = [f"--mesh-token={TOKEN}"] if case.has_token else []
    if agent is not None:
        flags += ["--registry=consul", f"--consul-url={agent.url}"]
    speedup = 5.0 if case.loss is None else case.loss.speedup
    with Mesh(
        folder,
        **asdict(case.shape),
        batches=int(case.has_batch),
        worker_flags=[*flags, *model_flags(old), f"--speedup={speedup}", "--metrics-port=0"],
        frontend_flags=flags,
        router_flags=flags,
        indexer_flags=flags,
        trees=trees_of(case, old),
    ) as mesh:
        yield mesh


class _Load:
    """Sends requests of all kinds by each frontend, and compares their contents."""

    def __init__(self, mesh: Mesh, expected: Mapping[tuple[str, int], Any]) -> None:
        self.outcome = Outcome()
        self.urls = mesh.urls
        self.has_background = False
        """Whether each frontend of `urls` also starts responses in the background."""

        self.runs = 0
        self._expected = expected
        self._slots = asyncio.Semaphore(CLIENTS)

    async def run(self, rounds: int) -> None:
        """Sends each request by each frontend, and continues each stored response by each."""
        async with (
            httpx.AsyncClient(trust_env=False, timeout=CALL_S) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(rounds):
                for request in requests_of(number):
                    for url in self.urls:
                        tasks.create_task(self._send(http, url, request, number))
                for url in self.urls:
                    tasks.create_task(self._converse(http, url, number))
                for url in self.urls if self.has_background else ():
                    tasks.create_task(self._run_in_background(http, url, number))
        self.runs += 1

    async def _send(
        self, http: httpx.AsyncClient, url: str, request: KindRequest, number: int
    ) -> None:
        async with self._slots:
            text = await self._post(http, url, request.path, request.body)
        if text is not None:
            self._compare(request.kind, request.path, text, self._expected[request.kind, number])

    async def _converse(self, http: httpx.AsyncClient, url: str, number: int) -> None:
        """Each frontend continues a response that this one has stored."""
        async with self._slots:
            body = {"model": MODEL, "input": f"Stored {number}", "max_output_tokens": 4}
            first = await self._post(http, url, "responses", body)
            if first is None:
                return
            body |= {"previous_response_id": json.loads(first)["id"], "input": "More."}
            texts = [await self._post(http, other, "responses", body) for other in self.urls]
        for text in texts:
            if text is not None and texts[0] is not None:
                expected = content_of("responses", texts[0])
                self._compare("stored response", "responses", text, expected)

    async def _run_in_background(self, http: httpx.AsyncClient, url: str, number: int) -> None:
        """Starts responses in the background; they have the content of those in the foreground."""
        (request,) = (one for one in requests_of(number) if one.kind == "response")
        first = await self._post(http, url, request.path, {**request.body, "background": True})
        if first is None:
            return
        path = f"{request.path}/{json.loads(first)['id']}"
        expected = self._expected[request.kind, number]

        async def is_over() -> bool:
            text = await self._request(http, "GET", url, path)
            if text is None:
                return True
            if json.loads(text)["status"] in ("queued", "in_progress"):
                return False
            self._compare("background", request.path, text, expected)
            return True

        await until(is_over, f"{path} has ended", CALL_S, 0.1)

    async def _post(
        self, http: httpx.AsyncClient, url: str, path: str, body: Mapping[str, Any]
    ) -> str | None:
        """Returns the body of the response; None after an error, which counts."""
        self.outcome.requests += 1
        return await self._request(http, "POST", url, path, json=body)

    async def _request(
        self, http: httpx.AsyncClient, method: str, url: str, path: str, **more: Any
    ) -> str | None:
        """As `_post`, without counting the request."""
        try:
            response = await http.request(method, f"{url}/v1/{path}", **more)
        except httpx.HTTPError as error:
            self.outcome.errors[f"{path}: {error!r}"] += 1
            return None
        if response.status_code != 200:
            self.outcome.errors[f"{path}: {response.status_code} {response.text[:300]}"] += 1
            return None
        return response.text

    def _compare(self, kind: str, path: str, text: str, expected: Any) -> None:
        try:
            content = content_of(path, text)
        except AssertionError as error:
            self.outcome.errors[f"{kind}: {str(error)[:300]}"] += 1
            return
        if content != expected:
            self.outcome.inexact[f"{kind}: {content!r:.200}, expected {expected!r:.200}"] += 1


async def _upgrade(mesh: Mesh, load: _Load, rounds: int) -> None:
    """Replaces each old process by a new one while requests are sent."""
    is_over = False

    async def send() -> None:
        # Ends: every process is replaced; each call has a limit.
        while not is_over:
            await load.run(rounds)

    sending = asyncio.create_task(send())
    try:
        for old in list(mesh.services):
            await _replace(mesh, load, old)
    finally:
        is_over = True
        await sending


async def _replace(mesh: Mesh, load: _Load, old: Service) -> None:
    new = mesh.spawn(old.kind, tree=ROOT)
    await asyncio.to_thread(new.wait_ready)
    await until(mesh.is_complete, f"the mesh has {new.name}", WAIT_S)
    if old.service_name == "frontend":
        load.urls = [url for url in mesh.urls if url != old.addresses["http"]]
        last = load.runs + 1  # A run that began before still uses the old frontend.
        await until(lambda: load.runs >= last, "no client uses the old frontend", CALL_S)
    old.send(signal.SIGTERM)
    status = await asyncio.to_thread(old.wait, CALL_S)
    assert status == 0, old.tail()


async def _lose(mesh: Mesh, load: _Load, loss: penalties.Loss, old: Path) -> None:
    """Sends the response of a case `penalties`."""
    load.outcome.requests = 1
    expected = await penalties.expected_text(loss.tokens)
    reply = await penalties.lose_worker(mesh, loss, old if loss.joins == "old" else ROOT)
    load.outcome.inexact.update(penalties.faults_of(reply, expected, loss))


def run_case(
    case: SkewCase,
    old: Path,
    expected: Mapping[tuple[str, int], Any],
    *,
    agent: ConsulAgent | None = None,
    keep_logs: Path | None = None,
) -> dict[str, Any]:
    """Returns the JSON line of a case. keep_logs: folder for the logs; None: not kept."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvmesh-skew-") as name:
        folder = Path(name) if keep_logs is None else keep_logs
        with mesh_of(case, old, folder, agent) as mesh:
            load = _Load(mesh, expected)
            if case.loss is not None:
                asyncio.run(_lose(mesh, load, case.loss, old))
            elif case.is_upgrade:
                asyncio.run(_upgrade(mesh, load, case.rounds))
            else:
                if case.has_batch:
                    # Old ones cannot read what the batch service stores: docs/operate/versions.md.
                    load.has_background = True
                    load.urls = [
                        frontend.addresses["http"]
                        for frontend in mesh.running("frontend")
                        if frontend.tree == ROOT
                    ]
                asyncio.run(load.run(case.rounds))
                load.outcome.unused = list(_unused(mesh))
                load.outcome.retries = _retries(mesh)
    return load.outcome.line(case, time.monotonic() - began)


def _retries(mesh: Mesh) -> int:
    lines = [line for frontend in mesh.running("frontend") for line in frontend.events("request")]
    # Refused requests, and those that only start one in the background, have no attempts.
    placed = [line for line in lines if "attempts" in line]
    return sum(line["attempts"] - line.get("requests", 1) for line in placed)


def _unused(mesh: Mesh) -> Iterator[str]:
    for service in mesh.services:
        if service.process.poll() is not None:
            yield f"{service.name} ended: {service.tail(3)}"
        elif service.service_name == "worker" and not service.metric(ACCEPTED):
            yield f"{service.name} has served no request"


def run_cases(
    cases: Sequence[SkewCase], old: Path, version: str, *, logs: Path | None = None
) -> Counter[str]:
    """Runs the cases, prints a line for each; returns how many passed, failed and were skipped."""
    counts = Counter(passed=0, failed=0, skipped=0)
    expected = asyncio.run(reference_contents(ROUNDS))
    with ExitStack() as stack:
        agent: ConsulAgent | None = None
        for case in cases:
            line: dict[str, Any]
            try:
                if case.has_consul and agent is None:
                    agent = stack.enter_context(running_agent())
                folder = _log_folder(logs, f"{version}-{case.name}")
                line = run_case(
                    case, old, expected, agent=agent if case.has_consul else None, keep_logs=folder
                )
                counts["failed" if line["failed"] else "passed"] += 1
            except pytest.skip.Exception as reason:  # no Consul
                line = {"case": case.name, "skipped": str(reason)}
                counts["skipped"] += 1
            except (AssertionError, ExceptionGroup) as error:
                line = {"case": case.name, "failed": [str(error)[:2000]]}
                counts["failed"] += 1
            print(json.dumps({"version": version, **line}), flush=True)
    return counts


def _log_folder(logs: Path | None, name: str) -> Path | None:
    if logs is None:
        return None
    folder = logs / name.replace("/", "-")
    folder.mkdir(parents=True)
    return folder


def main(argv: list[str]) -> int:
    """Runs the cases with each supported version; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.skew", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="a name or a part of one")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--logs", type=Path, help="keep the services' logs in folders under DIR")
    options = parser.parse_args(argv)
    parts = options.cases or [""]
    cases = [case for case in all_cases() if any(part in case.name for part in parts)]
    if not cases:
        parser.error(f"no case name contains {' or '.join(parts)}; see --list")
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    counts = Counter(passed=0, failed=0, skipped=0)
    load = os.getloadavg()[0]
    for version in supported_versions():
        try:
            with old_version_tree(version) as old:
                counts.update(run_cases(cases, old, version.name, logs=options.logs))
        except MissingCommit as error:
            print(json.dumps({"version": version.name, "failed": [str(error)]}), flush=True)
            counts["failed"] += len(cases)
    print(json.dumps({**counts, "load": [round(load, 1), round(os.getloadavg()[0], 1)]}))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
