"""Workers for servers that run already: stand-ins for SGLang and vLLM, and a frontend of ours.

The stand-ins (`tests/kit/model_server.py`) are no SGLang and no vLLM; those are in tests/adapters.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import AsyncMock

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import InvalidRequest, Unavailable, Unsupported, WorkerLost
from common.registry.file import FileRegistry
from common.registry.instances import SERVER_META_KEY
from common.request.preprocessed import (
    FinishReason,
    OutputOptions,
    RoutingHints,
    StopConditions,
    TokenIds,
)
from common.runtime.config import ConfigError, read_config
from common.runtime.free_ports import free_ports
from tests.kit.apps import living
from tests.kit.model_server import CONTEXT_LENGTH, MODEL, ModelServer, next_token
from tests.kit.processes import Mesh
from tests.kit.requests import context, preprocessed_request
from tests.kit.waiting import WAIT_S, until, wait_for
from worker_svc import servers
from worker_svc.config import WorkerConfig
from worker_svc.conformance.checks import all_checks
from worker_svc.conformance.harness import TimeLimits
from worker_svc.conformance.report import Verdict, run_checks
from worker_svc.engines.contract import LLMEngineOutput
from worker_svc.engines.openai import client
from worker_svc.engines.openai.config import ServerConfig
from worker_svc.engines.openai.engine import ServerEngine
from worker_svc.servers import EMPTY_ANSWERS, ServersApp, find_addresses, read_urls

APIS: Sequence[Literal["sglang", "vllm"]] = ("sglang", "vllm")
# For requests whose server hangs, on a busy machine.
PATIENT_S = 100.0
PATIENT = TimeLimits(start_s=60.0, answer_s=60.0, stop_s=30.0, end_s=30.0)


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """The tokens with which a stand-in continues."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
async def test_the_adapter_keeps_the_engine_contract(api: Literal["sglang", "vllm"]) -> None:
    with ModelServer(api) as server:
        checks = run_checks(lambda: ServerEngine(ServerConfig(server.url)), PATIENT, all_checks())
        found = {one.check.name: one async for one in checks}
        assert [str(one) for one in found.values() if one.verdict is Verdict.FAIL] == []
        skipped = {name for name, one in found.items() if one.verdict is Verdict.SKIP}
        assert skipped == {"kv-events", "flush-cache"}, "it publishes no events"
        await until(lambda: server.running == 0, "closed streams end at the server")


async def collect(engine: ServerEngine, **fields: Any) -> list[LLMEngineOutput]:
    return [one async for one in engine.generate(preprocessed_request(**fields), context())]


@pytest.mark.parametrize("api", APIS)
async def test_stop_tokens_log_probabilities_and_adapters_are_those_of_the_request(
    api: Literal["sglang", "vllm"],
) -> None:
    prompt = [5, 6, 7]
    tokens = expected(prompt, 4)
    with ModelServer(api) as server:
        engine = ServerEngine(ServerConfig(server.url))
        config = await engine.start(1)
        try:
            stop = StopConditions(max_tokens=9, stop_token_ids_hidden=(tokens[3],))
            fields: dict[str, Any] = {"token_ids": TokenIds.of(prompt), "stop_conditions": stop}
            options = OutputOptions(logprobs=2)
            chunks = await collect(engine, **fields, output_options=options)
            assert [id for one in chunks for id in one.token_ids] == tokens[:3]
            logprobs = [one for chunk in chunks for one in chunk.logprobs]
            assert [(one.token_id, one.logprob) for one in logprobs] == [
                (t, -1.0) for t in tokens[:3]
            ]
            assert [top.token_id for top in logprobs[0].top] == [tokens[0], tokens[0] + 1]
            assert chunks[-1].finish_reason is FinishReason.STOP
            visible = replace(stop, stop_token_ids_hidden=(), stop_token_ids_visible=(tokens[3],))
            chunks = await collect(engine, **fields | {"stop_conditions": visible})
            assert [id for one in chunks for id in one.token_ids] == tokens
            assert chunks[-1].stop_reason == tokens[3]
            await collect(engine, **fields | {"stop_conditions": replace(stop, min_tokens=3)})
            name, least = (
                ("sampling_params", "min_new_tokens") if api == "sglang" else ("", "min_tokens")
            )
            body = server.bodies[-1]
            assert (body[name] if name else body)[least] == 3
            assert config.loras == frozenset()
            assert await engine.load_lora("pirate", "file:///a") == {"pirate"}
            hints = RoutingHints(lora_name="pirate")
            await collect(engine, **fields, routing=hints)
            assert server.bodies[-1]["lora_path" if api == "sglang" else "model"] == "pirate"
            assert await engine.unload_lora("pirate") == frozenset()
            with pytest.raises(Unsupported, match="lora_name"):
                await collect(engine, **fields, routing=hints)
        finally:
            await engine.cleanup()


