"""Everything behind the pages: the collector, the receiver of spans, and the state of the mesh."""

from __future__ import annotations

from common.access.key_file import KeyFile
from common.registry.registry import Registry
from common.rpc import channel as rpc
from common.runtime import env
from common.service.lifecycle import Lifecycle
from console_svc.actions.keys import can_revoke
from console_svc.actions.replay import Replays
from console_svc.collect.collector import Collector, Subscribers
from console_svc.config import ConsoleConfig
from console_svc.live_state import LiveState
from console_svc.traces.receiver import Receiver, ReceiverServer
from console_svc.traces.store import TraceStore


class Backend:
    """The parts of one console that need no browser."""

    def __init__(
        self,
        config: ConsoleConfig,
        registry: Registry,
        security: rpc.Security,
        keys: KeyFile | None,
    ) -> None:
        """keys: None: the console has no file of API keys."""
        self._config = config
        self.traces = TraceStore(config.traces_max, config.trace_spans_max, config.traces_mb << 20)
        self.receiver = Receiver(self.traces, config.otlp_key)
        self._receiver_server = ReceiverServer(self.receiver)
        subscribers = Subscribers()
        self.collector = Collector(
            config,
            registry,
            security,
            keys,
            can_revoke=can_revoke(config.api_keys),
            subscribers=subscribers,
        )
        self._replays = Replays(config.trace_files, env.environ())
        self.state = LiveState(
            config, self.collector, self.traces, self._replays, keys, subscribers
        )

    async def start(self, lifecycle: Lifecycle) -> int:
        """Begins to read the mesh and to receive spans; returns the port of the receiver. Raises
        Conflict."""
        config, collector = self._config, self.collector
        port = await self._receiver_server.start(config.otlp_host, config.otlp_port)
        lifecycle.spawn(collector.follow_registry(), name="registry watch")
        lifecycle.spawn(collector.publish_changes(), name="changes")
        lifecycle.spawn(collector.ask(), name="queries")
        lifecycle.spawn(collector.measure(), name="measurements")
        lifecycle.spawn(self._replays.load(), name="replay choices", essential=False)
        return port

    async def close(self) -> None:
        await self._receiver_server.stop(None)
        await self.collector.close()
