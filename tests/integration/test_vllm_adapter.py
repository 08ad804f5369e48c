"""What the adapter learns of a vLLM server about its KV events, from a stand-in."""

from __future__ import annotations

import pytest

from common.errors import Conflict, Unimplemented
from tests.kit.model_server import ModelServer
from worker_svc.engines.openai.config import ServerConfig
from worker_svc.engines.openai.engine import ServerEngine
from worker_svc.kv_events.external_events import DuplicatePolicy

PUBLISHER = {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        (None, "set --server-kv-events"),
        ({}, "start it with --kv-events-config"),
        ({"0": {"publisher": "null", "endpoint": ""}}, "start it with --kv-events-config"),
        ({"0": PUBLISHER, "1": PUBLISHER}, "several ranks"),
        ({"0": PUBLISHER}, ""),
    ],
)
async def test_the_publisher_of_a_server_is_the_one_that_it_states(
    sources: dict[str, dict[str, str]] | None, reason: str
) -> None:
    with ModelServer("vllm") as server:
        server.kv_sources = sources
        engine = ServerEngine(ServerConfig(server.url))
        config = await engine.start(1)
        await engine.cleanup()
        assert reason in config.kv_index_reason
        assert config.kv_index == ("approx" if reason else "events")
        assert bool(engine.kv_events_off_reason) == bool(reason)
        assert config.software == "vllm"
        if not reason:
            # Equal pages of two requests are reported, and removed, one by one.
            assert engine.kv_event_format.duplicates is DuplicatePolicy.COUNTED


async def test_configured_addresses_replace_those_of_the_server() -> None:
    with ModelServer("vllm") as server:
        server.kv_sources = {"0": PUBLISHER}
        engine = ServerEngine(ServerConfig(server.url, kv_events_address="tcp://127.0.0.1:9"))
        assert (await engine.start(1)).kv_index == "events"
        await engine.cleanup()


async def test_a_flush_makes_the_server_publish_it_or_is_an_error() -> None:
    with ModelServer("vllm") as server:
        engine = ServerEngine(ServerConfig(server.url))
        await engine.start(1)
        try:
            await engine.flush_cache()
            assert server.bodies[-1]["max_tokens"] == 1, "its events are published after a step"
            count = len(server.bodies)
            server.flush_response = {"success": False}
            with pytest.raises(Conflict, match="requests use it"):
                await engine.flush_cache()
            server.flush_response = None
            with pytest.raises(Unimplemented, match="VLLM_SERVER_DEV_MODE"):
                await engine.flush_cache()
            assert len(server.bodies) == count
        finally:
            await engine.cleanup()