async def test_a_stopped_request_is_aborted_at_the_server() -> None:
    with ModelServer("sglang", step_s=0.05) as server:
        engine = ServerEngine(ServerConfig(server.url))
        await engine.start(1)
        try:
            ctx = context()
            stream = engine.generate(preprocessed_request(), ctx)
            await anext(stream)
            ctx.stop_generating("test")
            (output,) = [one async for one in stream]
            assert output.finish_reason is FinishReason.CANCELLED
            await until(lambda: server.running == 0, "the connection is closed")
            await until(lambda: server.aborted, "the server is asked to abort")
            assert server.aborted == [server.bodies[-1]["rid"]]
        finally:
            await engine.cleanup()


async def test_errors_name_the_server_and_the_setting() -> None:
    port = free_ports(1)
    nowhere = f"http://127.0.0.1:{port}"
    engine = ServerEngine(ServerConfig(nowhere, start_s=0.0))
    with pytest.raises(Unavailable, match=f"no response of {nowhere}"):
        await engine.start(1)
    await engine.cleanup()
    with ModelServer("vllm") as server:
        cases = [
            (ServerConfig(server.url, model="other"), "server_model", MODEL),
            (ServerConfig(server.url, api="sglang"), "server_api", server.url),
            (ServerConfig(server.url, model_path=Path("/none")), "model_path", "tokenizer.json"),
            (
                ServerConfig(server.url, block_size=24, kv_events_address="tcp://127.0.0.1:9"),
                "block_size",
                "16 tokens",
            ),
        ]
        for config, field, text in cases:
            engine = ServerEngine(config)
            with pytest.raises(InvalidRequest, match=text) as caught:
                await engine.start(1)
            assert caught.value.field == field
            await engine.cleanup()


async def test_a_server_with_a_key_needs_it_and_gets_it_with_each_call() -> None:
    with ModelServer("sglang") as server:
        server.key = "secret"
        engine = ServerEngine(ServerConfig(server.url))
        with pytest.raises(Unavailable, match="401: Unauthorized; set --server-key"):
            await engine.start(1)
        await engine.cleanup()
        engine = ServerEngine(ServerConfig(server.url, key="secret"))
        await engine.start(1)
        output = (await collect(engine, max_tokens=2))[-1]
        await engine.cleanup()
        assert output.finish_reason is FinishReason.LENGTH


async def test_a_server_that_ends_fails_its_requests_and_may_come_back() -> None:
    with ModelServer("sglang", step_s=0.02) as server:
        engine = ServerEngine(ServerConfig(server.url))
        await engine.start(1)
        port = int(server.url.rpartition(":")[2])
        try:
            stream = engine.generate(preprocessed_request(), context())
            assert (await anext(stream)).finish_reason is None
            server.close()
            with pytest.raises(WorkerLost, match=server.url) as caught:
                [one async for one in stream]
            assert caught.value.retryable
            with ModelServer("sglang", port=port):
                output = (await collect(engine, max_tokens=2))[-1]
                assert output.finish_reason is FinishReason.LENGTH
        finally:
            await engine.cleanup()


async def test_a_server_that_does_not_respond_has_the_load_of_its_open_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "CALL_TIMEOUT_S", 0.2)
    with ModelServer("sglang", step_s=0.02) as server:
        engine = ServerEngine(ServerConfig(server.url))
        await engine.start(1)
        try:
            streams = [engine.generate(preprocessed_request(), context(str(n))) for n in range(2)]
            await anext(streams[0])
            server.is_frozen = True
            steps = engine.loads()[0].engine_step
            waiting = asyncio.ensure_future(anext(streams[1]))
            await until(lambda: engine.loads()[0].waiting == 1, "the new request counts")
            await until(lambda: engine.loads()[0].running == 1, "the load has the old one")
            # Sleep: the poll fails some times.
            await asyncio.sleep(0.8)
            load = engine.loads()[0]
            assert (load.running, load.waiting) == (1, 1)
            assert load.engine_step == steps, "a failed poll is no step"
            server.is_frozen = False
            await waiting
            for stream in streams:
                await stream.aclose()
            await until(lambda: engine.loads()[0].running == 0, "the load is the server's")
        finally:
            await engine.cleanup()


