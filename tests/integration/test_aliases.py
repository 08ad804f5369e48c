"""Requests to configured aliases, through a running frontend."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.kit.local_mesh import LocalMesh, local_mesh
from tests.kit.waiting import until

ALIASES: Mapping[str, Any] = {
    "chat": {"variants": [{"model": "a", "weight": 50}, {"model": "b", "weight": 50}]},
    "a": {"variants": [{"model": "a"}], "fallback": ["b"]},
    "gone": {"variants": [{"model": "never"}]},
    "safe": {"variants": [{"model": "never"}], "fallback": ["a", "b"]},
}


def headers_of(number: int) -> dict[str, str]:
    return {"x-session-id": f"session-{number}"}


async def variant(mesh: LocalMesh, model: str, headers: Mapping[str, str] | None = None) -> str:
    """The model that serves a chat, by header and body."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    response = await mesh.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    name = response.headers["x-kvmesh-variant"]
    assert response.json()["model"] == name
    return name


async def test_an_alias_shares_its_sessions_among_its_variants() -> None:
    async with (
        local_mesh(aliases=json.dumps(ALIASES)) as mesh,
        mesh.router(),
        mesh.worker(model_name="a"),
        mesh.worker(model_name="b"),
    ):
        chosen = [await variant(mesh, "chat", headers_of(number)) for number in range(24)]
        assert set(chosen) == {"a", "b"}
        again = [await variant(mesh, "chat", headers_of(number)) for number in range(24)]
        assert again == chosen, "a session keeps its variant"
        counts, metrics = Counter(chosen), await mesh.scrape()
        for model, count in counts.items():
            sample = (
                "kvmesh_frontend_alias_requests_total"
                f'{{alias="chat",model="{model}",reason="weight"}} {2.0 * count}'
            )
            assert sample in metrics
            labels = f'{{endpoint="chat_completions",model="{model}"'
            started = f"kvmesh_frontend_requests_started_total{labels}"
            assert started in metrics, "the metrics of requests have the variant"
        await check_other_endpoints(mesh)
        listed = (await mesh.http.get("/v1/models")).json()["data"]
        entry = next(one for one in listed if one["id"] == "chat")
        assert entry["variants"] == ALIASES["chat"]["variants"]
        assert (await mesh.http.get("/v1/models/chat")).json() == entry
        assert "gone" not in {one["id"] for one in listed}


async def check_other_endpoints(mesh: LocalMesh) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [5, 6], "max_tokens": 1},
        "/v1/responses": {"input": "hi", "max_output_tokens": 1},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/responses/input_tokens": {"input": "hi"},
        "/v1/embeddings": {"input": "hi"},
        "/tokenize": {"prompt": "hi"},
        "/detokenize": {"tokens": [5]},
    }
    for path, body in bodies.items():
        response = await mesh.http.post(path, json={"model": "chat", **body})
        assert response.status_code == 200, (path, response.text)
        name = response.headers["x-kvmesh-variant"]
        assert response.json().get("model", name) == name


async def test_a_fall_back_serves_only_if_it_is_configured_and_is_visible() -> None:
    async with local_mesh(aliases=json.dumps(ALIASES)) as mesh, mesh.router():
        async with mesh.worker(model_name="b"):
            body = {"prompt": [5], "max_tokens": 1}
            fallen = await mesh.complete(model="a", **body)
            assert (fallen.status_code, fallen.json()["model"]) == (200, "b")
            assert fallen.headers["x-kvmesh-variant"] == "b"
            assert fallen.headers["x-kvmesh-fallback-from"] == "a"
            assert (await mesh.complete(model="safe", **body)).json()["model"] == "b"
            refused = await mesh.complete(model="gone", **body)
            assert refused.status_code == 503
            assert "'never'" in refused.json()["error"]["message"]
            async with mesh.worker(model_name="a"):

                async def is_served_by_a() -> bool:
                    served = await mesh.complete(model="a", **body)
                    is_own: bool = served.json()["model"] == "a"
                    assert ("x-kvmesh-fallback-from" in served.headers) is not is_own
                    return is_own

                await until(is_served_by_a, "the model itself serves again")
        metrics = await mesh.scrape()
        assert '{alias="a",model="a",reason="weight"} 1.0' in metrics
        assert '{alias="safe",model="b",reason="fallback"} 1.0' in metrics


async def test_a_changed_file_moves_requests_without_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "aliases.json"
    path.write_text(json.dumps({"chat": {"variants": [{"model": "a"}]}}))
    async with (
        local_mesh(aliases=str(path)) as mesh,
        mesh.router(),
        mesh.worker(model_name="a"),
        mesh.worker(model_name="b"),
    ):
        assert await variant(mesh, "chat") == "a"
        path.write_text(json.dumps({"chat": {"variants": [{"model": "b"}]}}))

        async def has_moved() -> bool:
            return await variant(mesh, "chat") == "b"

        await until(has_moved, "requests go to the other model")
