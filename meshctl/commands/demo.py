"""`make demo`: a disaggregated mesh, a conversation of two turns, its trace with the handoff.

Only the engine is simulated: processes, sockets, the OpenAI SDK, the registry and the OTLP receiver
are real. The last line is one JSON object. Exit status: 1 if a part of it is missing or wrong,
128 + n after signal n. The demo leaves no files.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import grpc
import httpx
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from common.runtime.free_ports import free_ports
from common.runtime.telemetry import STABLE_NAME
from meshctl.process.child import with_parent_guard
from meshctl.usage import Command

ROOT = Path(__file__).resolve().parents[2]
TURNS_EXPECTED = 2
# Normally one or two seconds; the limit is for a busy machine.
CONSUL_READY_TIMEOUT_S = 40.0
CONSUL_STOP_TIMEOUT_S = 10.0
READY_TIMEOUT_S = 90
MESH_TIMEOUT_S = 150.0
# Longer than the drain limits of all services.
MESH_STOP_TIMEOUT_S = 60.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span, with the service and the stable name of its process."""

    service: str
    span: trace_pb2.Span
    stable_name: str = ""

    def attribute(self, name: str) -> str:
        """Returns an attribute as text; "" if absent."""
        for attribute in self.span.attributes:
            if attribute.key == name:
                kind = attribute.value.WhichOneof("value")
                return str(getattr(attribute.value, kind)) if kind is not None else ""
        return ""

    @property
    def span_id(self) -> str:
        """16 hex digits."""
        return self.span.span_id.hex()


@dataclass(slots=True)
class SpanReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP gRPC receiver that stores all spans."""

    received: list[ReceivedSpan] = field(default_factory=list)

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            service, name = names.get("service.name", "?"), names.get(STABLE_NAME, "")
            for scope in resource.scope_spans:
                self.received += [ReceivedSpan(service, span, name) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def run_span_receiver() -> Iterator[tuple[SpanReceiver, str]]:
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    servicer = SpanReceiver()
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(servicer, server)  # type: ignore[no-untyped-call]  # generated without types
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"http://127.0.0.1:{port}"
    finally:
        server.stop(1.0).wait()


@contextmanager
def consul_agent(folder: Path) -> Iterator[str]:
    """Yield the URL of a new Consul dev agent on free ports. Raises RuntimeError if it fails."""
    binary = shutil.which("consul") or str(ROOT / ".tools/bin/consul")
    if not Path(binary).exists():
        download = [ROOT / "deploy/consul_get.sh", ROOT / ".tools"]
        fetched = subprocess.run(download, capture_output=True, text=True, check=False)
        if fetched.returncode != 0:
            reason = fetched.stderr.strip()[-300:]
            raise RuntimeError(f"no consul on PATH, and deploy/consul_get.sh failed: {reason}")
    names = ("http", "dns", "grpc", "server", "serf-lan", "serf-wan")
    first = free_ports(len(names))
    flags = [f"-{name}-port={first + offset}" for offset, name in enumerate(names)]
    url = f"http://127.0.0.1:{first + names.index('http')}"
    path = folder / "consul.log"
    with path.open("wb") as log:
        command = [binary, "agent", "-dev", "-bind=127.0.0.1", "-log-level=warn", *flags]
        agent = subprocess.Popen(with_parent_guard(command), stdout=log, stderr=log)
    try:
        if not _wait_for_leader(url, agent):
            raise RuntimeError(f"the Consul agent did not start: {path.read_text()[-500:]}")
        yield url
    finally:
        _stop(agent, signal.SIGINT, CONSUL_STOP_TIMEOUT_S)


def _wait_for_leader(url: str, agent: subprocess.Popen[bytes]) -> bool:
    """Waits until the agent has a leader; before that it rejects registrations."""
    deadline = time.monotonic() + CONSUL_READY_TIMEOUT_S
    while time.monotonic() < deadline and agent.poll() is None:
        with suppress(httpx.HTTPError):
            leader = httpx.get(f"{url}/v1/status/leader", trust_env=False, timeout=1.0)
            if leader.text.strip('"\n '):
                return True
        time.sleep(0.05)
    return False


class _Interrupted(Exception):
    """A signal arrived; the argument is its number."""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise _Interrupted in the body on a signal; ignore signals during and after the clean-up.

    Signals stay ignored, so the process must exit afterwards.
    """
    # Under `nohup` the process outlives its terminal.
    numbers = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def ignore() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    def on_signal(number: int, _frame: object) -> None:
        ignore()
        raise _Interrupted(number)

    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        ignore()


@click.command("demo", cls=Command, options_metavar="[FLAGS]")
@click.option(
    "--registry",
    type=click.Choice(["file", "consul"]),
    default="file",
    help="Service discovery; consul starts its own agent, downloaded if necessary.",
)
@click.pass_obj
def command(environ: Mapping[str, str], registry: str) -> int:
    """Runs a disaggregated mesh, two requests with a common prefix, and shows their trace.

    The last line is one JSON object. It needs the packages of `make setup`.
    """
    return demo(registry, environ)