async def test_a_server_of_texts_is_awaited_and_states_its_sizes_and_load() -> None:
    with ModelServer("text", step_s=0.02) as server:
        server.is_loading = True
        engine = ServerEngine(ServerConfig(server.url, start_s=0.0))
        with pytest.raises(Unavailable, match="Loading model"):
            await engine.start(1)
        await engine.cleanup()
        server.is_loading = False
        engine = ServerEngine(ServerConfig(server.url))
        config = await engine.start(1)
        try:
            assert (config.context_length, config.max_num_seqs) == (CONTEXT_LENGTH, 4)
            assert config.model_input == "text"
            body = json.dumps({"model": "x", "prompt": "a", "max_tokens": 200}).encode()
            stream = engine.generate_pass_through("completion", body, context())
            await anext(stream)
            await until(lambda: engine.loads()[0].running == 1, "its load is polled")
            await stream.aclose()
            await until(lambda: engine.loads()[0].running == 0, "a closed stream ends")
        finally:
            await engine.cleanup()


async def test_a_server_that_lists_no_model_needs_its_name() -> None:
    with ModelServer("text") as server:
        server.lists_models = False
        engine = ServerEngine(ServerConfig(server.url))
        with pytest.raises(InvalidRequest, match="set --server-model"):
            await engine.start(1)
        await engine.cleanup()
        engine = ServerEngine(ServerConfig(server.url, model="mine"))
        assert (await engine.start(1)).model == "mine"
        await engine.cleanup()


@pytest.mark.parametrize("sends_done", [True, False])
async def test_counts_reach_the_mesh_and_a_client_that_asked_for_them(sends_done: bool) -> None:
    with ModelServer("text") as server:
        server.sends_done = sends_done
        engine = ServerEngine(ServerConfig(server.url))
        await engine.start(1)
        try:
            for options, has_counts in ((None, False), ({"include_usage": True}, True)):
                body = {"model": "x", "prompt": "a", "stream": True, "stream_options": options}
                raw = json.dumps(body).encode()
                stream = engine.generate_pass_through("completion", raw, context())
                outputs = [one async for one in stream]
                last, chunks = outputs[-1], [json.loads(one.chunk_json or b"0") for one in outputs]
                assert last.finish_reason is FinishReason.LENGTH
                assert last.completion_usage is not None
                assert last.completion_usage.completion_tokens == 4
                assert any(one and one["usage"] for one in chunks) is has_counts
        finally:
            await engine.cleanup()


class TextServersMesh(Mesh):
    """A mesh with one worker process for two servers without token ids."""

    def is_complete(self) -> bool:
        return bool(self.model_names()) and len(self.known_instance_ids("worker")) == 2


@pytest.mark.slow
def test_what_remains_for_bodies_of_clients_when_a_server_hangs_or_ends(tmp_path: Path) -> None:
    with ModelServer("text", step_s=0.02) as first, ModelServer("text", step_s=0.02) as second:
        flags = ["--engine=openai", f"--server-urls={first.url},{second.url}", "--canary-idle-s=1"]
        with TextServersMesh(tmp_path, workers=1, worker_flags=flags) as mesh:
            url = f"{mesh.url}/v1/completions"
            body: dict[str, Any] = {"model": MODEL, "prompt": "a", "max_tokens": 30}

            def post(_: int = 0) -> int:
                return mesh.http.post(url, json=body, timeout=PATIENT_S).status_code

            def received(server: ModelServer) -> int:
                return sum("prompt" in one for one in server.bodies)

            wait_for(
                lambda: post() == 200 and received(first) and received(second),
                "the worker has observed steps of both, which limit the next ones",
            )
            first.is_frozen = True
            with ThreadPoolExecutor(8) as pool:
                assert [*pool.map(post, range(8))] == [200] * 8, "they ran at the other one"
            count = received(first)
            first.is_frozen = False
            wait_for(lambda: received(first) > count, "it reads what was sent to it")
            count = received(first)
            wait_for(lambda: post() == 200 and received(first) > count, "it is chosen again")
            long = body | {"max_tokens": 500, "stream": True}
            with mesh.http.stream("POST", url, json=long) as it:
                wait_for(lambda: first.running + second.running == 1, "one server computes")
                loser = first if first.running else second
                loser.close()
                events = [line[6:] for line in it.iter_lines() if line.startswith("data: ")]
            error = json.loads(events[-1])["error"]
            assert loser.url in error["message"]
            assert [post() for _ in range(4)] == [200] * 4


