"""A stock SGLang server with LoRA adapters, an API key, and pages of one token, which it has by
default."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from common.errors import Unavailable
from common.runtime.free_ports import free_ports
from tests.adapters.servers_mesh import PATIENT_S, Json, ServersMesh
from tests.adapters.stock_server import SglangServer
from tests.adapters.token_servers import prompt_of
from tests.kit.waiting import wait_for
from tests.sglang.adapter_model import RANK, TARGETS, write_adapter
from worker_svc.engines.openai.config import ServerConfig
from worker_svc.engines.openai.engine import ServerEngine

KEY = "of-the-server"
# Arguments that come later replace those before.
FLAGS = (
    *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(RANK)),
    *("--lora-target-modules", *sorted(TARGETS)),
    *("--api-key", KEY, "--page-size", "1", "--max-running-requests", "16"),
)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter."""
    folder = tmp_path_factory.mktemp("adapters") / "french"
    write_adapter(folder, 1)
    return folder


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    folder = tmp_path_factory.mktemp("server")
    server = SglangServer(tiny, folder, free_ports(3), *FLAGS, events_format="dynamo")
    try:
        yield server.wait_ready()
    finally:
        server.kill()


def call(server: SglangServer, method: str, path: str, body: Json = None) -> Json:
    """Returns a response of the server itself."""
    headers = {"authorization": f"Bearer {KEY}"}
    response = httpx.request(
        method,
        f"{server.url}{path}",
        json=body,
        headers=headers,
        timeout=PATIENT_S,
        trust_env=False,
    )
    assert response.status_code == 200, response.text
    return response.json()


def own_tokens(server: SglangServer, prompt: list[int], adapter: str) -> list[int]:
    """Returns the tokens of the server itself."""
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "lora_path": adapter, "sampling_params": sampling}
    found: list[int] = call(server, "POST", "/generate", body)["output_ids"]
    return found


async def test_an_engine_without_the_key_of_its_server_names_the_setting(
    server: SglangServer,
) -> None:
    engine = ServerEngine(ServerConfig(server.url))
    with pytest.raises(Unavailable, match="401: Unauthorized; set --server-key"):
        await engine.start(1)
    await engine.cleanup()


@pytest.mark.cell("sglang", "LoRA adapters: use, load, unload")
def test_an_adapter_is_a_model_with_its_own_output_and_blocks_until_it_is_removed(
    server: SglangServer, adapter: Path, tmp_path: Path
) -> None:
    prompt = prompt_of(400)
    with ServersMesh(tmp_path, [server], f"--server-key={KEY}", indexers=1) as mesh:

        def tokens(model: str) -> Json:
            return mesh.complete(prompt, model=model)["nvext"]["completion_token_ids"]

        added = {"name": "french", "model": mesh.model, "uri": f"file://{adapter}"}
        mesh.post("/v1/adapters", added)
        wait_for(lambda: "french" in mesh.model_names(), "it is loaded", PATIENT_S)
        found = tokens("french")
        wait_for(
            lambda: mesh.overlap(prompt, model="french")[1] == 10,
            "the index has its blocks, of sixteen pages each",
            PATIENT_S,
        )
        assert mesh.overlap(prompt)[1] == 0, "they are not those of the model"
        assert found == own_tokens(server, prompt, "french") != tokens(mesh.model)
        assert mesh.http.delete(f"{mesh.url}/v1/adapters/french").status_code == 200

        def models_of_server() -> list[str]:
            return [one["id"] for one in call(server, "GET", "/v1/models")["data"]]

        wait_for(lambda: "french" not in models_of_server(), "it is unloaded", PATIENT_S)
        wait_for(lambda: "french" not in mesh.model_names(), "it is no model", PATIENT_S)
        mesh.complete(prompt)
