"""Sends canaries to each model at intervals, and keeps their results.

A canary is a request of the frontend itself, with one token of output, on the path of a client's
request: prompt, router, booking, worker, token. It counts for no tenant, and in no metric, record
or limit of requests of clients. A request of a client that has just succeeded replaces it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import structlog

from common.errors import MeshError
from common.registry.instances import Instance
from common.runtime.tasks import TaskGroup
from frontend_svc.canaries.request import make_canary
from frontend_svc.canaries.run import CanaryFailure, OpenGateway, Stage, run_canary
from frontend_svc.config import FrontendConfig
from frontend_svc.metrics.families import CanaryMetrics
from frontend_svc.models.catalog import Engine, ModelCatalog
from frontend_svc.models.model_watch import Table
from frontend_svc.models.routable import has_pair, missing_role
from frontend_svc.request.ports import WorkerPort
from frontend_svc.request.types import Success

# Interval of checks for new models.
POLL_S = 0.5
# Least and greatest factor of an interval: the canaries of many frontends do not coincide.
JITTER = (0.75, 1.25)
# The first canary of a model is sent within this part of the interval.
FIRST_WITHIN = 0.25

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """The newest result of a model."""

    failure: CanaryFailure | None

    succeeded_at: float | None
    """Loop time of the last success, seconds. None: there was none."""


class CanaryMonitor:
    """The canaries of a frontend process.

    - take_success: returns the greatest success of a model's requests since the call before.
    - metrics: count the canaries.
    """

    def __init__(
        self,
        config: FrontendConfig,
        models: ModelCatalog,
        open_gateway: OpenGateway,
        workers: WorkerPort,
        take_success: Callable[[str], Success | None],
        metrics: CanaryMetrics,
        rng: Random,
    ) -> None:
        self._config = config
        self._models = models
        self._open_gateway = open_gateway
        self._workers = workers
        self._take_success = take_success
        self._metrics = metrics
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        self._results: dict[str, CanaryResult] = {}

    @property
    def results(self) -> Mapping[str, CanaryResult]:
        """The newest result of each served model that has one."""
        names, results = self._models.names(), list(self._results.items())
        return {name: result for name, result in results if name in names}

    def age_s(self, result: CanaryResult) -> float | None:
        """Returns the seconds since the last success of a model; None if there was none."""
        return None if result.succeeded_at is None else self._loop.time() - result.succeeded_at

    async def run(self) -> None:
        """Sends canaries until it is cancelled."""
        watched: dict[str, asyncio.Task[None]] = {}
        async with TaskGroup() as tasks:
            while True:
                watched = {name: task for name, task in watched.items() if not task.done()}
                for _, engine in self._models.served():
                    if engine.name not in watched:
                        watched[engine.name] = tasks.create_task(self._watch(engine.name))
                await asyncio.sleep(POLL_S)

    async def _watch(self, name: str) -> None:
        """Sends the canaries of a model until it is not served."""
        interval_s = self._config.canary_interval_s
        await asyncio.sleep(interval_s * self._rng.uniform(0.0, FIRST_WITHIN))
        while found := next((item for item in self._models.served() if item[1].name == name), None):
            self._record(name, await self._check(*found))
            await asyncio.sleep(interval_s * self._rng.uniform(*JITTER))
        self._results.pop(name, None)

    async def _check(self, table: Table, engine: Engine) -> CanaryFailure | None:
        """Returns why a model is not served. Sends no canary if a request of a client has shown
        that it is, or if it lacks workers."""
        workers = self._models.workers(engine.name)
        if missing := missing_role(workers):
            return CanaryFailure(Stage.ROUTE, missing)
        if self._has_success(table, engine, workers):
            return None
        began_at = self._loop.time()
        failure = await self._send(table, engine, is_split=has_pair(workers))
        if failure is None:
            self._metrics.durations(engine.name).observe(self._loop.time() - began_at)
        elif self._has_success(table, engine, workers):
            return None
        return failure

    def _has_success(self, table: Table, engine: Engine, workers: tuple[Instance, ...]) -> bool:
        """Returns whether a request of a client was served as a canary is since the call before:
        with tokens, and by a pair if the model has one."""
        success = self._take_success(engine.name)
        if success is None or table in ("embeddings", "scores"):
            return success is not None
        return success.has_tokens and (success.is_pair or not has_pair(workers))

    async def _send(self, table: Table, engine: Engine, *, is_split: bool) -> CanaryFailure | None:
        config, now = self._config, self._loop.time()
        try:
            plan, placement = await make_canary(table, engine, config, now, is_split=is_split)
        except MeshError as error:
            return CanaryFailure(Stage.PREPARE, error.message)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the tokenizer library is no Exception
            log.exception("canary_not_prepared", model=engine.name)
            return CanaryFailure(Stage.PREPARE, f"{type(error).__name__}: {error}")
        timeout_s = config.canary_timeout_s
        return await run_canary(self._open_gateway, self._workers, plan, placement, timeout_s)

    def _record(self, name: str, failure: CanaryFailure | None) -> None:
        before = self._results.get(name)
        if failure is None:
            self._results[name] = CanaryResult(None, self._loop.time())
            if before is not None and before.failure is not None:
                log.info("canary_recovered", model=name)
            return
        succeeded_at = None if before is None else before.succeeded_at
        self._results[name] = CanaryResult(failure, succeeded_at)
        self._metrics.failures(name, failure.stage).inc()
        if before is None or before.failure is None or before.failure.stage != failure.stage:
            log.warning("canary_failed", model=name, stage=failure.stage, reason=failure.reason)