@pytest.mark.slow
def test_the_largest_step_limit_bounds_the_wait_for_a_server_that_never_computed(
    tmp_path: Path,
) -> None:
    with ModelServer("text", step_s=0.002) as first, ModelServer("text", step_s=0.002) as second:
        flags = ["--engine=openai", f"--server-urls={first.url},{second.url}", "--canary-idle-s=0"]
        limit = "--step-limit-max-s=2"
        with TextServersMesh(tmp_path, workers=1, worker_flags=[*flags, limit]) as mesh:
            first.is_frozen = True
            body = {"model": MODEL, "prompt": "a", "max_tokens": 5}

            def post(_: int) -> int:
                # 90 s with the default limit.
                url = f"{mesh.url}/v1/completions"
                return mesh.http.post(url, json=body, timeout=60).status_code

            with ThreadPoolExecutor(8) as pool:
                assert [*pool.map(post, range(8))] == [200] * 8, "they ran at the other one"
            causes = [one["cause"] for one in mesh.frontend.events("worker_circuit_opened")]
            assert causes == ["hung"], "some were at the first one"


async def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ("10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1")
    found = [(0, 0, 0, "", (host, 8000)) for host in hosts]

    async def resolve(*_: Any, **__: Any) -> Any:
        return found

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    assert await find_addresses("http://servers:8000") == [
        *("http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"),
    ]


class ServersMesh(Mesh):
    """A mesh with one worker process for two servers."""

    def is_complete(self) -> bool:
        """Whether the frontend is ready and has a worker for each server."""
        is_ready = self.http.get(f"{self.url}/ready").json()["ready"]
        return is_ready and len(self.known_instance_ids("worker")) == 2


def scrape_workers(mesh: Mesh) -> list[str]:
    """Returns the metrics of the workers that a frontend lists to Prometheus."""
    texts = []
    for group in mesh.http.get(f"{mesh.url}/v1/internal/metrics-targets").json():
        labels, (address,) = group["labels"], group["targets"]
        url = f"{labels['__scheme__']}://{address}{labels['__metrics_path__']}"
        texts.append(mesh.http.get(url).text)
    return [text for text in texts if "kvmesh_worker_open_requests" in text]


def read_events(response: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_streams_continue_on_another_server_and_the_file_adds_and_removes_servers(
    tmp_path: Path,
) -> None:
    urls = tmp_path / "servers"
    prompt, count = list(range(20, 60)), 60
    with ModelServer("sglang", step_s=0.03) as first, ModelServer("sglang", step_s=0.03) as second:
        urls.write_text(f"{first.url}\n{second.url}  # the second\n")
        flags = ["--engine=openai", f"--server-file={urls}", "--metrics-port=0"]
        with ServersMesh(tmp_path, workers=1, worker_flags=flags) as mesh:
            (worker,) = mesh.workers
            ids, scraped = mesh.known_instance_ids("worker"), "".join(scrape_workers(mesh))
            assert all(f'"{id}"' in scraped for id in ids), "each server is a target of Prometheus"
            body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "ignore_eos": True}
            body |= {"stream": True, "nvext": {"extra_fields": ["completion_token_ids"]}}
            url = f"{mesh.url}/v1/completions"
            with mesh.http.stream("POST", url, json=body) as response:
                wait_for(lambda: first.running + second.running == 1, "one server computes")
                loser, other = (first, second) if first.running else (second, first)
                loser.close()
                events = read_events(response)
            found = [one["nvext"]["completion_token_ids"] for one in events if "nvext" in one]
            assert found == [expected(prompt, count)]
            assert len(other.bodies[-1]["input_ids"]) > len(prompt), "it continued"
            with ModelServer("vllm") as third:
                urls.write_text(f"{other.url}\n{third.url}\n")
                wait_for(lambda: worker.events("server_removed"), "a server is removed")
                wait_for(lambda: len(worker.events("server_found")) == 3, "a server is added")
                urls.write_text("nonsense\n")
                wait_for(lambda: worker.events("server_discovery_failed"), "the line is refused")
                assert mesh.post_completion("still", prompt, model=MODEL).status_code == 200
                worker.send(signal.SIGTERM)
                assert worker.wait() == 0


