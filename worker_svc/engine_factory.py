"""Builds the engine that a configuration names."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common.runtime.config import ConfigError
from common.runtime.plugins import ENGINES, import_factory
from common.service.lifecycle import App
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import LLMEngine
from worker_svc.engines.echo import EchoConfig, EchoEngine
from worker_svc.engines.sim.config import SIM_MODEL_DIR, SimConfig, SimHandoffConfig
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.ranks import RankedSimEngine
from worker_svc.engines.sim.timing import Timing

if TYPE_CHECKING:
    from worker_svc.engines.sglang.config import SglangConfig


def build_engine(config: WorkerConfig) -> LLMEngine:
    """Returns the engine, not started. Raises ConfigError if a factory of another package fails."""
    if config.engine not in ENGINES:
        return _build_imported_engine(config)
    if config.engine == "echo":
        return EchoEngine(EchoConfig(model=config.default_model_name))
    if config.engine == "sglang":
        return _build_sglang_engine(config)
    if config.engine == "openai":
        return build_server_engine(config, *config.server_urls)
    return _build_sim_engine(config)


def _build_imported_engine(config: WorkerConfig) -> LLMEngine:
    try:
        engine = import_factory(config.engine, "an LLMEngine")(config)
    except Exception as error:
        # The factory is foreign code and may raise anything.
        problem = f"--engine: {config.engine!r} failed: {type(error).__name__}: {error}"
        raise ConfigError([problem]) from error
    if not isinstance(engine, LLMEngine):
        needed = "start, generate, abort, drain, cleanup and loads"
        problem = f"--engine: {config.engine!r} returned no LLMEngine: it needs {needed}"
        raise ConfigError([problem])
    return engine


def _build_sim_engine(config: WorkerConfig) -> LLMEngine:
    def build(sim_config: SimConfig) -> SimEngine:
        return SimEngine(sim_config, clock=time.monotonic)

    sim_config = _sim_config(config)
    if config.dp_size > 1:
        return RankedSimEngine(sim_config, config.dp_size, build)
    return build(sim_config)


def _sim_config(config: WorkerConfig) -> SimConfig:
    return SimConfig(
        model=config.default_model_name,
        model_dir=config.model_path or SIM_MODEL_DIR,
        context_length=config.context_length,
        block_size=config.block_size,
        total_kv_blocks=config.total_kv_blocks,
        host_kv_blocks=config.host_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        mixed_steps=config.mixed_steps,
        max_waiting=config.requests_max,
        timing=Timing(
            base_s=config.step_ms / 1000,
            prefill_token_s=1 / config.prefill_tokens_per_s,
            speedup=config.speedup,
        ),
        mesh_key=config.mesh_key.encode(),
        loras=frozenset(config.loras),
        handoff=SimHandoffConfig(
            role=config.role,
            mode=config.handoff,
            host=config.host,
            port=config.bootstrap_port,
            advertise_host=config.advertise_host or "",
            transfer_group=config.transfer_group,
            local_prefill=config.local_prefill,
            gb_per_s=config.transfer_gb_per_s,
            timeout_s=config.handoff_timeout_s,
        ),
    )


def build_node(config: WorkerConfig) -> App:
    """Returns the app of a further node of an SGLang engine."""
    from worker_svc.engines.sglang.node import NodeApp

    return NodeApp(_sglang_config(config))


def _build_sglang_engine(config: WorkerConfig) -> LLMEngine:
    # Imported here: SGLang is only installed for its own workers.
    from worker_svc.engines.sglang.engine import SglangEngine

    return SglangEngine(_sglang_config(config))


def _sglang_config(config: WorkerConfig) -> SglangConfig:
    from worker_svc.engines.sglang.config import SglangConfig

    return SglangConfig(
        model=config.default_model_name,
        model_path=config.model_path,
        role=config.role,
        block_size=config.block_size,
        context_length=config.context_length,
        host=config.host,
        advertise_host=config.advertise_host or "",
        bootstrap_port=config.bootstrap_port,
        handoff_timeout_s=config.handoff_timeout_s,
        transfer_group=config.transfer_group,
        kv_events=config.kv_events,
        engine_args=json.loads(config.engine_args or "{}"),
    )


def build_server_engine(config: WorkerConfig, url: str) -> LLMEngine:
    """Returns the engine for one server. Raises InvalidRequest."""
    # Imported here: other workers need no HTTP client.
    from worker_svc.engines.openai.config import ServerConfig
    from worker_svc.engines.openai.engine import ServerEngine

    return ServerEngine(
        ServerConfig(
            url=url,
            api=config.server_api,
            model=config.server_model,
            model_path=config.model_path,
            key=config.server_key or "",
            ca_path=config.server_ca_path,
            serve=config.serve,
            block_size=config.block_size,
            context_length=config.context_length,
            connections_max=config.server_connections,
            start_s=config.server_start_s,
            kv_events=config.kv_events,
            kv_events_address=config.server_kv_events,
            kv_replay_address=config.server_kv_replay,
        )
    )


def resolve_model_dir(config: WorkerConfig) -> Path:
    """Returns the folder with tokenizer.json and tokenizer_config.json."""
    if config.model_path is not None:
        return config.model_path
    if config.engine == "sglang":
        from worker_svc.engines.sglang.make_model import TINY_MODEL_DIR

        return TINY_MODEL_DIR
    return SIM_MODEL_DIR
