"""Replaces every service of a mesh under load: `python -m tests.chaos.rolling [--list] [CASE ...]`.

A case starts a mesh with `meshctl up -f`, loads it with CLIENTS clients, and runs `meshctl restart
--wait`. Each client sends one request after the other on connections of their own, to the frontends
in turn, and never tries again: a refused or lost connection is an error. The kinds of request are
those of KINDS. The sim engine is deterministic, so every response is compared with the response to
the same body before the restart.

Prints one JSON line a case, then one with the sums:

    errors, inexact    responses that failed, or differ
    longest_pause_s    the longest time to the first piece of a stream, or between two pieces
    members            seconds of each replacement: until routable, until the old one has ended
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from common.runtime.free_ports import free_ports
from tests.chaos.client import Reply, content_of, exchange, request_of
from tests.contract.consul_agent import running_agent
from tests.kit.processes import MODEL, ROOT
from tests.kit.versions import old_version_tree

CLIENTS = 64
TOKENS = 48
VARIANTS = 4
CALL_S = 120.0
READY_S = 120.0
RESTART_S = 600.0
# Load before the first and after the last replacement.
MARGIN_S = 2.0
PAUSE_S = 0.1
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


# Any, here and below: JSON.
@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request. body: of a prompt."""

    path: str
    body: Callable[[str], dict[str, Any]]


def _chat(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": TOKENS, **fields}


def _tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "parameters": SCHEMA, **fields}}


_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
}
KINDS: Mapping[str, Kind] = {
    "stream": Kind("/v1/chat/completions", lambda p: _chat(p, stream=True)),
    "whole": Kind("/v1/chat/completions", _chat),
    "choices": Kind("/v1/chat/completions", lambda p: _chat(p, n=4, stream=True)),
    "tools": Kind(
        "/v1/chat/completions",
        lambda p: _chat(p, tools=[_tool()], tool_choice="required", max_tokens=200),
    ),
    "schema": Kind(
        "/v1/chat/completions", lambda p: _chat(p, response_format=_FORMAT, max_tokens=200)
    ),
    "embeddings": Kind("/v1/embeddings", lambda p: {"input": p}),
    "responses": Kind(
        "/v1/responses",
        lambda p: {"input": p, "max_output_tokens": TOKENS, "stream": True, "store": False},
    ),
    "messages": Kind("/v1/messages", lambda p: _chat(p, stream=True)),
}
# Fields that differ between two responses to one body.
_VOLATILE = frozenset(
    {"id", "created", "created_at", "completed_at", "item_id", "call_id", "usage"}
)


@dataclass(frozen=True, slots=True)
class Case:
    """One mesh and what is replaced in it.

    mesh: keys of its mesh file. restart: arguments of `meshctl restart --wait`. changed: keys of
    its frontends that the file has by then. stopped: a member that is stopped (SIGSTOP) before, and
    continues after the command. is_upgrade: the services are of the newest supported version, and
    replaced by those of this tree; the frontends after the others, one at a time.
    """

    name: str
    mesh: Mapping[str, Any]
    restart: Sequence[str] = ()
    uses_consul: bool = False
    stopped: str = ""
    changed: Mapping[str, Any] = field(default_factory=dict)
    is_upgrade: bool = False


_SIM = {"settings": {"speedup": 0.5}}


def _mesh(count: int, *groups: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "frontends": {"count": count, "http_port": 0},
        "routers": {"count": count},
        "indexers": {"count": count},
        "workers": [{**_SIM, **group} for group in groups],
    }


def _processes(count: int) -> dict[str, Any]:
    return {"settings": {"processes": count}}


_TWO = _mesh(2, {"count": 2})
_ONE = _mesh(1, {"count": 1})
CASES = (
    Case("all", _TWO),
    Case("workers-old-first", _TWO, ["--no-surge", "worker"]),
    Case("pairs", _mesh(2, {"role": "prefill", "count": 2}, {"role": "decode", "count": 2})),
    Case("single", _ONE),
    Case(
        "processes",
        {**_ONE, "frontends": {"http_port": 0, **_processes(2)}},
        ["frontend"],
        changed=_processes(3),
    ),
    Case("older", _TWO, ["indexer", "worker", "router"], is_upgrade=True),
    Case("consul", _TWO, uses_consul=True),
    Case("stopped-frontend", _TWO, ["worker-0"], stopped="frontend-1"),
)


@dataclass(slots=True)
class Observations:
    """What the clients of a case received."""

    requests: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    inexact: Counter[str] = field(default_factory=Counter)
    longest_pause_s: float = 0.0
    slowest_s: float = 0.0


