"""Builds a batch service from its parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import structlog

from batch_svc import conversation_service, response_service
from batch_svc.config import BatchConfig
from batch_svc.conversation_service import ConversationServicer
from batch_svc.core.responses import DAY_S
from batch_svc.frontends import Frontends
from batch_svc.metrics import build_metrics
from batch_svc.response_service import StoredResponseServicer
from batch_svc.runner.responses import ResponseRunner
from batch_svc.runner.runner import Runner
from batch_svc.runner.stages import Stages
from batch_svc.runner.streams import OutputSignals, OutputWriter
from batch_svc.service import SERVICE_NAME, BatchServicer
from batch_svc.store.batches import BatchStore
from batch_svc.store.conversations import ConversationStore
from batch_svc.store.database import Database
from batch_svc.store.files import FileStore
from batch_svc.store.lease import RunnerLease
from batch_svc.store.responses import StoredResponses
from batch_svc.store.schema import create_tables
from batch_svc.store.sqlite import SqliteDatabase
from common.errors import Unavailable
from common.registry.registry import Registry, follow
from common.runtime.member_key import MemberKey
from common.service.base import ServiceApp
from common.service.lifecycle import Lifecycle, ServiceInfo
from kvmesh.batch.v1 import batch_pb2_grpc, conversations_pb2_grpc, responses_pb2_grpc

LOG = structlog.get_logger(__name__)

SWEEP_S: Final = 60.0
# A database that starts at the same time as this service.
OPEN_RETRY_S: Final = 0.5
OPEN_TIMEOUT_S: Final = 30.0


class BatchApp(ServiceApp[BatchConfig]):
    """One process of the batch service; see `ServiceApp`."""

    def __init__(
        self,
        config: BatchConfig,
        *,
        instance_id: int | None = None,
        member_key: MemberKey | None = None,
        registry: Registry | None = None,
    ) -> None:
        super().__init__(
            "batch", config, instance_id=instance_id, member_key=member_key, registry=registry
        )
        self._database = open_database(config)
        keep_s = config.file_days * DAY_S
        self._files = FileStore(self._database, config.limits, keep_s)
        batches = BatchStore(self._database, config.limits)
        lease = RunnerLease(self._database, str(self.instance_id), config.lease_s, time.monotonic)
        self._frontends = Frontends(self._security, config.line_timeout_s)
        stages = Stages(
            self._files,
            batches,
            lease,
            config.limits,
            keep_s=keep_s,
            in_prefix_order=config.in_prefix_order,
        )
        self._conversations = ConversationStore(self._database, config.conversation_limits)
        self._responses = StoredResponses(
            self._database, config.response_limits, self._conversations
        )
        self._signals = OutputSignals()
        self._response_runner = ResponseRunner(
            self._responses,
            lease,
            self._frontends,
            OutputWriter(self._responses, lease, self._signals),
            in_flight_max=config.responses_in_flight,
            attempts_max=config.line_attempts,
        )
        self._runner = Runner(
            batches,
            stages,
            lease,
            self._frontends,
            self._response_runner,
            lease_s=config.lease_s,
            lines_in_flight=config.lines_in_flight,
            attempts_max=config.line_attempts,
        )
        self._runner_task: asyncio.Task[None] | None = None
        self.metrics = build_metrics(self._runner, self._response_runner)
        self._servicer = BatchServicer(self._files, batches, self._responses, self._runner, lease)

    async def start(self, lifecycle: Lifecycle) -> ServiceInfo:
        await self._open_database()
        names = [
            SERVICE_NAME,
            response_service.SERVICE_NAME,
            conversation_service.SERVICE_NAME,
        ]
        self._bind(lifecycle, names, has_streams=False)
        batch_pb2_grpc.add_BatchServiceServicer_to_server(self._servicer, self._server)
        responses_pb2_grpc.add_StoredResponseServiceServicer_to_server(
            StoredResponseServicer(self._responses, self._signals, self._response_runner.wake),
            self._server,
        )
        conversations_pb2_grpc.add_ConversationServiceServicer_to_server(
            ConversationServicer(self._conversations), self._server
        )
        self._serve_metrics(self.metrics)
        watch = follow(self._registry, self._config.namespace, self._frontends.on_snapshot)
        lifecycle.spawn(watch, name="registry watch")
        self._runner_task = lifecycle.spawn(self._runner.run(), name="runner")
        lifecycle.spawn(self._sweep(), name="expired files and responses")
        await self._server.start()
        return self._info()

    async def drain(self, grace_s: float) -> Sequence[str]:
        """Ends the lines in flight, which the next runner sends again, and the calls."""
        if self._runner_task is not None:
            self._runner_task.cancel()
            await asyncio.wait([self._runner_task], timeout=grace_s)
            await self._runner.release()
        return await super().drain(grace_s)

    async def close(self) -> None:
        await super().close()
        await self._frontends.close()
        await self._database.close()

    async def _open_database(self) -> None:
        """Opens the database and creates its tables. Raises Unavailable after OPEN_TIMEOUT_S."""
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        while True:
            try:
                await self._database.open()
                await create_tables(self._database)
                return
            except Unavailable as error:
                if time.monotonic() >= deadline:
                    raise
                LOG.warning("batch_database_lost", error=error.message)
            await asyncio.sleep(OPEN_RETRY_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                files, responses = await self._files.sweep(), await self._responses.sweep()
                conversations = await self._conversations.sweep()
            except Unavailable:
                continue
            if files:
                LOG.info("files_expired", files=files)
            if responses:
                LOG.info("responses_expired", responses=responses)
            if conversations:
                LOG.info("conversations_expired", conversations=conversations)


def open_database(config: BatchConfig) -> Database:
    """Returns the database of a configuration, which is not opened yet."""
    if config.database_url is None:
        return SqliteDatabase(config.database_file)
    # Another package, which the embedded database does not need.
    from batch_svc.store.postgres import PostgresDatabase

    return PostgresDatabase(config.database_url)
