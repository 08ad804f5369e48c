"""A mesh on Ray, with faults: `python -m tests.cluster [--list] [--keep FOLDER] [CASE ...]`.

Starts a Ray cluster of three nodes on this host (127.0.0.2 is the head) and a mesh with `meshctl up
--on ray`; frontends run on the first two nodes only. The registry is a real Consul, or with
`--registry file` files. In each case CLIENTS clients send mixed requests, one after the other, as
in tests/chaos/rolling.py, and every response is compared with that to the same body before.

    start       a mesh is started, and serves
    node        SIGKILL of all processes of a node; the node comes back
    scale       `meshctl scale worker=6`, then worker=2; each worker sees a GPU of its own (a number
                of Ray's, the host has none) and is in the transfer group of its node
    drain       Ray drains a node with a deadline; the node comes back
    controller  SIGKILL of the controller's process; then `meshctl scale` both ways
    recommended the workers follow the routers (`scaling: recommended`): more with the load, fewer
                after it, none without, and one again for the requests that wait
    head        SIGKILL of all processes of the head's node; clients use the other frontend

Prints one JSON line a case, then one with the sums:

    errors, inexact    responses that failed, or differ
    migrated_s         `node`: longest pause of a response that ran when the node was killed
    replaced_s         `node`: until all members of the node were routable on other nodes
    passed, failed     names of cases; failed ones with the reason

The exit status is 1 if a case failed. All processes are ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.chaos.client import Reply
from tests.chaos.rolling import CLIENTS, Rolling
from tests.cluster.nodes import HEAD, OTHERS, PYTHON, RAY, Cluster, Observer, running_cluster
from tests.contract.consul_agent import running_agent
from tests.kit.processes import MODEL
from tests.kit.waiting import until

COMMAND_S = 300.0
SETTLED_S = 120.0
DRAIN_DEADLINE_S = 60
# Ray's nodes give up a lost head after this time; 60 s by default.
HEAD_LOST_S = 20
# Load that goes on after the loss of the head.
HEADLESS_S = 12.0
# Most workers of `recommended`: each computes an eighth of the requests at once, so that more are
# needed. Tokens are slow, so that requests are at the workers, whatever the clients and the mesh
# take on a busy machine. A thirtieth of the clients is a load for one.
WORKERS_MAX = 4
SEATS_SHARE = 8
SLOW_SPEEDUP = 0.1
FEW_SHARE = 30
# The load of the two minutes before counts, and that of the down window, a minute.
FOLLOWED_S = 420.0
WAKE_S = 100.0
ATTEMPTS = "kvmesh_frontend_retries_total"
INSTALL = "make .venv-ray/.ready"


@dataclass(slots=True)
class Bed:
    """A cluster with a mesh."""

    folder: Path
    cluster: Cluster
    observer: Observer
    clients: int
    registry: Mapping[str, str]
    # Any: JSON.
    members: list[dict[str, Any]] = field(default_factory=list)
    worker_counts: list[int] = field(default_factory=list)
    """Desired numbers of workers, as far as they were looked at."""

    async def meshctl(self, *arguments: str) -> list[str]:
        """Runs a command; returns its output. Raises AssertionError if it fails."""
        process = await asyncio.create_subprocess_exec(
            *(str(PYTHON), "-P", "-m", "meshctl", *arguments),
            cwd=self.folder,
            env=self.cluster.environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(COMMAND_S):
                out, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            raise AssertionError(f"meshctl {arguments[0]}: not within {COMMAND_S:g} s") from None
        with (self.folder / "meshctl.log").open("ab") as log:
            log.write(out)
        text = out.decode(errors="replace")
        assert process.returncode == 0, f"meshctl {' '.join(arguments)}:\n{text}"
        return text.splitlines()

    # Any: JSON.
    async def status(self) -> dict[str, Any]:
        """Returns what the controller reports."""
        found = await asyncio.to_thread(self.observer.ask, "status")
        count = (found or {}).get("counts", {}).get("worker")
        if count is not None and [count] != self.worker_counts[-1:]:
            self.worker_counts.append(count)
        return found or {"error": "no answer"}

    # Any: JSON.
    async def live_nodes(self) -> dict[str, str]:
        """Returns the ids of the nodes that Ray counts as alive, by address."""
        nodes = await asyncio.to_thread(self.observer.ask, "nodes")
        return {node["address"]: node["id"] for node in nodes if node["is_alive"]}

    async def spread(self) -> float:
        """Waits until all members are routable, and no role is on one node only."""
        return await self.settled(_is_spread)

    async def settled(
        self,
        is_also: Callable[[dict[str, Any]], bool] = lambda _: True,
        timeout_s: float = SETTLED_S,
    ) -> float:
        """Waits until all members are routable, and a further condition holds; returns seconds."""
        began, last = time.monotonic(), {}

        async def is_settled() -> bool:
            nonlocal last
            last = await self.status()
            return bool(last.get("is_settled")) and is_also(last)

        try:
            await until(is_settled, "all members are routable", timeout_s, poll_s=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}: {_summary(last)}") from None
        self.members = last["members"]
        return time.monotonic() - began

    async def up(self, mesh: Mapping[str, Any]) -> None:
        """Starts a mesh, or changes the one that runs."""
        (self.folder / "mesh.yaml").write_text(yaml.safe_dump(dict(mesh)))
        await self.meshctl("up", "--on", "ray", "-f", "mesh.yaml")

    async def attempts(self) -> int:
        """Returns the attempts of all frontends after the first of a request."""
        texts = [await asyncio.to_thread(_read_metrics, url) for url in self.urls().values()]
        found = [line for text in texts for line in text.splitlines() if line.startswith(ATTEMPTS)]
        return int(sum(float(line.split()[-1]) for line in found))

    def on(self, address: str) -> list[str]:
        """Returns the members on a node."""
        return [member["name"] for member in self.members if member["node"] == address]

    def urls(self) -> dict[str, str]:
        """Returns the URL of the frontend of each node."""
        return {
            member["node"]: member["addresses"]["http"]
            for member in self.members
            if member["role"] == "frontend"
        }


class Load(Rolling):
    """The clients of a case. replies: all that ended."""

    def __init__(self, bed: Bed, urls: Sequence[str]) -> None:
        super().__init__(bed.folder, urls, bed.clients)
        self.replies: list[Reply] = []

    def _count(self, name: str, variant: int, reply: Reply) -> None:
        super()._count(name, variant, reply)
        self.replies.append(reply)

    def pause_across(self, at: float) -> float:
        """Returns the longest pause after a moment of the streams that ran at it."""
        pauses = [
            reply.pause_s
            for reply in self.replies
            if reply.begun_at < at < reply.ended_at and reply.pause_at > at
        ]
        # Without a token at the moment.
        pauses += [
            reply.first_at - max(reply.begun_at, at)
            for reply in self.replies
            if reply.begun_at < at < reply.first_at
        ]
        return max(pauses, default=0.0)


# Any: JSON.
Case = Callable[[Bed, Load], Awaitable[dict[str, Any]]]


async def start(bed: Bed, load: Load) -> dict[str, Any]:
    """Load on the mesh, without a fault."""
    # Sleep: the load is the case.
    await asyncio.sleep(3.0)
    per_node = {address: len(bed.on(address)) for address in (HEAD, *OTHERS)}
    spread = {
        role: len({m["node"] for m in bed.members if m["role"] == role})
        for role in ("router", "indexer", "aggregated worker of sim")
    }
    assert set(spread.values()) == {2}, f"a role is on one node: {spread}"
    return {"members_per_node": per_node}


async def scale(bed: Bed, load: Load) -> dict[str, Any]:
    """More workers, then fewer."""
    began = time.monotonic()
    await bed.meshctl("scale", "worker=6")
    up_s = time.monotonic() - began
    await bed.settled()
    workers = [member for member in bed.members if member["name"].startswith("worker")]
    assert len(workers) == 6
    places = [(member["node"], _gpus_of(member["pid"])) for member in workers]
    assert len(set(places)) == 6, f"workers share GPUs: {places}"
    assert all(gpus.isdecimal() for _, gpus in places), f"a worker has not one GPU: {places}"
    for member in workers:
        group = f"{MODEL}@{member['node']}"
        assert group in _arguments_of(member["pid"]), f"{member['name']} is not in {group}"
    began = time.monotonic()
    await bed.meshctl("scale", "worker=2")
    down_s = time.monotonic() - began
    await bed.spread()
    assert sum(name.startswith("worker") for name in map(_name, bed.members)) == 2
    return {"up_s": round(up_s, 1), "down_s": round(down_s, 1)}


async def drain(bed: Bed, load: Load) -> dict[str, Any]:
    """Ray drains a node; its members move before they end."""
    victim = OTHERS[1]
    await bed.meshctl("scale", "worker=3")
    await bed.spread()
    before = bed.on(victim)
    assert before, "no member on the node"
    node_id = (await bed.live_nodes())[victim]
    began = time.monotonic()
    await asyncio.to_thread(bed.cluster.drain, node_id, DRAIN_DEADLINE_S)
    await bed.settled(lambda found: all(m["node"] != victim for m in found["members"]))
    moved_s = time.monotonic() - began

    async def has_left() -> bool:
        return victim not in await bed.live_nodes()

    await until(has_left, "the raylet has left", SETTLED_S, poll_s=0.5)
    left_s = time.monotonic() - began
    await bed.meshctl("scale", "worker=2")
    await _restore(bed, victim)
    return {"moved": before, "moved_s": round(moved_s, 1), "left_s": round(left_s, 1)}


async def controller(bed: Bed, load: Load) -> dict[str, Any]:
    """The process of the controller is killed; Ray starts another one, which goes on."""
    status = await bed.status()
    os.kill(status["pid"], signal.SIGKILL)
    began = time.monotonic()

    async def is_back() -> bool:
        found = await bed.status()
        return found.get("pid") not in (None, status["pid"]) and bool(found.get("is_settled"))

    await until(is_back, "the controller is back", SETTLED_S, poll_s=0.1)
    back_s = time.monotonic() - began
    found = await bed.status()
    kept = {m["name"]: m["pid"] for m in status["members"]}
    assert {m["name"]: m["pid"] for m in found["members"]} == kept, "processes were replaced"
    await bed.meshctl("scale", "worker=3")
    await bed.meshctl("scale", "worker=2")
    await bed.spread()
    return {"back_s": round(back_s, 1)}


async def recommended(bed: Bed, load: Load) -> dict[str, Any]:
    """The number of workers follows the routers."""

    async def follow(clients: int, workers: int) -> float:
        """Changes the load, and waits for a number of workers; returns seconds."""
        load.active, began = clients, time.monotonic()
        await bed.settled(lambda found: _workers(found) == workers, FOLLOWED_S)
        return round(time.monotonic() - began, 1)

    began, few = time.monotonic(), max(1, bed.clients // FEW_SHARE)
    bed.worker_counts.clear()
    await bed.up(mesh_file(bed.registry, seats=max(1, bed.clients // SEATS_SHARE)))
    try:
        await follow(bed.clients, WORKERS_MAX)
        more_s = round(time.monotonic() - began, 1)
        fewer_s = await follow(few, 1)
        asleep_s = await follow(0, 0)
        served = load.observations.requests
        load.active, woken = few, time.monotonic()
        await until(lambda: load.observations.requests > served, "a request is served", WAKE_S)
        woken_s = round(time.monotonic() - woken, 1)
        await bed.settled(lambda found: _workers(found) == 1)
        seen = [*bed.worker_counts]
        await bed.up(mesh_file(bed.registry))
        await bed.spread()
    finally:
        load.active = bed.clients
    changes = "".join("+" if b > a else "-" for a, b in itertools.pairwise(seen))
    assert re.fullmatch(r"\+*-+\+", changes), f"the number of workers flaps: {seen}"
    return {
        "workers": seen,
        "more_s": more_s,
        "fewer_s": fewer_s,
        "asleep_s": asleep_s,
        "woken_s": woken_s,
    }


async def node(bed: Bed, load: Load) -> dict[str, Any]:
    """All processes of a node are killed at once."""
    victim = OTHERS[1]
    # A worker is among them.
    await bed.meshctl("scale", "worker=3")
    await bed.spread()
    lost = bed.on(victim)
    assert any(name.startswith("worker") for name in lost), f"no worker on the node: {lost}"
    attempts = await bed.attempts()
    killed_at = time.monotonic()
    processes = bed.cluster.kill(victim)
    await bed.settled(lambda found: all(m["node"] != victim for m in found["members"]))
    replaced_s = time.monotonic() - killed_at

    async def ray_has_noticed() -> bool:
        return victim not in await bed.live_nodes()

    await until(ray_has_noticed, "Ray counts the node as dead", SETTLED_S, poll_s=0.2)
    noticed_s = time.monotonic() - killed_at
    # Sleep: responses that ran at the moment end.
    await asyncio.sleep(3.0)
    migrated_s = load.pause_across(killed_at)
    attempts = await bed.attempts() - attempts
    assert attempts, "no request was continued elsewhere"
    await bed.meshctl("scale", "worker=2")
    await _restore(bed, victim)
    return {
        "lost": lost,
        "processes": processes,
        "further_attempts": attempts,
        "migrated_s": round(migrated_s, 3),
        "replaced_s": round(replaced_s, 1),
        "ray_noticed_s": round(noticed_s, 1),
    }


async def head(bed: Bed, load: Load) -> dict[str, Any]:
    """The node of the head is killed: Ray replaces nothing any more, and the mesh serves on until
    the other nodes of Ray give up."""
    urls = bed.urls()
    load.avoid(urls[HEAD])
    # Sleep: requests that are on their way have been accepted.
    await asyncio.sleep(2.0)
    lost = bed.on(HEAD)
    left = {m["name"]: m["pid"] for m in bed.members if m["node"] != HEAD}
    killed_at = time.monotonic()
    bed.cluster.kill(HEAD)
    # Sleep: the load goes on without a head.
    await asyncio.sleep(HEADLESS_S)
    served = sum(1 for reply in load.replies if reply.begun_at > killed_at + 1 and not reply.error)
    migrated_s = load.pause_across(killed_at)
    load.stop()

    def have_ended() -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in left.values())

    await until(have_ended, "the services have ended", HEAD_LOST_S + SETTLED_S, poll_s=0.5)
    return {
        "lost": lost,
        "left": sorted(left),
        "served_without_head": served,
        "migrated_s": round(migrated_s, 3),
        "ended_s": round(time.monotonic() - killed_at, 1),
        "head_lost_limit_s": HEAD_LOST_S,
    }


CASES: Mapping[str, Case] = {
    "start": start,
    "node": node,
    "scale": scale,
    "drain": drain,
    "controller": controller,
    "recommended": recommended,
    "head": head,
}


async def _restore(bed: Bed, address: str) -> None:
    """Starts a node again."""
    await asyncio.to_thread(bed.cluster.start, address)
    await bed.spread()


# Any: JSON.
def _is_spread(status: Mapping[str, Any]) -> bool:
    nodes: dict[str, list[str]] = {}
    for member in status["members"]:
        nodes.setdefault(member["role"], []).append(member["node"])
    return all(len(found) == 1 or len(set(found)) > 1 for found in nodes.values())


# Any: JSON.
def _summary(status: Mapping[str, Any]) -> str:
    """Returns what a failure needs of a status: every member in a few words."""
    members = (
        f"{m['name']} ({m['replica']}) {m['state']} on {m['node']} {m['detail']}".rstrip()
        for m in status.get("members", [])
    )
    rest = {key: value for key, value in status.items() if key != "members"}
    return f"{json.dumps(rest)}; {'; '.join(members)}"


# Any: JSON.
def _workers(status: Mapping[str, Any]) -> int:
    """Returns the workers that run, if they are as many as there shall be; else -1."""
    running = sum(member["name"].startswith("worker") for member in status["members"])
    return running if running == status["counts"]["worker"] else -1


def _gpus_of(pid: int) -> str:
    """Returns the ids of the GPUs that a process sees."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(one.partition("=")[::2] for one in variables).get("CUDA_VISIBLE_DEVICES", "")