class Rolling:
    """A running mesh and its load. active: number of clients that send; the others pause."""

    def __init__(self, folder: Path, urls: Sequence[str], clients: int) -> None:
        self._folder = folder
        self._urls = urls
        self._clients = self.active = clients
        self._references: dict[tuple[str, int], Any] = {}
        self._kinds: list[str] = []
        self._is_over = False
        self.observations = Observations()

    async def learn(self) -> list[str]:
        """Fetches the response to each body; returns the kinds that the mesh cannot serve."""
        refused = []
        for name, kind in KINDS.items():
            for variant in range(VARIANTS):
                reply = await _fetch(self._urls[0], kind, variant)
                if reply.error:
                    refused.append(f"{name}: {reply.error}")
                    break
                self._references[name, variant] = _content(reply)
            else:
                self._kinds.append(name)
        return refused

    async def run(self, work: Callable[[], Any]) -> Any:
        """Returns the result of `work`, which runs under load."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(number))
            # Sleep: the load is steady.
            await asyncio.sleep(MARGIN_S)
            try:
                return await work()
            finally:
                # Sleep: requests after the last replacement count too.
                await asyncio.sleep(MARGIN_S)
                self._is_over = True

    def avoid(self, url: str) -> None:
        """Sends no more requests to a frontend, as a load balancer that reads /ready."""
        self._urls = [other for other in self._urls if other != url]

    def stop(self) -> None:
        """Ends the load; requests that run are completed."""
        self._is_over = True

    def use(self, url: str) -> None:
        """Sends requests to a frontend again."""
        self._urls = [*self._urls, url]

    async def _client(self, number: int) -> None:
        sent = number
        # Ends: the case is over; each call has a limit.
        while not self._is_over:
            if number >= self.active:
                # Sleep: the load is smaller.
                await asyncio.sleep(PAUSE_S)
                continue
            sent += 1
            name = self._kinds[number % len(self._kinds)]
            variant = sent % VARIANTS
            reply = await _fetch(self._urls[sent % len(self._urls)], KINDS[name], variant)
            self._count(name, variant, reply)

    def _count(self, name: str, variant: int, reply: Reply) -> None:
        found = self.observations
        found.requests += 1
        found.by_kind[name] += 1
        found.slowest_s = max(found.slowest_s, reply.ended_at - reply.begun_at)
        if reply.first_at:
            first_s = reply.first_at - reply.begun_at
            found.longest_pause_s = max(found.longest_pause_s, reply.pause_s, first_s)
        if reply.error:
            found.errors[f"{name}: {reply.error}"] += 1
        elif _content(reply) != self._references[name, variant]:
            found.inexact[name] += 1


async def _fetch(url: str, kind: Kind, variant: int) -> Reply:
    """Returns the complete response; errors are in `error`."""
    prompt = f"Prompt {variant} of {kind.path}: " + "able about above accept " * (4 * variant + 1)
    body, reply = {"model": MODEL, **kind.body(prompt)}, Reply(prompt, TOKENS)
    request = request_of(url, body, kind.path, "anthropic-version: 2023-06-01\r\n")
    await exchange(url, request, reply)
    if not reply.error:
        try:
            reply.status, reply.text = content_of(reply.raw)
        except ValueError as error:
            reply.error = f"incomplete response: {error}"
    if not reply.error and reply.status != 200:
        reply.error = f"{reply.status} {reply.text[:200]}"
    if not reply.error:
        reply.error = _stream_problem(reply.text)
    return reply


def _stream_problem(text: str) -> str:
    """Returns why a stream failed; "" if it is complete, or no stream."""
    if not text.startswith(("data: ", "event: ", ":")):
        return ""
    ends = ("data: [DONE]", "event: message_stop", "event: response.completed")
    if '"error":{' in text or "event: error" in text:
        at = max(text.find('"error":{'), 0)
        return f"error in the stream: {text[at : at + 200]}"
    is_complete = any(line.startswith(ends) for line in text.split("\n"))
    # A response that reached its limit of tokens.
    is_complete = is_complete or "event: response.incomplete" in text
    return "" if is_complete else "the stream ended before its last event"


def _content(reply: Reply) -> Any:
    """Returns what must be the same in each response to a body: of streams the texts of each
    choice, however they were split."""
    if not reply.text.startswith(("data: ", "event: ", ":")):
        return _stable(json.loads(reply.text))
    parts: dict[str, list[str]] = {}
    for line in reply.text.split("\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        for choice in event.get("choices", ()):
            key = f"choice {choice['index']}"
            parts.setdefault(key, []).append(choice["delta"].get("content") or "")
            if choice.get("finish_reason"):
                parts[key].append(f"<{choice['finish_reason']}>")
        delta = event.get("delta")
        if isinstance(delta, str):
            parts.setdefault(event["type"], []).append(delta)
        elif isinstance(delta, dict):
            parts.setdefault("delta", []).append(
                delta.get("text") or delta.get("stop_reason") or ""
            )
    return {key: "".join(pieces) for key, pieces in parts.items()}


def _stable(value: Any) -> Any:
    match value:
        case dict():
            return {k: _stable(v) for k, v in value.items() if k not in _VOLATILE and k != "id"}
        case list():
            return [_stable(item) for item in value]
    return value


@asynccontextmanager
async def _running_mesh(
    folder: Path, mesh: Mapping[str, Any], services: Path
) -> AsyncIterator[list[Any]]:
    """Runs `meshctl up` of this tree; yields its members as `status` of the control socket reports
    them. services: folder of the sources of the services."""
    path = folder / "mesh.yaml"
    path.write_text(yaml.safe_dump(dict(mesh)))
    with (folder / "up.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _MESHCTL, "up", "-f", str(path)),
            cwd=folder,
            env=_environment(services),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield await _await_mesh(folder, process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(60.0):
                    await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _await_mesh(folder: Path, process: asyncio.subprocess.Process) -> list[Any]:
    deadline = time.monotonic() + READY_S
    while " ready " not in "".join(line for line in _up_lines(folder) if "  mesh  " in line):
        text = "\n".join(_up_lines(folder))
        assert process.returncode is None, f"meshctl up ended:\n{text}"
        assert time.monotonic() < deadline, f"the mesh is not ready:\n{text}"
        # Sleep: a process starts for seconds.
        await asyncio.sleep(0.1)
    members: list[Any] = (await _control(folder, {"command": "status"}))["done"]
    return members


def _up_lines(folder: Path) -> list[str]:
    return (folder / "up.log").read_text(errors="replace").splitlines()


async def _control(folder: Path, line: dict[str, Any]) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(folder / ".run/logs/control.sock")
    writer.write(json.dumps(line).encode() + b"\n")
    answer: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    return answer


async def _restart(folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs `meshctl restart --wait --json`; its last line."""
    _, out, err = await _meshctl(folder, "restart", "--wait", "--json", *arguments)
    (folder / "restart.log").write_text(err)
    lines = out.splitlines()
    assert lines, err
    result: dict[str, Any] = json.loads(lines[-1])
    return {**result, "progress": err.splitlines()}


