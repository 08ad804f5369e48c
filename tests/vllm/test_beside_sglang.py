"""A mesh of a stock vLLM server and a stock SGLang server that have the same model files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from common.runtime.free_ports import free_ports
from tests.adapters.servers_mesh import ServersMesh, Stream
from tests.adapters.stock_server import SglangServer
from tests.adapters.token_servers import prompt_of, wait_for_return
from tests.kit.processes import ROOT
from tests.kit.waiting import wait_for
from tests.vllm.vllm_server import BLOCK_SIZE, MODEL, VllmServer

SGLANG = ROOT / ".venv-sglang" / "bin" / "python"
INSTALL = "SGLang is not installed: make setup-sglang"
# For long responses on a busy machine.
PATIENT_S = 200.0
COUNT, STREAMS = 1600, 6

pytestmark = pytest.mark.skipif(not SGLANG.exists(), reason=INSTALL)


@pytest.fixture(scope="module")
def sglang(folder: Path) -> Iterator[SglangServer]:
    server = SglangServer(folder / "tiny", folder, free_ports(3), python=str(SGLANG))
    try:
        yield server.wait_ready()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def mixed(
    servers: list[VllmServer], sglang: SglangServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServersMesh]:
    """One model, with a worker of vLLM and one of SGLang."""
    flags = (f"--block-size={BLOCK_SIZE}", "--context-length=2048")
    folder, wait = tmp_path_factory.mktemp("mixed"), ["--worker-wait-s=5"]
    both = [servers[0], sglang]
    with ServersMesh(folder, both, *flags, frontend_flags=wait) as mesh, closing(mesh.http):
        yield mesh


def start(mesh: ServersMesh, number: int) -> Stream:
    facts = {"extra_fields": ["worker_id"]}
    body = {"model": MODEL, "prompt": prompt_of(number, 64), "max_tokens": COUNT, "nvext": facts}
    return Stream(mesh, "/v1/completions", body | {"temperature": 0, "ignore_eos": True})


def text_of(stream: Stream) -> str:
    choices = [one["choices"][0] for one in stream.join() if one.get("choices")]
    return "".join(one["text"] for one in choices)


def workers_of(stream: Stream) -> set[str]:
    """Returns the ids of the workers that a response names."""
    found = (
        one["nvext"]["worker_id"]["decode_worker_id"] for one in stream.join() if "nvext" in one
    )
    return {str(one) for one in found}


@pytest.mark.cell("vllm", "migration of a started stream")
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_stream_continues_on_the_other_engine(
    engine: str, mixed: ServersMesh, servers: list[VllmServer], sglang: SglangServer
) -> None:
    kept_engine = "sglang" if engine == "vllm" else "vllm"
    both: dict[str, VllmServer | SglangServer] = {"vllm": servers[0], "sglang": sglang}
    loser, kept = both[engine], both[kept_engine]
    assert mixed.serves(loser)
    assert mixed.serves(kept)
    streams = [start(mixed, number) for number in range(STREAMS)]
    wait_for(lambda: loser.running() > 0 and kept.running() > 0, "both have streams", PATIENT_S)
    for stream in streams:
        stream.wait_begun()
    with loser.killed():
        texts = [text_of(one) for one in streams]
        # All of them on the remaining engine.
        whole = [text_of(start(mixed, number)) for number in range(STREAMS)]
    errors = {
        at: event["error"]["message"]
        for at, one in enumerate(streams)
        for event in one.events
        if "error" in event
    }
    assert 1 <= len(errors) < STREAMS
    kept_worker = mixed.worker_of(kept)
    assert all(
        workers_of(one) == {kept_worker} for at, one in enumerate(streams) if at not in errors
    )
    assert all(f"its engine ({kept_engine}, not {engine}" in one for one in errors.values()), errors
    assert all(texts[at] == whole[at] for at in range(STREAMS) if at not in errors)
    wait_for_return(mixed, loser)
    with kept.killed():
        # What was sent is the beginning of a response of the lost engine.
        assert all(text_of(start(mixed, at)).startswith(texts[at]) for at in errors)
    wait_for_return(mixed, kept)