def _arguments_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def _read_metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", trust_env=False, timeout=10.0).text


def _name(member: Mapping[str, Any]) -> str:
    return str(member["name"])


async def run_case(name: str, bed: Bed) -> dict[str, Any]:
    """Returns the JSON line of a case."""
    began = time.monotonic()
    line: dict[str, Any] = {"case": name, "errors": 0, "inexact": 0, "failed": ""}
    load = Load(bed, list(bed.urls().values()))
    try:
        refused = await load.learn()
        assert not refused, f"the mesh refuses {refused}"
        line |= await load.run(lambda: CASES[name](bed, load))
    except* AssertionError as group:
        line["failed"] = "; ".join(str(error) for error in group.exceptions)[:4000]
    found = load.observations
    line |= {
        "requests": found.requests,
        "errors": found.errors.total(),
        "inexact": found.inexact.total(),
        "longest_pause_s": round(found.longest_pause_s, 3),
        "seconds": round(time.monotonic() - began, 1),
        "load": round(os.getloadavg()[0], 1),
    }
    return {**line, **({"why": found.errors.most_common(3)} if found.errors else {})}


def mesh_file(registry: Mapping[str, str], *, seats: int | None = None) -> dict[str, Any]:
    """Returns the mesh file. Its frontends run on nodes with a label.

    seats: requests that a worker computes at once, in a mesh whose number of workers follows the
    routers; None: the number is fixed.
    """
    workers: dict[str, Any] = {
        "count": 2,
        "settings": {"speedup": 0.5},
        "resources": {"gpus": 1},
        "transfer_per_node": True,
    }
    if seats is not None:
        workers["scaling"] = "recommended"
        workers["settings"] = {"speedup": SLOW_SPEEDUP, "max_num_seqs": seats}
    return {
        **registry,
        "drain_s": 10,
        "ready_s": 90,
        "frontends": {
            "count": 2,
            "http_port": 0,
            "resources": {"labels": {"edge": "yes"}, "per_node": 1},
            # Requests wait for the first worker.
            "settings": {"configured_models": [MODEL], "worker_wait_s": 90},
        },
        "routers": {
            "count": 2,
            "settings": {
                "scaling_min": 0,
                "scaling_max": WORKERS_MAX,
                "scaling_up_window_s": 5,
                "scaling_down_window_s": 60,
                "scaling_sleep_s": 15,
                # The work decides, not the latencies of a busy machine.
                "scaling_ttft_target_s": 10,
                "scaling_itl_target_s": 2,
            },
        },
        "indexers": {"count": 2},
        "workers": [workers],
    }


