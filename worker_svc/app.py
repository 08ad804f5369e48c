"""Builds a worker from its parts."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from random import SystemRandom

import structlog

from common.errors import Conflict, MeshError
from common.kv.events import Partition, Source
from common.kv.hashing import DEFAULT_BLOCK_SIZE, HASH_SCHEME_ID, PrefixHasher
from common.registry.adapters import ADAPTERS_META_KEY, AdapterState
from common.registry.card import ModelCard
from common.registry.instances import (
    CONTINUES_PENALTIES_META_KEY,
    ENGINE_META_KEY,
    SERVER_META_KEY,
    SERVER_MODEL_META_KEY,
    UNSUPPORTED_OPTIONS_META_KEY,
    Instance,
)
from common.registry.registry import Registry, follow
from common.request.preprocessed import PENALTY_PREFIX, unsupported_options
from common.runtime.member_key import MemberKey
from common.runtime.plugins import ENGINES
from common.service.base import ServiceApp
from common.service.lifecycle import Lifecycle, ServiceInfo
from common.trials.constraints import PREPARE, ConstraintTrials
from common.trials.fair_trials import FairTrials
from common.trials.trials import Trials
from kvmesh.engine.v1 import admin_pb2, admin_pb2_grpc, engine_pb2, engine_pb2_grpc
from worker_svc.adapters.loaded import LoadedAdapters
from worker_svc.adapters.placer import AdapterPlacer
from worker_svc.card import build_card, card_differences, read_vocab_size
from worker_svc.config import WorkerConfig
from worker_svc.engine_factory import build_engine, resolve_model_dir
from worker_svc.engines.contract import (
    KV_EVENTS_OFF,
    AdapterEngine,
    EngineConfig,
    FailureReportingEngine,
    LLMEngine,
    PagedEngine,
)
from worker_svc.kv_events.event_log import PublishedSource
from worker_svc.kv_events.external_events import DuplicatePolicy, KvEventFormat
from worker_svc.kv_events.normalizer import Normalizer
from worker_svc.kv_events.publisher import Publisher
from worker_svc.metrics import worker_registry
from worker_svc.serving.admin import AdminServicer
from worker_svc.serving.attach_server import AttachServer
from worker_svc.serving.probe import EngineProbe
from worker_svc.serving.runner import Runner
from worker_svc.serving.service import EngineServicer
from worker_svc.serving.stalled_requests import StalledRequests
from worker_svc.serving.step_limit import StepLimits, StepLimitSettings
from worker_svc.tracing import GenerateSpans

SERVICE_NAME = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
ADMIN_SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
# Time for the last frames of ended requests to reach their frontends.
FINAL_FRAMES_TIMEOUT_S = 1.0
# For other workers to load the adapters of a worker that ends; below DEREGISTER_TIMEOUT_S.
HANDOVER_S = 2.0

log = structlog.get_logger()


class WorkerApp(ServiceApp[WorkerConfig]):
    """One worker process; see `ServiceApp`. engine: None for the configured one."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        instance_id: int | None = None,
        member_key: MemberKey | None = None,
        registry: Registry | None = None,
        engine: LLMEngine | None = None,
    ) -> None:
        super().__init__(
            "worker", config, instance_id=instance_id, member_key=member_key, registry=registry
        )
        self.engine = build_engine(config) if engine is None else engine
        is_built_in = engine is None and config.engine in ENGINES
        self._engine_name = config.engine if is_built_in else type(self.engine).__name__
        trials = FairTrials(Trials((PREPARE,)))
        self.runner = Runner(
            self.engine,
            max_requests=config.requests_max,
            role=config.role,
            constraints=ConstraintTrials(trials, config.grammar_compile_s),
        )
        self._attach = AttachServer(self.instance_id, self.runner)
        self._engine_started = False
        self._lifecycle: Lifecycle | None = None
        self._card: ModelCard | None = None
        self._registered_instance: Instance | None = None
        self.publisher: Publisher | None = None
        self._changes_lock = asyncio.Lock()
        self._placer: AdapterPlacer | None = None

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        """Starts the engine, builds its card and serves gRPC."""
        config, self._lifecycle = self._config, lifecycle
        self._engine_started = True
        started_at = time.monotonic()
        engine_config = await self.engine.start(self.instance_id)
        elapsed_s = round(time.monotonic() - started_at, 2)
        log.info("engine_started", engine=self._engine_name, s=elapsed_s)
        if config.model_name:
            engine_config = replace(engine_config, served_model_name=config.model_name)
        if isinstance(self.engine, FailureReportingEngine):
            lifecycle.spawn(self.engine.wait_for_failure(), name="engine")
        self._card = await asyncio.to_thread(
            build_card,
            engine_config.model_folder or resolve_model_dir(config),
            engine_config,
            config.serve or (),
            tool_call_parser=config.card_tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            aliases=config.model_aliases,
            control_tokens_in_text=config.control_tokens_in_text,
        )
        self.runner.model, self.runner.card_checksum = self._card.name, self._card.checksum
        self.runner.engine_started(engine_config)
        self.runner.step_limits = StepLimits(
            StepLimitSettings(
                config.step_limit_s,
                config.step_limit_max_s,
                engine_config.max_num_batched_tokens or math.inf,
            )
        )
        # After the card: it is the same on workers with and without KV events.
        engine_config = self._resolve_kv_index(engine_config)
        self.publisher = self._build_publisher(engine_config, self._card)
        self._bind(lifecycle, [SERVICE_NAME, ADMIN_SERVICE_NAME])
        # Before the entry is built, which advertises the address.
        self._serve_metrics(worker_registry(self.runner), role=config.role, model=self._card.name)
        self._registered_instance = self._instance_of(engine_config, self._card)
        self.runner.spans = GenerateSpans(self._card.name, config.role)
        self.runner.vocab_size = await asyncio.to_thread(read_vocab_size, self._card)
        servicer = EngineServicer(
            self.runner,
            self._attach,
            self._instance,
            engine_config,
            self._engine_name,
            self._card,
            publisher=self.publisher,
        )
        self._add_service(engine_pb2_grpc.add_EngineServiceServicer_to_server, servicer)
        admin = AdminServicer(
            self.runner,
            self,
            self._engine_name,
            adapters=self._place_adapters(lifecycle, engine_config.loras),
            lock=self._changes_lock,
            notice_s=config.notice_s,
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        await self._start_servers()
        lifecycle.spawn(self.publisher.run(), name="kv publisher")
        await lifecycle.health.set(SERVICE_NAME, True)
        probe = self._watch_engine(lifecycle) if config.canary_idle_s else None
        watch = StalledRequests(self.runner, None if probe is None else probe.check_now)
        lifecycle.spawn(watch.run(), name="request watch")
        return self._info()

    def _place_adapters(self, lifecycle: Lifecycle, loras: frozenset[str]) -> LoadedAdapters | None:
        """Starts to load and unload the adapters that this worker shall hold, and returns those of
        the engine; None if it cannot load any. loras: loaded at the start."""
        config, counters = self._config, self.runner.counters
        if not isinstance(self.engine, AdapterEngine):
            return None
        adapters = LoadedAdapters(
            self.engine,
            self,
            self._changes_lock,
            model=self.runner.model,
            loras=loras,
            notice_s=config.notice_s,
        )

        def count_load(is_loaded: bool) -> None:
            counters["adapters_placed" if is_loaded else "adapters_failed"] += 1

        self._placer = AdapterPlacer(
            self._registry,
            self.instance_id,
            adapters,
            self,
            namespace=config.namespace,
            model=self.runner.model,
            role=config.role,
            open_requests=self.runner.open_adapter_requests,
            rng=SystemRandom(),
            on_load=count_load,
        )
        members = follow(self._registry, config.namespace, self._placer.on_snapshot)
        lifecycle.spawn(members, name="adapter members")
        lifecycle.spawn(self._placer.run(), name="adapter placement")
        return adapters

    def _watch_engine(self, lifecycle: Lifecycle) -> EngineProbe:
        """Probes an idle engine; without an answer, health is NOT_SERVING."""

        async def set_serving(is_alive: bool) -> None:
            for service in ("", SERVICE_NAME):
                await lifecycle.health.set(service, is_alive)

        probe = EngineProbe(
            self.runner,
            set_serving,
            lifecycle.spawn,
            idle_s=self._config.canary_idle_s,
            timeout_s=self._config.canary_timeout_s,
        )
        lifecycle.spawn(probe.run(), name="engine probe")
        return probe

    def _resolve_kv_index(self, engine: EngineConfig) -> EngineConfig:
        """Returns the config with the `kv_index` to advertise: `events` only if events are
        published.

        Routers approximate a cache without events. An engine without pages has no cache.
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
        """Publishes load, and KV events if the engine has them."""
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
        # Without pages the sources stay empty, and the format does not matter.
        event_format = KvEventFormat(block_size, block_size, DuplicatePolicy.IDEMPOTENT)
        if paged_engine is not None:
            event_format = paged_engine.kv_event_format
        has_kv_events = engine.kv_index == "events"
        publisher = Publisher(
            self.instance_id,
            Partition(card.name, block_size, HASH_SCHEME_ID if has_kv_events else 0),
            {
                rank: PublishedSource(
                    Source(self.instance_id, rank), Normalizer(event_format, hasher_factory)
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

    def _instance(self) -> Instance:
        assert self._registered_instance is not None, "the server starts after this is built"
        return self._registered_instance

    def _instance_of(self, engine: EngineConfig, card: ModelCard) -> Instance:
        endpoint = engine.disaggregated_endpoint or (None, None)
        return self._build_instance(
            stable_name=self._config.stable_name,
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
            kv_index=engine.kv_index,
            meta={
                **self._meta,
                **_options_meta(engine),
                **_server_meta(engine),
                ENGINE_META_KEY: engine.software or self._config.engine,
                **self._adapters_meta(AdapterState()),
            },
        )

    def _adapters_meta(self, state: AdapterState) -> dict[str, str]:
        has_adapters = isinstance(self.engine, AdapterEngine)
        return {ADAPTERS_META_KEY: state.to_text()} if has_adapters else {}

    async def register(self) -> None:
        """Adds the card, then this process, to the registry."""
        assert self._card is not None
        card = self._card.without_inline_bytes(larger_than_bytes=self._config.card_inline_bytes)
        await self._registry.put_card(card)
        try:
            await super().register()
        except Conflict as error:
            checksum = error.metadata.get("served_checksum")
            mismatch = await self._card_differences(card, checksum) if checksum else ""
            if not mismatch:
                raise
            raise Conflict(
                f"{error.message}: {mismatch}. All workers of a model must be equal in this:"
                " change it here, or choose another --model-name or --namespace, or stop the other"
                " workers first",
                field=error.field,
                reason=error.reason,
                metadata=error.metadata,
            ) from error

    async def rejoin(self) -> None:
        """Registers again after `deregister`. Raises Conflict if the process stops."""
        if self._lifecycle is None or self._lifecycle.is_draining:
            raise Conflict("the worker stops")
        if self._placer is not None:
            await self._placer.stay()
        if self._lease is None:
            await self.register()

    async def deregister(self) -> None:
        """Leaves, once other workers hold the adapters that were placed here, or after a while."""
        if self._lease is not None and self._placer is not None:
            await self._placer.leave(HANDOVER_S)
        await super().deregister()

    async def advertise_loras(self, loras: frozenset[str]) -> None:
        """Advertises these adapters, now or with the next registration."""
        await self._advertise(replace(self._instance(), loras=loras))

    async def advertise_adapter_state(self, state: AdapterState) -> None:
        """Advertises what it cannot load, now or with the next registration."""
        meta = {**self._instance().meta, **self._adapters_meta(state)}
        await self._advertise(replace(self._instance(), meta=meta))

    async def _advertise(self, instance: Instance) -> None:
        self._registered_instance = instance
        if self._lease is not None:
            await self._lease.update(self._instance())

    async def _card_differences(self, card: ModelCard, checksum: str) -> str:
        """Returns differences between our card and the served one; "" if that is not available."""
        try:
            served = await self._registry.get_card(checksum)
        except MeshError as error:
            log.warning("served_card_unknown", card_checksum=checksum, error=error.message)
            return ""
        return "; ".join(card_differences(card, served))

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Refuses new requests, waits for running ones, then for transfers."""
        self.runner.is_draining = True
        unfinished = []
        try:
            async with asyncio.timeout(grace_s):
                await self.runner.wait_idle()
        except TimeoutError:
            unfinished = [f"{self.runner.open_requests} requests"]
        try:
            await self.engine.drain()
        except Exception:  # S4-41: the shutdown continues.
            log.exception("engine_drain_failed")
        self._attach.end()
        return [*unfinished, *await self._stop_servers(FINAL_FRAMES_TIMEOUT_S)]

    async def close(self) -> None:
        """Ends the engine, closes servers and registry."""
        try:
            await self._close_servers()
            if self._engine_started:
                await self.engine.cleanup()
        finally:
            await super().close()


def _options_meta(engine: EngineConfig) -> dict[str, str]:
    if engine.supported_fields is None:
        return {}
    unsupported = unsupported_options(engine.supported_fields)
    meta = {UNSUPPORTED_OPTIONS_META_KEY: ",".join(sorted(unsupported))}
    if PENALTY_PREFIX in engine.supported_fields:
        meta[CONTINUES_PENALTIES_META_KEY] = "1"
    return meta


def _server_meta(engine: EngineConfig) -> dict[str, str]:
    if not engine.server_address:
        return {}
    return {SERVER_META_KEY: engine.server_address, SERVER_MODEL_META_KEY: engine.model}
