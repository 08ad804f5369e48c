"""TLS of all ports, roles bound to certificates, and the metrics listener, in a running mesh."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import openai
import pytest
from websockets.asyncio.client import connect

from common import errors
from common.rpc import channel as rpc
from common.rpc.stream import open_stream
from common.runtime.certificates import CertificateFiles
from common.runtime.member_key import MemberKey, MemberKeys
from common.service import socket_server
from frontend_svc.edge import server
from frontend_svc.edge.asgi import Receive, Scope, Send
from frontend_svc.edge.sockets import listen
from kvmesh.indexer.v1 import indexer_pb2
from kvmesh.router.v1 import router_pb2, router_pb2_grpc
from tests.kit.certificates import Authority
from tests.kit.processes import Mesh, Service
from tests.kit.waiting import until, wait_for

pytestmark = pytest.mark.slow

DOMAIN = "mesh.test"
ROLES = ("frontend", "router", "indexer", "worker", "operator")
KEY = "metrics-key-of-the-test"


@dataclass(frozen=True, slots=True)
class Bed:
    """A mesh with certificates. authority: of all of them; http: of the HTTP ports."""

    mesh: Mesh
    authority: Authority

    @property
    def public(self) -> Service:
        """The frontend with a metrics listener."""
        return self.mesh.running("frontend")[1]

    def trust(self) -> ssl.SSLContext:
        """The context of an HTTP client."""
        return ssl.create_default_context(cafile=self.authority.ca)

    def get(self, url: str, key: str | None = None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return httpx.get(url, headers=headers, verify=self.trust(), trust_env=False, timeout=30.0)

    def serial(self, address: str, role: str | None = None) -> str:
        """The serial number of the certificate of a port. role: of the client, or None."""
        host, _, port = address.rpartition(":")
        context = self.trust()
        context.check_hostname = False
        if role is not None:
            context.load_cert_chain(*pair(self.authority, role))
        with (
            socket.create_connection((host, int(port)), 10.0) as plain,
            context.wrap_socket(plain) as secured,
        ):
            certificate = secured.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def pair(authority: Authority, name: str) -> tuple[Path, Path]:
    return authority.folder / f"{name}.pem", authority.folder / f"{name}.key"


def flags(authority: Authority, role: str) -> list[str]:
    cert, key = pair(authority, role)
    return [
        f"--tls-cert-path={cert}",
        f"--tls-key-path={key}",
        f"--tls-ca-path={authority.ca}",
        f"--tls-role-domain={DOMAIN}",
    ]


def security(authority: Authority, role: str, *, ca: Path | None = None) -> rpc.Security:
    cert, key = pair(authority, role)
    paths = {"tls_cert_path": cert, "tls_key_path": key, "tls_ca_path": ca or authority.ca}
    return rpc.Security(files=CertificateFiles(paths), role_domain=DOMAIN)


def issue_role(authority: Authority, role: str, *, days: int = 2) -> None:
    authority.issue(role, [f"DNS:{role}.{DOMAIN}", "IP:127.0.0.1"], days=days)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    authority = Authority(tmp_path_factory.mktemp("ca"))
    for role in ROLES:
        issue_role(authority, role)
    http_cert, http_key = authority.issue("http")
    key_file = authority.folder / "metrics_key"
    key_file.write_text(KEY + "\n")
    metrics = ["--metrics-port=0", f"--metrics-key-file={key_file}"]
    with Mesh(
        tmp_path_factory.mktemp("mesh"),
        workers=2,
        routers=2,
        indexers=1,
        frontends=0,
        worker_flags=flags(authority, "worker"),
        router_flags=[*flags(authority, "router"), *metrics],
        indexer_flags=flags(authority, "indexer"),
    ) as mesh:
        bed = Bed(mesh, authority)
        mesh.http = httpx.Client(timeout=30.0, trust_env=False, verify=bed.trust())
        https = [f"--http-tls-cert-path={http_cert}", f"--http-tls-key-path={http_key}"]
        first = mesh.spawn("frontend", *flags(authority, "frontend"), *https)
        first.wait_ready()
        wait_for(mesh.is_complete, "the frontend uses the routers and the workers")
        mesh.spawn("frontend", *flags(authority, "frontend"), *https, *metrics).wait_ready()
        url = bed.public.addresses["http"]
        wait_for(lambda: bed.get(f"{url}/ready").json()["ready"], "the frontend is ready")
        yield bed


@pytest.mark.parametrize("secured_by", ["token", "roles", "token and roles"])
def test_streams_of_a_secured_mesh_carry_requests_and_kv_events(
    secured_by: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    role_flags: dict[str, list[str]] = {}
    for role in ROLES:
        issue_role(authority, role)
        role_flags[role] = ["--mesh-token=a token of the mesh"] if "token" in secured_by else []
        role_flags[role] += flags(authority, role) if "roles" in secured_by else []
    with Mesh(
        tmp_path,
        workers=0,
        prefill=1,
        decode=1,
        routers=2,
        indexers=2,
        worker_flags=role_flags["worker"],
        # Without predictions, a router has the blocks of a prompt from KV events only.
        router_flags=[*role_flags["router"], "--router-predicted-ttl-secs=0"],
        indexer_flags=role_flags["indexer"],
        frontend_flags=role_flags["frontend"],
    ) as mesh:
        prompt = list(range(100, 1124))

        def is_prompt_cached() -> bool:
            name = f"again-{time.monotonic_ns()}"
            mesh.post_completion(name, prompt).raise_for_status()
            return bool(mesh.request_line(name)["predicted_cached_tokens"])

        wait_for(is_prompt_cached, "the router has the KV events of the worker")
        assert [service.wait_routable()["given_up"] for service in mesh.services] == [[]] * 7


def test_a_mesh_with_roles_serves_an_openai_client_over_tls(bed: Bed) -> None:
    assert bed.mesh.url.startswith("https://")
    http = openai.DefaultHttpxClient(verify=bed.trust(), trust_env=False)
    url = f"{bed.mesh.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", http_client=http) as client:
        prompt = [300 + at for at in range(200)]
        cached = []
        for _ in range(2):
            response = client.completions.create(model="sim", prompt=prompt, max_tokens=4)
            assert response.usage is not None
            assert response.usage.completion_tokens == 4
            details = response.usage.prompt_tokens_details
            cached.append(details.cached_tokens if details else 0)
    assert cached[1]
    assert "needs a certificate" not in "".join(s.log_path.read_text() for s in bed.mesh.services)


async def test_a_websocket_is_opened_over_tls(bed: Bed) -> None:
    url = f"{bed.mesh.url}/v1/responses".replace("https", "wss", 1)
    event = {"type": "response.create", "model": "sim", "input": "Hi", "max_output_tokens": 4}
    async with asyncio.timeout(30.0), connect(url, ssl=bed.trust(), proxy=None) as client:
        await client.send(json.dumps(event))
        last = json.loads(await client.recv())
        # Ends: the last event, or the time limit.
        while not last["type"].startswith(("response.completed", "response.incomplete")):
            last = json.loads(await client.recv())
        assert last["response"]["usage"]["output_tokens"] == 4
        await client.send(b"binary")
        assert json.loads(await client.recv())["status"] == 400
    assert client.close_code == 1000


def test_a_stream_continues_while_all_certificates_are_replaced(bed: Bed) -> None:
    router, frontend = bed.mesh.router.address, bed.mesh.url.removeprefix("https://")
    before = bed.serial(router, "operator"), bed.serial(frontend)
    body = {"model": "sim", "prompt": "hi", "max_tokens": 256, "ignore_eos": True, "stream": True}
    url = f"{bed.mesh.url}/v1/completions"
    with (
        httpx.Client(verify=bed.trust(), trust_env=False, timeout=30.0) as client,
        client.stream("POST", url, json=body, headers={"x-request-id": "long"}) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        for role in ROLES:
            issue_role(bed.authority, role)
        bed.authority.issue("http")
        after = bed.serial(router, "operator"), bed.serial(frontend)
        assert not bed.mesh.request_lines("long"), "the request still runs"
        rest = list(lines)
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert rest[-2] == "data: [DONE]"
    assert not any('"error"' in line for line in rest)
    # New streams between the processes use the new files.
    assert bed.mesh.post_completion("after").status_code == 200


def test_files_that_do_not_fit_leave_the_certificate_in_use(bed: Bed) -> None:
    frontend = bed.mesh.url.removeprefix("https://")
    before = bed.serial(frontend)
    cert, key = pair(bed.authority, "http")
    kept = key.read_bytes()
    key.write_bytes(pair(bed.authority, "operator")[1].read_bytes())
    assert bed.serial(frontend) == before
    wait_for(lambda: bed.mesh.frontend.events("certificates_rejected"), "the file is refused")
    key.write_bytes(kept)
    bed.authority.issue("http")
    assert bed.serial(frontend) != before
    assert cert.exists()


async def _session(address: str, client: rpc.Security) -> None:
    """Opens a session with a router, and reads."""
    method = "/kvmesh.router.v1.RouterService/Session"
    async with (
        asyncio.timeout(20.0),
        open_stream(address, method, router_pb2.SessionResponse, client) as stream,
    ):
        try:
            await stream.read()
        finally:
            # The loop of the test ends before the connection is closed in order.
            stream._transport.abort()


async def test_a_worker_certificate_is_refused_as_a_frontend_and_as_a_router(bed: Bed) -> None:
    worker = security(bed.authority, "worker")
    for kind in ("grpc", "streams"):
        with pytest.raises(errors.PermissionDenied, match=f"the name frontend.{DOMAIN}"):
            await _session(bed.mesh.router.addresses[kind], worker)
        with pytest.raises(errors.Unavailable):
            await _session(bed.mesh.workers[0].addresses[kind], security(bed.authority, "frontend"))


@pytest.mark.parametrize("has_key", [True, False])
async def test_a_worker_certificate_is_refused_as_another_worker(bed: Bed, has_key: bool) -> None:
    """Without a token, the certificate is that of every worker, and the key that of one."""
    (indexer,) = bed.mesh.running("indexer")
    members = MemberKeys(MemberKey() if has_key else None, is_required=True)
    hello = indexer_pb2.PublishHello(
        worker_id=bed.mesh.workers[0].instance_id,
        partition=indexer_pb2.Partition(model="sim", block_size=16, hash_scheme=1),
    )
    async with (
        asyncio.timeout(20.0),
        open_stream(
            indexer.addresses["streams"],
            "/kvmesh.indexer.v1.IndexerService/Publish",
            indexer_pb2.PublishResponse,
            replace(security(bed.authority, "worker"), members=members),
        ) as stream,
    ):
        await stream.write(indexer_pb2.PublishRequest(hello=hello))
        with pytest.raises(errors.PermissionDenied, match=r"the caller (is|has not)"):
            await stream.read()
        # The loop of the test ends before the connection is closed in order.
        stream._transport.abort()


async def test_an_operator_may_call_what_no_service_calls(bed: Bed) -> None:
    for role, refused in (("operator", False), ("frontend", True)):
        client = security(bed.authority, role)
        address = bed.mesh.router.address
        async with rpc.channel(address, role="router", security=client) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            request = router_pb2.DumpRequest()
            if not refused:
                await rpc.unary(stub.Dump, request, timeout_s=20.0)
                continue
            with pytest.raises(errors.PermissionDenied, match=f"the name operator.{DOMAIN}"):
                await rpc.unary(stub.Dump, request, timeout_s=20.0)


async def test_an_expired_and_a_foreign_certificate_are_refused(bed: Bed, tmp_path: Path) -> None:
    bed.authority.issue("expired", [f"DNS:frontend.{DOMAIN}"], days=-1)
    foreign = Authority(tmp_path / "foreign")
    issue_role(foreign, "frontend")
    for client in (
        security(bed.authority, "expired"),
        security(foreign, "frontend", ca=bed.authority.ca),
        rpc.PLAINTEXT,
    ):
        for kind in ("grpc", "streams"):
            with pytest.raises(errors.Unavailable):
                await _session(bed.mesh.router.addresses[kind], client)


def test_the_metrics_listener_has_a_key_and_the_public_port_no_metrics(bed: Bed) -> None:
    for service in (bed.public, bed.mesh.router):
        url = f"https://{service.addresses['metrics']}/metrics"
        assert bed.get(url).status_code == 401
        assert bed.get(url, "wrong").status_code == 401
        response = bed.get(url, KEY)
        assert response.status_code == 200
        assert "process_cpu_seconds_total" in response.text
    metrics = bed.public.addresses["metrics"]
    assert bed.get(f"https://{metrics}/health").status_code == 401
    assert bed.get(f"https://{metrics}/health", KEY).json()["instances"]
    assert bed.get(f"https://{metrics}/v1/models", KEY).status_code == 404
    public = bed.public.addresses["http"]
    for path in ("/metrics", "/health"):
        assert bed.get(f"{public}{path}", KEY).status_code == 404
    assert bed.get(f"{public}/live").status_code == 200


@pytest.mark.parametrize("port", ["http", "metrics"])
def test_a_plain_request_to_a_tls_port_gets_no_response(bed: Bed, port: str) -> None:
    address = bed.public.addresses[port].removeprefix("https://")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{address}/live", trust_env=False, timeout=20.0)
    assert bed.get(f"{bed.public.addresses['http']}/live").status_code == 200


async def test_a_client_that_does_not_finish_the_handshake_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def api(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise AssertionError("no request")

    monkeypatch.setattr(socket_server, "HANDSHAKE_TIMEOUT_S", 0.2)
    cert, key = Authority(tmp_path / "ca").issue("http")
    files = CertificateFiles({"http_tls_cert_path": cert, "http_tls_key_path": key})
    http = server.HttpServer(api, lambda: False, 1.0, 16, files)
    listen_socket = listen("127.0.0.1", 0)
    task = asyncio.create_task(http.serve([listen_socket]))
    try:
        async with asyncio.timeout(20.0):
            await until(lambda: getattr(http, "servers", ()), "uvicorn serves")
            reader, writer = await asyncio.open_connection(*listen_socket.getsockname())
            assert await reader.read() == b""
            writer.close()
    finally:
        http.should_exit = True
        await task


def test_a_frontend_with_a_metrics_listener_stops_without_an_error(bed: Bed) -> None:
    frontend = bed.public
    frontend.send(signal.SIGTERM)
    assert frontend.wait() == 0
    assert not frontend.events("task_failed")
    assert not frontend.events("tasks_stuck")
