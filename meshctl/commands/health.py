"""`meshctl health ADDRESS`: the health of a gRPC port; for container health checks.

A container engine runs it every few seconds, so it imports no other part of the project.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str]) -> int:
    """Runs the command. Exits 0 for --help, 2 with a message for a bad argument."""
    parser = _Parser(
        prog="meshctl health", description="request the health of a gRPC port", allow_abbrev=False
    )
    parser.add_argument("address", type=_address, metavar="HOST:PORT")
    parser.add_argument("--service", default="", metavar="NAME", help="one service of the port")
    args = parser.parse_args(argv)
    return health(args.address, args.service)


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be HOST:PORT")
    return text


def health(address: str, service: str = "") -> int:
    """Returns 0 if the port reports SERVING, else 1. Prints a line, on standard error if not
    SERVING."""
    # Connect directly, without a proxy from the environment.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its methods are not typed
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            sys.stderr.write(f"{address}: {_error_text(error, service)}\n")
            return 1
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        sys.stderr.write(f"{address}: {name}\n")
        return 1
    sys.stdout.write(f"{address}: {name}\n")
    return 0


# Any: the error is both an RpcError and a Call, which grpc's types do not express.
def _error_text(error: Any, service: str) -> str:
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return f"NOT_FOUND: no service {service!r} here"
    return f"{error.code().name}: {error.details()}"