async def _meshctl(folder: Path, *arguments: str) -> tuple[int | None, str, str]:
    """Runs a command; returns its status, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "meshctl", *arguments),
        cwd=folder,
        env=_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(RESTART_S):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


# meshctl of this tree, whatever the services are.
_MESHCTL = (
    f"import sys; sys.path[:0] = [{str(ROOT / 'protos')!r}, {str(ROOT)!r}];"
    " from meshctl.__main__ import main; main()"
)


def _environment(services: Path = ROOT) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVMESH_")}
    return {**inherited, "PYTHONPATH": f"{services / 'protos'}{os.pathsep}{services}"}


async def run_case(case: Case, folder: Path, *, clients: int = CLIENTS) -> dict[str, Any]:
    """Returns the JSON line of a case."""
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        mesh, services = dict(case.mesh), ROOT
        if case.uses_consul:
            agent = stack.enter_context(running_agent())
            mesh |= {"registry": "consul", "consul_url": agent.url}
        if case.is_upgrade:
            old = stack.enter_context(old_version_tree())
            mesh = _of_older_version(mesh, old)
            # Services run what this link leads to.
            services = folder / "services"
            services.symlink_to(old)
        async with _running_mesh(folder, mesh, services) as members:
            urls = {m["name"]: m["addresses"]["http"] for m in members if m["role"] == "frontend"}
            pids = {m["name"]: m["pid"] for m in members}
            rolling = Rolling(folder, list(urls.values()), clients)
            refused = await rolling.learn()
            if case.stopped:
                rolling.avoid(urls[case.stopped])
            if case.changed:
                mesh["frontends"] = {**mesh["frontends"], **case.changed}
                (folder / "mesh.yaml").write_text(yaml.safe_dump(mesh))
            work = partial(_restart, folder, case.restart)
            if case.stopped:
                work = partial(_restart_beside_stopped, case, folder, pids[case.stopped])
            elif case.is_upgrade:
                work = partial(_upgrade, case, folder, rolling, urls)
            began = time.monotonic()
            result = await rolling.run(work)
            line = _line(case, rolling.observations, result)
    line |= {"seconds": round(time.monotonic() - began, 1), "load": round(load, 1)}
    return {**line, "refused": refused} if refused else line


def _of_older_version(mesh: Mapping[str, Any], old: Path) -> dict[str, Any]:
    """Returns a mesh whose workers of both versions serve one model (see `model_flags`), and whose
    frontends have ports that they keep."""
    settings = {**_SIM["settings"], "tool_call_parser": "hermes"}
    model = str(old / "worker_svc/engines/sim/model")
    (group,) = mesh["workers"]
    first = free_ports(mesh["frontends"]["count"])
    return {
        **mesh,
        "frontends": {**mesh["frontends"], "http_port": first},
        "workers": [{**group, "model_path": model, "settings": settings}],
    }


async def _restart_beside_stopped(case: Case, folder: Path, pid: int) -> dict[str, Any]:
    os.kill(pid, signal.SIGSTOP)
    try:
        result = await _restart(folder, case.restart)
        _, text, _ = await _meshctl(folder, "status")
        said = [line for line in text.splitlines() if case.stopped in line]
        return {**result, "status_says": said}
    finally:
        os.kill(pid, signal.SIGCONT)


async def _upgrade(
    case: Case, folder: Path, rolling: Rolling, urls: Mapping[str, str]
) -> dict[str, Any]:
    """Replaces the services of an older version. Its frontends bind their ports, so that clients
    use others meanwhile, as behind a load balancer."""
    services = folder / "services"
    services.unlink()
    services.symlink_to(ROOT)
    result = await _restart(folder, case.restart)
    for name, url in urls.items():
        rolling.avoid(url)
        # Sleep: requests that are on their way have been accepted.
        await asyncio.sleep(0.5)
        part = await _restart(folder, [name])
        rolling.use(url)
        result["replaced"] += part.get("replaced", [])
        result["progress"] += part["progress"]
        result["failed"] = (
            result.get("failed") or result.get("error") or part.get("failed") or part.get("error")
        )
    return result


def _line(case: Case, found: Observations, result: Mapping[str, Any]) -> dict[str, Any]:
    replaced = result.get("replaced", [])
    shown = ("  waiting", "  given up", "  note")
    waited = [text for text in result["progress"] if any(state in text for state in shown)]
    return {
        "case": case.name,
        "requests": found.requests,
        "errors": found.errors.total(),
        "inexact": found.inexact.total(),
        "longest_pause_s": round(found.longest_pause_s, 3),
        "slowest_s": round(found.slowest_s, 3),
        "members": {m["name"]: [m["routable_s"], m["after_s"]] for m in replaced},
        "failed": result.get("error") or result.get("failed"),
        **({"progress": waited} if waited else {}),
        **({"status_says": said} if (said := result.get("status_says")) else {}),
        **({"why": found.errors.most_common(3)} if found.errors else {}),
        **({"inexact_kinds": dict(found.inexact)} if found.inexact else {}),
    }


def summarize(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the last line: sums, the longest pause, and the figures by case."""
    return {
        "errors": sum(line["errors"] for line in lines),
        "inexact": sum(line["inexact"] for line in lines),
        "longest_pause_s": max((line["longest_pause_s"] for line in lines), default=0.0),
        "failed": [line["case"] for line in lines if line["failed"]],
        "by_case": {
            line["case"]: {k: line[k] for k in ("errors", "inexact", "longest_pause_s")}
            for line in lines
        },
    }


def main(argv: list[str]) -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.rolling", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--keep", type=Path, help="keep logs in folders under this one")
    options = parser.parse_args(argv)
    cases = [case for case in CASES if not options.cases or case.name in options.cases]
    if not cases:
        parser.error(f"no case has a name of {options.cases}; see --list")
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    lines = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="kvmesh-rolling-") as name:
            folder = Path(name) if options.keep is None else options.keep / case.name
            folder.mkdir(parents=True, exist_ok=True)
            lines.append(asyncio.run(run_case(case, folder, clients=options.clients)))
        print(json.dumps(lines[-1]), flush=True)
    total = summarize(lines)
    print(json.dumps(total))
    return 1 if total["errors"] or total["inexact"] or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