def demo(registry: str, environ: Mapping[str, str]) -> int:
    with tempfile.TemporaryDirectory(prefix="kvmesh-demo-") as name:
        try:
            return _demo(registry, environ, Path(name))
        except _Interrupted as error:
            number: int = error.args[0]
            print(f"demo: ended by {signal.Signals(number).name}", file=sys.stderr)
            return 128 + number


def _demo(registry: str, environ: Mapping[str, str], folder: Path) -> int:
    with ExitStack() as stack, _interruptible():
        spans, endpoint = stack.enter_context(run_span_receiver())
        env = {
            **environ,
            "PYTHONPATH": f"{ROOT}/protos{os.pathsep}{ROOT}",
            "KVMESH_OTLP_ENDPOINT": endpoint,
            "KVMESH_TRACE_SAMPLE_RATIO": "1.0",
            "KVMESH_REGISTRY": registry,
            "KVMESH_REGISTRY_PATH": str(folder / "registry"),
        }
        if registry == "consul":
            try:
                env["KVMESH_CONSUL_URL"] = stack.enter_context(consul_agent(folder))
            except RuntimeError as error:
                print(f"no Consul: {error}", file=sys.stderr)
                return _report([], [])
            print(f"consul at {env['KVMESH_CONSUL_URL']}")
        turns_path = folder / "turns.json"
        command = [
            *(sys.executable, "-m", "meshctl", "up", "--prefill", "1", "--decode", "2"),
            *("--indexers", "1", "--http-port", "0", "--log-dir", str(folder / "logs")),
            *("--ready-s", str(READY_TIMEOUT_S), "--once"),
            *("--then", sys.executable, "-m", "meshctl.commands.demo_client", str(turns_path)),
        ]
        status = _run(command, env)
        turns = json.loads(turns_path.read_text()) if turns_path.exists() else []
        if status != 0:
            for log in sorted(folder.glob("logs/*.log")):
                print(f"--- {log.name}\n{log.read_text()[-2000:]}")
        return _report(turns, spans.received) or status


def _run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs a mesh and returns its exit status; the mesh is stopped on every exit path."""
    mesh = subprocess.Popen(with_parent_guard(command), env=env, cwd=ROOT)
    try:
        return mesh.wait(MESH_TIMEOUT_S)
    finally:
        _stop(mesh, signal.SIGTERM, MESH_STOP_TIMEOUT_S)


def _stop(process: subprocess.Popen[bytes], number: int, timeout_s: float) -> None:
    process.send_signal(number)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# Any: turns as JSON.
def _report(turns: list[dict[str, Any]], received: list[ReceivedSpan]) -> int:
    """Prints the trace of the last turn and the JSON line; 1 if something is missing."""
    last_request_id = turns[-1]["request_id"] if turns else ""
    roots = [r for r in received if r.span.name == "http-request"]
    root = next((r for r in roots if r.attribute("request_id") == last_request_id), None)
    spans = [] if root is None else [r for r in received if r.span.trace_id == root.span.trace_id]
    generates = [r for r in spans if r.span.name == "engine.generate"]
    prefill = next((r for r in generates if r.attribute("disagg_role") == "prefill"), None)
    decode = next((r for r in generates if r.attribute("disagg_role") == "decode"), None)
    linked_span_id = (
        decode.span.links[0].span_id.hex() if decode is not None and decode.span.links else ""
    )
    if root is not None:
        print(f"\ntrace {root.span.trace_id.hex()} of the second turn:")
        _print_tree(root, spans, depth=0)
    if decode is not None and prefill is not None and linked_span_id == prefill.span_id:
        print(
            f"decode's engine.generate {decode.span_id} is linked to prefill's engine.generate "
            f"{linked_span_id}"
        )
    summary = {
        "answers": sum(1 for turn in turns if turn["text"]),
        "kv_hit_tokens": turns[-1]["cached_tokens"] if turns else 0,
        "decode_span": decode.span_id if decode is not None else "",
        "linked_span": linked_span_id,
        "prefill_span": prefill.span_id if prefill is not None else "",
    }
    is_complete = (
        summary["answers"] == TURNS_EXPECTED
        and all(summary.values())
        and linked_span_id == summary["prefill_span"]
    )
    print(json.dumps(summary), flush=True)
    return 0 if is_complete else 1


def _print_tree(received: ReceivedSpan, spans: list[ReceivedSpan], depth: int) -> None:
    span = received.span
    ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
    notes = [
        received.attribute(n) for n in ("disagg_role", "finish_reason") if received.attribute(n)
    ]
    notes += [f"linked to {link.span_id.hex()}" for link in span.links]
    print(f"  {'   ' * depth}{received.service:9s} {span.name}  {received.span_id}  {ms:.1f} ms  "
          + ", ".join(notes))  # fmt: skip
    children = [r for r in spans if r.span.parent_span_id == span.span_id]
    for child in sorted(children, key=lambda r: r.span.start_time_unix_nano):
        _print_tree(child, spans, depth + 1)
