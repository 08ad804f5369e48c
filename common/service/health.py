"""Health status over gRPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.errors import Conflict
from common.rpc import channel as rpc
from kvmesh.member.v1 import member_pb2

MEMBER_SERVICE = member_pb2.DESCRIPTOR.services_by_name["MemberService"].full_name
_STATUS_SERVING = health_pb2.HealthCheckResponse.SERVING
_STATUS_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class ThreadedHealthServer:
    """gRPC health on a port of its own, served by a thread that a busy event loop cannot delay.

    Consul's checks use it: their timeout is below the longest stall of a loaded event loop, and
    they cannot send a token, so this port requires none. It reports SERVING or NOT_SERVING only;
    peers detect a stalled event loop by the heartbeats of their streams.

    `port` is the bound port. Raises Conflict if the port is in use.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(2, thread_name_prefix="health"),
            options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)],
        )
        # Non-blocking: a Watch does not occupy one of the two threads.
        self._servicer = health.HealthServicer(experimental_non_blocking=True)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        self.set("", False)
        rpc.check_bindable(host, port, "health_port")
        address = rpc.join_address(host, port)
        try:
            self.port = self._server.add_insecure_port(address)
        except RuntimeError as error:  # Taken after the check.
            raise Conflict(f"cannot bind {address}: {error}", field="health_port") from error
        self.address = rpc.join_address(host, self.port)

    def start(self) -> None:
        """Starts to serve, with NOT_SERVING."""
        self._server.start()

    def set(self, service: str, serving: bool) -> None:
        """Sets the status of one service; "" is the process."""
        self._servicer.set(service, _STATUS_SERVING if serving else _STATUS_NOT_SERVING)

    def drain(self) -> None:
        """Sets NOT_SERVING permanently."""
        self._servicer.enter_graceful_shutdown()

    def stop(self, timeout_s: float) -> None:
        self._server.stop(None).wait(timeout_s)


class HealthReporter:
    """The health status of the process and its services, for both health servers.

    A service is SERVING while the process is READY and the service is not set to False. Nothing is
    SERVING before READY and after the drain has begun. The process ("") is SERVING only while it is
    routable too. MemberService has the status of the process without that: by it the registry
    decides whether peers see the process, and before they do it cannot become routable.
    """

    def __init__(self, threaded_health: ThreadedHealthServer | None = None) -> None:
        self.servicer = health.aio.HealthServicer()
        self.threaded_health = threaded_health
        self._requested_status = {"": True}
        self._is_enabled = False
        self._is_routable = True

    @property
    def port(self) -> int | None:
        """The port of the threaded health server; None without one."""
        return None if self.threaded_health is None else self.threaded_health.port

    async def set(self, service: str, serving: bool) -> None:
        """Sets one service (full name), or "" for the process."""
        self._requested_status[service] = serving
        await self._publish_status(service)

    def await_routable(self) -> None:
        """Makes the process NOT_SERVING until `set_routable`. For the start of a member."""
        self._is_routable = False

    async def set_routable(self, is_routable: bool) -> None:
        """Sets whether the peers of the process send it work."""
        self._is_routable = is_routable
        await self._publish_status("")

    async def set_enabled(self, is_enabled: bool) -> None:
        """Sets READY or not. For the lifecycle."""
        self._is_enabled = is_enabled
        for service in tuple(self._requested_status):
            await self._publish_status(service)

    async def drain(self) -> None:
        """Sets NOT_SERVING permanently. For the lifecycle."""
        self._is_enabled = False
        await self.servicer.enter_graceful_shutdown()
        if self.threaded_health is not None:
            self.threaded_health.drain()

    async def _publish_status(self, service: str) -> None:
        serving = self._is_enabled and self._requested_status[service]
        if service:
            await self._publish(service, serving)
        else:
            await self._publish(MEMBER_SERVICE, serving)
            await self._publish(service, serving and self._is_routable)

    async def _publish(self, service: str, serving: bool) -> None:
        await self.servicer.set(service, _STATUS_SERVING if serving else _STATUS_NOT_SERVING)
        if self.threaded_health is not None:
            self.threaded_health.set(service, serving)