@pytest.mark.slow
def test_a_constrained_stream_of_a_lost_server_ends_with_an_error_to_be_retried(
    tmp_path: Path,
) -> None:
    with ModelServer("sglang", step_s=0.03) as first, ModelServer("sglang", step_s=0.03) as second:
        flags = ["--engine=openai", f"--server-urls={first.url},{second.url}"]
        with ServersMesh(tmp_path, workers=1, worker_flags=flags) as mesh:
            body = {"model": MODEL, "prompt": "a", "max_tokens": 400, "stream": True}
            body |= {"guided_regex": "[a-z]{300}"}
            url = f"{mesh.url}/v1/completions"
            with mesh.http.stream("POST", url, json=body) as response:
                events = (line for line in response.iter_lines() if line.startswith("data: {"))
                assert next(events), "it has begun"
                (first if first.running else second).close()
                *_, last = events
            assert json.loads(last[6:])["error"]["code"] == "not_migratable"


@pytest.mark.slow
async def test_a_name_adds_and_removes_servers_and_health_is_that_of_their_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "DISCOVERY_INTERVAL_S", 0.02)
    port = free_ports(1)
    config = WorkerConfig(
        engine="openai",
        server_dns="http://model-servers:30000",
        registry_path=tmp_path,
        port=port,
        notice_s=0.0,
    )
    names, registry = NameServer(), FileRegistry(tmp_path)

    async def served() -> set[str]:
        members = (await registry.snapshot(config.namespace)).instances.values()
        return {f"http://{one.meta[SERVER_META_KEY]}" for one in members}

    async def serves(*expected: ModelServer) -> bool:
        return await served() == {server.url for server in expected}

    with ModelServer("sglang") as first, ModelServer("sglang") as second:
        names.error = OSError("no name server responds")
        async with (
            living(ServersApp(config, names.look_up)),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):

            async def is_ready() -> bool:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

            await until(lambda: names.lookups > EMPTY_ANSWERS, "lookups fail")
            assert not await is_ready(), "it may have servers"
            names.error = None
            await until(is_ready, "there is nothing to do")
            names.urls = [first.url]
            await until(partial(serves, first), "a server is found")
            await until(is_ready, "its worker gets work")
            names.urls = [first.url, second.url]
            await until(partial(serves, first, second), "a second one is found")
            names.urls = [second.url]
            await until(partial(serves, second), "the first one has left")
            names.error = OSError("no name server responds")
            lookups = names.lookups
            await until(lambda: names.lookups > lookups + 2 * EMPTY_ANSWERS, "lookups fail")
            assert await serves(second), "it stays"
            names.error, names.urls, names.empty_answers = None, [], 0
            await until(serves, "a name without addresses has no servers")
            assert names.empty_answers >= EMPTY_ANSWERS
            await until(is_ready, "there is nothing to do")
    await registry.close()