async def run(names: Sequence[str], folder: Path, registry: Mapping[str, str], clients: int) -> int:
    """Runs the cases on one mesh; returns the exit status."""
    settings = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_LOST_S)}
    lines: list[dict[str, Any]] = []
    with running_cluster(folder, settings) as cluster, contextlib.ExitStack() as stack:
        observer = Observer(cluster, folder / "observer.log")
        stack.callback(observer.close)
        bed = Bed(folder, cluster, observer, clients, registry)
        began = time.monotonic()
        await bed.up(mesh_file(registry))
        await bed.settled()
        up_s = round(time.monotonic() - began, 1)
        for name in names:
            lines.append(await run_case(name, bed))
            print(json.dumps(lines[-1]), flush=True)
            if lines[-1]["failed"]:
                break
        if "head" not in names and not lines[-1]["failed"]:
            await bed.meshctl("down")
    total = summarize(lines, up_s, names)
    print(json.dumps(total))
    return 1 if total["errors"] or total["inexact"] or total["failed"] else 0


def summarize(
    lines: Sequence[Mapping[str, Any]], up_s: float, names: Sequence[str]
) -> dict[str, Any]:
    """Returns the last line."""
    failed = {line["case"]: line["failed"] for line in lines if line["failed"]}
    failed |= dict.fromkeys(names[len(lines) :], "not run")
    of_node: Mapping[str, Any] = next((line for line in lines if line["case"] == "node"), {})
    return {
        "errors": sum(line["errors"] for line in lines),
        "inexact": sum(line["inexact"] for line in lines),
        "migrated_s": of_node.get("migrated_s"),
        "replaced_s": of_node.get("replaced_s"),
        "up_s": up_s,
        "passed": [line["case"] for line in lines if not line["failed"]],
        "failed": failed,
    }


