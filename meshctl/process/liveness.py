"""Whether a ready service answers."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc import channel as rpc
from meshctl.process.child import ReadyLine

# With the interval of the checks: a process that a busy machine starves still answers in time.
TIMEOUT_S = 5.0
# Whether the process answers does not depend on its certificate.
_UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_UNVERIFIED.check_hostname = False
_UNVERIFIED.verify_mode = ssl.CERT_NONE


async def is_live(line: ReadyLine, *, security: rpc.Security) -> bool:
    """Returns whether the process answers, with any status: a frontend `/live`, others gRPC
    health."""
    if url := line.addresses.get("http"):
        return await _responds(url)
    address = line.addresses["grpc"]
    async with rpc.channel(address, role=line.name, security=security) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods are not typed
        try:
            await stub.Check(
                health_pb2.HealthCheckRequest(),
                timeout=TIMEOUT_S,
            )
        except grpc.aio.AioRpcError as error:
            return error.code() not in (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.UNAVAILABLE,
            )
    return True


async def _responds(url: str) -> bool:
    # Without an HTTP client: creating one takes more time than the request.
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            context = _UNVERIFIED if parts.scheme == "https" else None
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=context)
            try:
                writer.write(f"GET /live HTTP/1.0\r\nhost: {parts.netloc}\r\n\r\n".encode())
                return bool(await reader.read(1))
            finally:
                writer.close()
    except OSError:  # a TimeoutError too
        return False
