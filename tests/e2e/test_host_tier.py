"""Prompts in host memory: routed to with their weight, served from there, and counted by tier."""

from __future__ import annotations

from tests.e2e.extensions import Json, complete, terms, unique_prompt
from tests.kit.processes import Mesh, Service, mesh_fixture
from tests.kit.waiting import wait_for

# Each worker's device holds one prompt and some blocks more.
BLOCKS = 20
FLAGS = ["--speedup=0", "--total-kv-blocks=32", "--host-kv-blocks=64", "--metrics-port=0"]
# Without predictions, which count as blocks of the device for a while.
ROUTER_FLAGS = ["--router-predicted-ttl-secs=0"]
mesh = mesh_fixture(workers=2, indexers=1, worker_flags=FLAGS, router_flags=ROUTER_FLAGS)


def run_on(mesh: Mesh, worker: Service, prompt: list[int]) -> Json:
    body, _ = complete(mesh, prompt, backend_instance_id=worker.instance_id)
    return body


def predicted(mesh: Mesh, prompt: list[int], worker: Service) -> int:
    """How many tokens the router predicts to be cached if a worker gets the prompt."""
    fields = {
        "annotations": ["query_instance_id"],
        "extra_fields": ["kv_hit"],
        "backend_instance_id": worker.instance_id,
    }
    response = mesh.post_completion("query", prompt, nvext=fields)
    count: int = response.json()["nvext"]["kv_hit"]["predicted_cached_tokens"]
    return count


def displace(mesh: Mesh, worker: Service) -> None:
    """Fills the device of a worker with another prompt, and waits until the router has that."""
    prompt = unique_prompt(BLOCKS)
    run_on(mesh, worker, prompt)
    wait_for(
        lambda: predicted(mesh, [*prompt, 5], worker) == 16 * BLOCKS,
        "the router has the events of the worker",
    )


def credits(mesh: Mesh, body: Json) -> dict[int, float]:
    """The overlap credit of each worker in a decision, in blocks."""
    return {
        worker.instance_id: terms(mesh, body["id"], str(worker.instance_id))["overlap_credit"]
        for worker in mesh.workers
    }


def metric(worker: Service, tier: str) -> float:
    return worker.metric(f'kvmesh_worker_cached_tokens_total{{tier="{tier}"}}')


def test_a_prompt_on_the_host_draws_its_request_and_is_counted_there(mesh: Mesh) -> None:
    holder, other = mesh.workers
    prompt = unique_prompt(BLOCKS)
    run_on(mesh, holder, prompt)
    displace(mesh, holder)
    more = [*prompt, 5]
    before = {tier: metric(holder, tier) for tier in ("device", "host")}
    body, worker = complete(mesh, more, extra_fields=["kv_hit", "worker_id"])
    assert int(worker) == holder.instance_id
    hit, details = body["nvext"]["kv_hit"], body["usage"]["prompt_tokens_details"]
    assert hit["predicted_cached_tokens"] == hit["cached_tokens"] == 16 * BLOCKS
    on_host = hit["host_cached_tokens"]
    assert 0 < on_host < 16 * BLOCKS, "the device has kept the first blocks"
    assert details == {"cached_tokens": 16 * BLOCKS, "host_cached_tokens": on_host}
    found = credits(mesh, body)
    assert found[other.instance_id] == 0
    assert found[holder.instance_id] == BLOCKS - 0.25 * on_host / 16
    assert metric(holder, "host") - before["host"] == on_host
    assert metric(holder, "device") - before["device"] == 16 * BLOCKS - on_host


def test_a_prompt_on_the_device_of_another_worker_is_preferred(mesh: Mesh) -> None:
    host, device = mesh.workers
    prompt = unique_prompt(BLOCKS)
    for worker in (host, device):
        run_on(mesh, worker, prompt)
    displace(mesh, host)
    more = [*prompt, 5]
    wait_for(
        lambda: predicted(mesh, more, device) == 16 * BLOCKS,
        "the router has the events of the other worker",
    )
    body, worker_id = complete(mesh, more, extra_fields=["kv_hit"])
    assert int(worker_id) == device.instance_id
    found = credits(mesh, body)
    assert found[device.instance_id] == BLOCKS
    assert 0.75 * BLOCKS <= found[host.instance_id] < BLOCKS
    assert body["nvext"]["kv_hit"]["host_cached_tokens"] == 0
