"""Responses of the mesh compared with those of SGLang's own HTTP server for the same model: log
probabilities and sampling parameters, on one worker and on a prefill/decode pair.

Seeds are missing: SGLang 0.5.23 has no deterministic inference on a CPU. It refuses torch_native
("Currently only [...] attention backends are supported for deterministic inference").
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.kit.logs import logs_on_failure
from tests.sglang.conftest import POOL_TOKENS, Trio
from tests.sglang.sglang_mesh import MODEL, HttpMesh
from tests.sglang.sglang_workers import START_S, WAIT_S
from worker_svc.engines.sglang.server_args import server_arguments

TOPS, LENGTH = 3, 12
# Any, here and below: JSON.
GREEDY: dict[str, Any] = {"max_tokens": LENGTH, "temperature": 0}
# The output consists of these tokens, and repeats them.
TOKENS = list(range(700, 720))
LOOP = {"logit_bias": {str(token): 60 for token in TOKENS}}
# By parameter: a body, and what it adds to it.
PARAMETERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "presence_penalty": (LOOP, {"presence_penalty": 2}),
    "frequency_penalty": (LOOP, {"frequency_penalty": 1}),
    "repetition_penalty": (LOOP, {"repetition_penalty": 2}),
    "logit_bias": ({}, {"logit_bias": {"700": 100}}),
    "stop_token_ids": (LOOP, {"stop_token_ids": TOKENS}),
    "min_tokens": (LOOP | {"stop_token_ids": TOKENS}, {"min_tokens": 5}),
}


@pytest.fixture(autouse=True)
def _logs(mesh: HttpMesh, request: pytest.FixtureRequest) -> Iterator[None]:
    with logs_on_failure(mesh, request):
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def own(trio: Trio, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The address of `sglang.launch_server` with the model and the arguments of the workers."""
    import torch  # type: ignore[import-not-found]

    folder = tmp_path_factory.mktemp("own")
    # Its server imports this package for audio; the environment of workers does not have it.
    (folder / "soundfile.py").touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = server_arguments(
        "aggregated",
        {"max_total_tokens": POOL_TOKENS},
        is_cpu=not torch.cuda.is_available(),
        block_size=16,
        adapter_arguments={
            **{"model_path": trio.registry.parent / "tiny", "served_model_name": MODEL},
            **{"host": "127.0.0.1", "port": port, "skip_server_warmup": True},
        },
    )
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sglang.launch_server", *_flags(arguments)),
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await _until_served(url, process, folder / "log")
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), WAIT_S)


def _flags(arguments: dict[str, Any]) -> list[str]:
    names = {name: f"--{name.replace('_', '-')}" for name in arguments}
    return [
        part
        for name, value in arguments.items()
        for part in ([names[name]] if value is True else [names[name], str(value)])
    ]


async def _until_served(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(START_S), httpx.AsyncClient(trust_env=False) as http:
        while True:
            assert process.returncode is None, f"see {log}"
            try:
                if (await http.get(f"{url}/v1/models")).status_code == 200:
                    return
            except httpx.HTTPError:
                await asyncio.sleep(0.2)


async def choices(
    trio: Trio, mesh: HttpMesh, own: str, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The choice of SGLang's server, and those of the aggregated worker and of the pair."""
    pin = {"nvext": {"backend_instance_id": trio.app.instance_id}}
    body = body | {"model": MODEL}
    responses = [
        await mesh.http.post(url, json=one)
        for url, one in ((own + path, body), (path, body | pin), (path, body))
    ]
    assert [one.status_code for one in responses] == [200] * 3, responses[-1].text
    first, *rest = [one.json()["choices"][0] for one in responses]
    return first, rest


async def test_log_probabilities_of_completions_are_those_of_its_server(
    trio: Trio, mesh: HttpMesh, own: str
) -> None:
    prompt = [Random(41).randrange(3, 4000) for _ in range(50)]
    body = GREEDY | {"prompt": prompt, "logprobs": TOPS, "ignore_eos": True}
    wanted, found = await choices(trio, mesh, own, "/v1/completions", body)
    expected = wanted["logprobs"]
    assert len(expected["token_logprobs"]) == LENGTH
    for choice in found:
        logprobs = choice["logprobs"]
        assert choice["text"] == wanted["text"]
        assert logprobs["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-3)
        for ours, theirs in zip(logprobs["top_logprobs"], expected["top_logprobs"], strict=True):
            values = sorted(theirs.values())
            assert sorted(ours.values())[-len(values) :] == pytest.approx(values, abs=1e-3)


async def test_log_probabilities_of_chats_are_those_of_its_server(
    trio: Trio, mesh: HttpMesh, own: str
) -> None:
    body = GREEDY | {"logprobs": True, "top_logprobs": TOPS, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "Which way is the harbour?"}]}
    wanted, found = await choices(trio, mesh, own, "/v1/chat/completions", body)
    assert len(wanted["logprobs"]["content"]) == LENGTH
    for choice in found:
        assert choice["message"]["content"] == wanted["message"]["content"]
        for ours, theirs in zip(
            choice["logprobs"]["content"], wanted["logprobs"]["content"], strict=True
        ):
            tops = list(zip(ours["top_logprobs"], theirs["top_logprobs"], strict=True))
            assert len(tops) == TOPS
            for one, other in ((ours, theirs), *tops):
                assert one["bytes"] == other["bytes"]
                assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-3)


@pytest.mark.parametrize("name", PARAMETERS)
async def test_a_parameter_has_the_effect_of_its_server(
    trio: Trio, mesh: HttpMesh, own: str, name: str
) -> None:
    base, added = PARAMETERS[name]
    body = GREEDY | base | {"prompt": [5, 6, 7]}
    without, _ = await choices(trio, mesh, own, "/v1/completions", body)
    wanted, found = await choices(trio, mesh, own, "/v1/completions", body | added)
    assert wanted["text"] != without["text"]
    for choice in found:
        assert choice["text"] == wanted["text"]
        assert choice["finish_reason"] == wanted["finish_reason"]
