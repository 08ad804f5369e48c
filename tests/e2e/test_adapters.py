"""Adapters that workers place by themselves: added and removed by HTTP and meshctl, and moved."""

from __future__ import annotations

import io
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import httpx
import pytest

from meshctl.cli import run_command
from tests.kit.processes import MODEL, Mesh, Service, mesh_fixture
from tests.kit.waiting import WAIT_S, wait_for

# A request waits for a worker that is about to load its adapter, as long as a busy machine needs.
mesh = mesh_fixture(workers=3, named=True, worker_flags=["--speedup=20"])


def add(mesh: Mesh, name: str, **values: Any) -> httpx.Response:
    body = {"name": name, "model": MODEL, **values}
    return mesh.http.post(f"{mesh.url}/v1/adapters", json=body)


def names(mesh: Mesh) -> list[str]:
    """Returns the desired adapters."""
    return [one["name"] for one in mesh.http.get(f"{mesh.url}/v1/adapters").json()["data"]]


def adapter(mesh: Mesh, name: str) -> dict[str, Any]:
    """Returns the entry of a desired adapter."""
    found = mesh.http.get(f"{mesh.url}/v1/adapters").json()["data"]
    return next(one for one in found if one["name"] == name)


def holders(mesh: Mesh, name: str) -> set[str]:
    """Returns the names of the workers that hold an adapter."""
    return {worker["name"] for worker in adapter(mesh, name)["workers"]}


def status(mesh: Mesh, model: str) -> int:
    return mesh.post_completion("request", model=model).status_code


def named(mesh: Mesh, name: str) -> Service:
    return next(worker for worker in mesh.workers if worker.name == name)


def meshctl(mesh: Mesh, *words: str) -> tuple[int, str]:
    """Returns the status and the output of `meshctl adapters`."""
    output = io.StringIO()
    line = ["adapters", *words, f"--registry-path={mesh.folder / 'registry'}"]
    with redirect_stdout(output):
        return run_command(line, {}), output.getvalue()


@contextmanager
def steady_requests(mesh: Mesh, model: str) -> Iterator[list[int]]:
    """Sends requests one after another meanwhile; the list gets their statuses."""
    statuses: list[int] = []
    has_ended = threading.Event()

    def send() -> None:
        with httpx.Client(timeout=WAIT_S, trust_env=False) as http:
            # Ends: the test sets the event.
            while not has_ended.is_set():
                body = {"model": model, "prompt": "hi", "max_tokens": 4}
                statuses.append(http.post(f"{mesh.url}/v1/completions", json=body).status_code)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield statuses
    finally:
        has_ended.set()
        sender.join(WAIT_S)


def test_an_adapter_serves_from_its_addition_to_its_removal_over_losses_of_workers(
    mesh: Mesh,
) -> None:
    added = add(mesh, "basque", copies=2)
    assert (added.status_code, added.json()["copies"]) == (200, 2)
    wait_for(lambda: len(holders(mesh, "basque")) == 2, "two workers have loaded it")
    wait_for(lambda: status(mesh, "basque") == 200, "router and frontend see them")
    with steady_requests(mesh, "basque") as statuses:
        wait_for(lambda: len(statuses) > 3, "requests are served")
        lost, kept = sorted(holders(mesh, "basque"))
        named(mesh, lost).kill()
        (third,) = {worker.name for worker in mesh.workers} - {kept}
        wait_for(lambda: holders(mesh, "basque") == {kept, third}, "the third has loaded it")

        assert add(mesh, "basque", copies=1).status_code == 200
        wait_for(lambda: len(holders(mesh, "basque")) == 1, "one has unloaded it")
        (holder,) = holders(mesh, "basque")
        (other,) = {kept, third} - {holder}
        leaving = named(mesh, holder)
        leaving.process.terminate()
        wait_for(lambda: holders(mesh, "basque") == {other}, "it moves before the worker ends")
        leaving.wait()
        count = len(statuses)
        wait_for(lambda: len(statuses) > count + 3, "requests go on")

        (folder,) = (mesh.folder / "registry").glob("*/adapters")
        # At once: a worker may write into it meanwhile.
        folder.rename(mesh.folder / "lost")
        wait_for(lambda: "basque" in names(mesh), "the worker stores it again")
        count = len(statuses)
        wait_for(lambda: len(statuses) > count + 3, "requests go on without a registry")
    assert Counter(statuses) == {200: len(statuses)}

    removed = mesh.http.delete(f"{mesh.url}/v1/adapters/basque")
    assert removed.json() == {"id": "basque", "object": "adapter", "deleted": True}
    wait_for(lambda: status(mesh, "basque") == 404, "it is no model any more")
    assert status(mesh, MODEL) == 200
    assert mesh.http.delete(f"{mesh.url}/v1/adapters/basque").status_code == 404


@pytest.mark.parametrize(
    ("values", "code", "field"),
    [
        ({"copies": 0}, 400, "copies"),
        ({"copies_max": 2}, 400, "copies_max"),
        ({"name": "a b"}, 400, "name"),
        ({"name": MODEL}, 400, "name"),
        ({"model": "absent"}, 404, "model"),
        ({"unknown": 1}, 400, "unknown"),
    ],
)
def test_an_invalid_adapter_is_refused_by_its_field(
    mesh: Mesh, values: dict[str, Any], code: int, field: str
) -> None:
    response = mesh.http.post(
        f"{mesh.url}/v1/adapters", json={"name": "a", "model": MODEL, **values}
    )
    assert (response.status_code, response.json()["error"]["param"]) == (code, field)


def test_meshctl_adds_lists_applies_and_removes(mesh: Mesh) -> None:
    assert meshctl(mesh, "add", "french", f"--model={MODEL}", "--copies=1") == (0, "")
    wait_for(lambda: meshctl(mesh, "list")[0] == 0, "a worker holds it")
    code, text = meshctl(mesh, "list", "--json")
    assert (code, [one["name"] for one in json.loads(text)]) == (0, ["french"])

    # The sim has adapters without files only.
    assert meshctl(mesh, "add", "broken", f"--model={MODEL}", "--uri=file:///none")[0] == 0
    wait_for(lambda: adapter(mesh, "broken")["failed"], "a worker could not load it")
    code, text = meshctl(mesh, "list")
    assert code == 1
    assert "adapters of the sim have no files" in text
    degraded = mesh.http.get(f"{mesh.url}/health").json()["degraded"]
    assert any("cannot load it" in reason for reason in degraded)
    assert meshctl(mesh, "remove", "broken")[0] == 0

    file = mesh.folder / "mesh.yaml"
    file.write_text("adapters: [{name: german, model: sim, copies: 1}]\n")
    assert meshctl(mesh, "apply", str(file)) == (0, "german: stored\n")
    wait_for(lambda: holders(mesh, "german"), "a worker holds it")
    file.write_text("adapters: []\n")
    assert meshctl(mesh, "apply", str(file)) == (0, "german: removed\n")
    assert meshctl(mesh, "apply", str(file)) == (0, "")
    assert meshctl(mesh, "remove", "french")[0] == 0
    assert meshctl(mesh, "remove", "french")[0] == 1
    assert meshctl(mesh, "list") == (0, "")