def main(argv: list[str]) -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--registry", choices=["consul", "file"], default="consul")
    parser.add_argument("--keep", type=Path, help="keep the logs in this folder")
    options = parser.parse_args(argv)
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"no such case: {', '.join(sorted(unknown))}; see --list")
    names = [name for name in CASES if name in options.cases or not options.cases]
    if options.list:
        print("\n".join(CASES))
        return 0
    if not RAY.exists():
        print(f"Ray is not installed; run: {INSTALL}", file=sys.stderr)
        return 1
    # The processes of Ray are ended then, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as stack:
        # Ray's sockets have paths of at most 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-ray-")))
        if options.keep is not None:
            stack.callback(_keep, folder, options.keep)
        registry = {"registry": "file", "registry_path": str(folder / "registry")}
        if options.registry == "consul":
            try:
                agent = stack.enter_context(running_agent())
            except pytest.skip.Exception as error:
                print(f"{error.msg}; use --registry file", file=sys.stderr)
                return 1
            registry = {"registry": "consul", "consul_url": agent.url}
        return asyncio.run(run(names, folder, registry, options.clients))


def _keep(folder: Path, kept: Path) -> None:
    shutil.copytree(folder, kept, dirs_exist_ok=True, ignore=_is_no_file)


def _is_no_file(folder: str, names: list[str]) -> list[str]:
    return [
        name
        for name in names
        if (not (path := Path(folder) / name).is_dir() and not path.is_file()) or path.is_symlink()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
