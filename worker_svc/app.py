"""The worker's composition root: knows all the parts and wires them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import SystemRandom

import structlog

from common.errors import Conflict, InternalError, MeshError
from common.kv.events import Partition, Source
from common.kv.hashing import DEFAULT_BLOCK_SIZE, HASH_SCHEME_ID, PrefixHasher
from common.registry.card import ModelCard
from common.registry.instances import Instance, KvIndex, new_instance_id
from common.registry.open import health_check_meta, open_registry
from common.registry.registry import Lease, Registry
from common.rpc import channel as rpc
from common.rpc.interceptors import RunningCalls
from common.service.lifecycle import Lifecycle, ServiceInfo
from common.service.metrics_server import serve_metrics
from kvmesh.engine.v1 import engine_pb2, engine_pb2_grpc
from worker_svc.card import build_card, card_differences, read_vocab_size
from worker_svc.config import WorkerConfig
from worker_svc.engines.contract import (
    KV_EVENTS_OFF,
    EngineConfig,
    FailureReportingEngine,
    LLMEngine,
    PagedEngine,
)
from worker_svc.engines.echo import EchoConfig, EchoEngine
from worker_svc.engines.sim.config import SIM_MODEL_DIR, SimConfig, SimHandoffConfig
from worker_svc.engines.sim.engine import SimEngine
from worker_svc.engines.sim.timing import Timing
from worker_svc.kv_events.event_log import SourceFeed
from worker_svc.kv_events.normalizer import DuplicatePolicy, KvEventFormat, Normalizer
from worker_svc.kv_events.publisher import Publisher
from worker_svc.metrics import worker_registry
from worker_svc.serving.attach_server import AttachServer
from worker_svc.serving.probe import EngineProbe
from worker_svc.serving.runner import Runner
from worker_svc.serving.service import EngineServicer
from worker_svc.tracing import GenerateSpans

SERVICE_NAME = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
# How long the last frames of ended requests may take to reach their frontends.
FINAL_FRAMES_TIMEOUT_S = 1.0

log = structlog.get_logger()


class WorkerApp:
    """One worker process. registry, engine: by default as configured."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        instance_id: int | None = None,
        registry: Registry | None = None,
        engine: LLMEngine | None = None,
    ) -> None:
        self._config = config
        self._security = rpc.security_from_config(config)
        self._registry = open_registry(config) if registry is None else registry
        self.instance_id = new_instance_id(SystemRandom()) if instance_id is None else instance_id
        self.engine = build_engine(config) if engine is None else engine
        self._engine_name = config.engine if engine is None else type(engine).__name__
        self.runner = Runner(self.engine, max_requests=config.requests_max, role=config.role)
        self._attach = AttachServer(self.instance_id, self.runner)
        self._calls = RunningCalls()
        self._server = rpc.server(security=self._security, calls=self._calls)
        self._engine_started = False
        self._card: ModelCard | None = None
        self._instance: Instance | None = None
        self._lease: Lease | None = None
        self.publisher: Publisher | None = None
        self._close_metrics: Callable[[], Awaitable[None]] | None = None
        self.address = ""

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """Start the engine, make its card, bind, serve."""
        config = self._config
        self._engine_started = True
        started_at = time.monotonic()
        engine_config = await self.engine.start(self.instance_id)
        started_s = round(time.monotonic() - started_at, 2)
        log.info("engine_started", engine=self._engine_name, s=started_s)
        if config.model_name:
            engine_config = replace(engine_config, served_model_name=config.model_name)
        if isinstance(self.engine, FailureReportingEngine):
            lifecycle.spawn(self.engine.wait_for_failure(), name="engine")
        self._card = await asyncio.to_thread(
            build_card, resolve_model_dir(config), engine_config, config.serve
        )
        self.runner.card_checksum = self._card.checksum
        # After the card, which is the same on workers that publish and on those that do not.
        engine_config = self._resolve_kv_index(engine_config)
        self.publisher = self._build_publisher(engine_config, self._card)
        port = rpc.bind(self._server, config.host, config.port, security=self._security)
        self.address = rpc.join_address(config.advertise_host or config.host, port)
        self._instance = replace(
            self._instance_of(engine_config, self._card),
            meta=health_check_meta(config, self.address, lifecycle.health.port),
        )
        self.runner.spans = GenerateSpans(
            self._card.name, self._instance.role, clock=time.monotonic
        )
        servicer = EngineServicer(
            self.runner,
            self._attach,
            self._current_instance,
            engine_config,
            self._engine_name,
            self._card,
            publisher=self.publisher,
            vocab_size=await asyncio.to_thread(read_vocab_size, self._card),
        )
        engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, self._server)
        rpc.add_health(self._server, lifecycle.health.servicer)
        rpc.enable_reflection(self._server, [SERVICE_NAME])
        await self._server.start()
        lifecycle.spawn(self.publisher.run(), name="kv publisher")
        await lifecycle.health.set(SERVICE_NAME, True)
        self._watch_engine(lifecycle)
        return ServiceInfo(str(self.instance_id), {"grpc": self.address, **self._serve_metrics()})

    def _watch_engine(self, lifecycle: Lifecycle) -> None:
        """An idle engine has to answer probes, or the worker says that it does not serve."""
        if not self._config.canary_idle_s:
            return

        async def set_serving(is_alive: bool) -> None:
            for service in ("", SERVICE_NAME):
                await lifecycle.health.set(service, is_alive)

        canary = EngineProbe(
            self.runner,
            set_serving,
            lifecycle.spawn,
            idle_s=self._config.canary_idle_s,
            timeout_s=self._config.canary_timeout_s,
        )
        lifecycle.spawn(canary.run(), name="canary")

    def _resolve_kv_index(self, engine: EngineConfig) -> EngineConfig:
        """What is advertised: an engine's events count when they are published.

        A cache of which nobody is told is worth guessing at; one that is not there is not.
        """
        if engine.kv_index != "events":
            return engine
        off_reason = "the engine reports no pages"
        if isinstance(self.engine, PagedEngine):
            off_reason = self.engine.kv_events_off_reason
        if off_reason and off_reason != KV_EVENTS_OFF:
            return replace(engine, kv_index="none", kv_index_reason=off_reason)
        if off_reason or not self._config.kv_events:
            return replace(engine, kv_index="approx", kv_index_reason=KV_EVENTS_OFF)
        return engine

    def _build_publisher(self, engine: EngineConfig, card: ModelCard) -> Publisher:
        """Publishes events where there are any, and load in any case."""
        block_size = engine.kv_cache_block_size or DEFAULT_BLOCK_SIZE
        mesh_key = self._config.mesh_key.encode()

        def hasher_factory(lora: str, salt: str, block_size: int) -> PrefixHasher:
            return PrefixHasher(
                mesh_key=mesh_key,
                model=card.name,
                block_size=block_size,
                lora_name=lora,
                cache_salt=salt,
            )

        paged_engine = self.engine if isinstance(self.engine, PagedEngine) else None
        # Without pages the feeds stay empty, and any rules will do.
        rules = KvEventFormat(block_size, block_size, DuplicatePolicy.IDEMPOTENT)
        has_kv_events = engine.kv_index == "events"
        publisher = Publisher(
            self.instance_id,
            Partition(card.name, block_size, HASH_SCHEME_ID if has_kv_events else 0),
            {
                rank: SourceFeed(
                    Source(self.instance_id, rank),
                    Normalizer(
                        paged_engine.kv_event_format if paged_engine else rules, hasher_factory
                    ),
                )
                for rank in range(engine.dp_size)
            },
            self.engine.loads,
            self._registry,
            self._config.namespace,
            security=self._security,
        )
        if has_kv_events and paged_engine is not None:
            paged_engine.publish_to(publisher)
        return publisher

    def _serve_metrics(self) -> dict[str, str]:
        if self._config.metrics_port is None:
            return {}
        address, self._close_metrics = serve_metrics(
            worker_registry(self.runner), self._config.host, self._config.metrics_port
        )
        return {"metrics": address}

    def _current_instance(self) -> Instance:
        assert self._instance is not None, "the server starts after it is known"
        return self._instance

    def _instance_of(self, engine: EngineConfig, card: ModelCard) -> Instance:
        endpoint = engine.disaggregated_endpoint or (None, None)
        return Instance(
            id=self.instance_id,
            namespace=self._config.namespace,
            service="worker",
            stable_name=self._config.stable_name,
            address=self.address,
            model=card.name,
            card_checksum=card.checksum,
            role=self._config.role,
            block_size=engine.kv_cache_block_size,
            transfer_group=engine.transfer_group,
            bootstrap_host=endpoint[0],
            bootstrap_port=endpoint[1],
            local_prefill=engine.local_prefill,
            dp_size=engine.dp_size,
            total_kv_blocks=engine.total_kv_blocks,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            context_length=engine.context_length,
            taints=frozenset(self._config.taints),
            loras=engine.loras,
            kv_index=parse_kv_index(engine),
        )

    async def register(self) -> None:
        """Become known, the card first."""
        assert self._card is not None
        card = self._card.without_inline_bytes(larger_than_bytes=self._config.card_inline_bytes)
        await self._registry.put_card(card)
        try:
            self._lease = await self._registry.register(self._current_instance())
        except Conflict as error:
            if not (
                mismatch := await self._card_differences(
                    card, error.metadata.get("served_checksum")
                )
            ):
                raise
            raise Conflict(
                f"{error.message}: {mismatch}. All workers of a model must be alike in "
                "this: change it "
                "here, or choose another --model-name or --namespace, or stop the others first",
                field=error.field,
                reason=error.reason,
                metadata=error.metadata,
            ) from error

    async def _card_differences(self, card: ModelCard, checksum: str | None) -> str:
        """What tells our card from the one that is served; "" where that cannot be had."""
        if checksum is None:
            return ""
        try:
            served = await self._registry.get_card(checksum)
        except MeshError as error:
            log.warning("served_card_unknown", card_checksum=checksum, error=error.message)
            return ""
        return "; ".join(card_differences(card, served))

    async def deregister(self) -> None:
        """Become unknown."""
        if self._lease is not None:
            await self._lease.close()

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Refuse new requests, let the running ones end, then let transfers end."""
        self.runner.is_draining = True
        unfinished = []
        try:
            async with asyncio.timeout(grace_s):
                await self.runner.wait_idle()
        except TimeoutError:
            unfinished = [f"{self.runner.open_requests} requests"]
        try:
            await self.engine.drain()
        except Exception:  # S4-41: shutdown goes on
            log.exception("engine_drain_failed")
        self._attach.end()
        return [*unfinished, *await rpc.stop(self._server, FINAL_FRAMES_TIMEOUT_S, self._calls)]

    async def close(self) -> None:
        """End the engine, close the server and the registry."""
        try:
            await self._server.stop(None)
            if self._engine_started:
                await self.engine.cleanup()
        finally:
            await self._registry.close()


def parse_kv_index(engine: EngineConfig) -> KvIndex:
    """The engine's kv_index, if it is one. Raises Bug."""
    match engine.kv_index:
        case "events" | "approx" | "none" as known:
            return known
        case other:
            raise InternalError(f"the engine says kv_index {other!r}")


def build_engine(config: WorkerConfig) -> LLMEngine:
    """The engine a configuration names."""
    if config.engine == "echo":
        return EchoEngine(EchoConfig(model=config.default_model_name))
    if config.engine == "sglang":
        return build_sglang_engine(config)
    return SimEngine(
        SimConfig(
            model=config.default_model_name,
            model_dir=config.model_path or SIM_MODEL_DIR,
            context_length=config.context_length,
            block_size=config.block_size,
            total_kv_blocks=config.total_kv_blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
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
        ),
        clock=time.monotonic,
    )


def build_sglang_engine(config: WorkerConfig) -> LLMEngine:
    """SGLang; imported here, since other workers do not have it."""
    from worker_svc.engines.sglang.engine import SglangConfig, SglangEngine

    return SglangEngine(
        SglangConfig(
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
    )


def resolve_model_dir(config: WorkerConfig) -> Path:
    """Where the card's files are."""
    if config.model_path is not None:
        return config.model_path
    if config.engine == "sglang":
        from worker_svc.engines.sglang.make_model import TINY_MODEL_DIR

        return TINY_MODEL_DIR
    return SIM_MODEL_DIR