class NameServer:
    """A name whose addresses a test sets."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.error: OSError | None = None
        self.lookups = 0
        self.empty_answers = 0

    async def look_up(self, url: str) -> list[str]:
        assert url == "http://model-servers:30000"
        self.lookups += 1
        if self.error is not None:
            raise self.error
        self.empty_answers += not self.urls
        return self.urls


async def test_a_name_without_addresses_differs_from_a_name_server_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    for code, is_known in ((socket.EAI_NONAME, True), (socket.EAI_AGAIN, False)):
        failing = AsyncMock(side_effect=socket.gaierror(code, "x"))
        monkeypatch.setattr(loop, "getaddrinfo", failing, raising=False)
        with nullcontext() if is_known else pytest.raises(socket.gaierror):
            assert await find_addresses("http://model-servers:5") == []


@pytest.mark.slow
def test_requests_leave_a_server_that_freezes_while_it_computes(tmp_path: Path) -> None:
    """The probes of its worker end too, by their timeouts: no steps of the server."""
    prompt, count = list(range(20, 60)), 60
    with ModelServer("vllm", step_s=0.02) as first, ModelServer("vllm", step_s=0.02) as second:
        flags = ["--engine=openai", f"--server-urls={first.url},{second.url}"]
        flags += ["--step-limit-s=0.5", "--canary-idle-s=0.5", "--canary-timeout-s=0.5"]
        with ServersMesh(tmp_path, workers=1, worker_flags=flags) as mesh:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "ignore_eos": True}
            nvext = {"extra_fields": ["completion_token_ids"]}
            url = f"{mesh.url}/v1/completions"

            def post(at: int, tokens: int = 4) -> int:
                new = body | {"prompt": [100 + at] * 40, "max_tokens": tokens}
                return mesh.http.post(url, json=new, timeout=PATIENT_S).status_code

            def received(server: ModelServer) -> int:
                return sum(len(one["prompt"]) >= 40 for one in server.bodies)

            wait_for(
                lambda: (
                    post(50, 30) == post(51, 30) == 200 and received(first) and received(second)
                ),
                "the worker has observed steps of both, which limit the next ones",
            )
            with mesh.http.stream(
                "POST", url, json=body | {"stream": True, "nvext": nvext}
            ) as response:
                wait_for(lambda: first.running + second.running == 1, "one server computes")
                frozen, other = (first, second) if first.running else (second, first)
                frozen.is_frozen = True
                events = read_events(response)
            found = [one["nvext"]["completion_token_ids"] for one in events if "nvext" in one]
            assert found == [expected(prompt, count)]
            with ThreadPoolExecutor(6) as pool:
                assert [*pool.map(post, range(6))] == [200] * 6
            assert [post(at) for at in range(6, 9)] == [200] * 3
            assert received(other) >= 10
            frozen.is_frozen = False


@pytest.mark.slow
def test_a_server_without_token_ids_gets_the_bodies_of_clients(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "outer").mkdir()
    message = {"role": "user", "content": "Hello"}
    body = {"model": "sim", "messages": [message], "max_tokens": 8, "temperature": 0}
    with Mesh(tmp_path / "inner", workers=1, worker_flags=["--speedup=0"]) as inner:
        flags = ["--engine=openai", f"--server-urls={inner.url}"]
        with Mesh(tmp_path / "outer", workers=1, worker_flags=flags) as outer:
            answers = []
            for mesh in (inner, outer):
                response = mesh.http.post(f"{mesh.url}/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                answer = response.json()
                answers.append((answer["choices"], answer["usage"]["completion_tokens"]))
            assert answers[0] == answers[1]
            url = f"{outer.url}/v1/chat/completions"
            with outer.http.stream("POST", url, json=body | {"stream": True}) as response:
                parts = [one["choices"][0]["delta"].get("content") for one in read_events(response)]
            assert "".join(filter(None, parts)) == answers[0][0][0]["message"]["content"]
            bad = outer.http.post(url, json=body | {"max_tokens": -1})
            assert bad.status_code == 400, bad.text


def test_invalid_settings_of_servers_are_named(tmp_path: Path) -> None:
    cases = {
        "--server-urls: set one of": ["--engine=openai"],
        "--server-urls: 'ftp://a' is no URL": ["--engine=openai", "--server-urls=ftp://a"],
        "must have no path": ["--engine=openai", "--server-urls=http://a/v1"],
        "--server-kv-events: 'x' is not tcp": [
            *("--engine=openai", "--server-urls=http://a", "--server-kv-events=x"),
        ],
        "--stream-port: must be 0": [
            *("--engine=openai", "--server-urls=http://a,http://b", "--stream-port=7"),
        ],
        "--server-kv-events: must be tcp://*:PORT": [
            *("--engine=openai", "--server-dns=http://a", "--server-kv-events=tcp://b:5557"),
        ],
        "--server-urls: only the engine openai": ["--server-urls=http://a"],
        "--role: the openai engine": ["--engine=openai", "--server-urls=http://a", "--role=decode"],
    }
    for text, flags in cases.items():
        with pytest.raises(ConfigError, match=re.escape(text)):
            read_config(WorkerConfig, "WORKER", {}, flags)
    path = tmp_path / "servers"
    path.write_text("# none yet\nhttp://a:1/\n\nhttp://a:1\nhttp://b\n")
    assert read_urls(path) == ["http://a:1", "http://b"]
    path.write_text("http://a\nb\n")
    with pytest.raises(ValueError, match="line 2: 'b' is no URL"):
        read_urls(path)
