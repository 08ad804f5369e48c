"""The port of an endpoint picker for gateways: TLS, and what it does without a mesh."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import grpc.aio
import pytest

from common.errors import InvalidRequest
from common.registry.registry import MemoryRegistry
from epp_svc.app import EppApp
from epp_svc.config import EppConfig
from kvmesh.extproc.v1 import extproc_pb2 as pb
from tests.kit.apps import living
from tests.kit.certificates import Authority
from tests.kit.gateways import CHAT, METHOD
from tests.kit.waiting import WAIT_S

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()


async def status_of(channel: grpc.aio.Channel) -> int:
    """Returns the status with which the picker responds to a chat."""
    path = pb.HeaderValue(key=":path", raw_value=CHAT.encode())
    head = pb.HttpHeaders(headers=pb.HeaderMap(headers=[path]))
    call = channel.stream_stream(
        METHOD,
        request_serializer=pb.ProcessingRequest.SerializeToString,
        response_deserializer=pb.ProcessingResponse.FromString,
    )(timeout=WAIT_S)
    await call.write(pb.ProcessingRequest(request_headers=head))
    body = pb.HttpBody(body=BODY, end_of_stream=True)
    await call.write(pb.ProcessingRequest(request_body=body))
    answer = await call.read()
    assert isinstance(answer, pb.ProcessingResponse)
    return answer.immediate_response.status.code


async def test_without_a_mesh_a_picker_responds_with_a_404_for_its_models() -> None:
    config = EppConfig(registry="memory", ext_proc_port=0)
    async with (
        living(EppApp(config, registry=MemoryRegistry()), registered=False) as app,
        grpc.aio.insecure_channel(app.ext_proc_address) as channel,
    ):
        assert await status_of(channel) == 404


def tls_config(cert: Path, key: Path, ca: Path | None = None) -> EppConfig:
    """Returns the configuration of a picker with a certificate for gateways."""
    return EppConfig(
        registry="memory",
        ext_proc_port=0,
        ext_proc_tls_cert_path=cert,
        ext_proc_tls_key_path=key,
        ext_proc_tls_ca_path=ca,
    )


async def test_a_gateway_without_a_certificate_is_refused_where_one_is_required(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("picker")
    config = tls_config(cert, key, authority.ca)
    gateway_cert, gateway_key = authority.issue("gateway")
    ca = authority.ca.read_bytes()
    known = grpc.ssl_channel_credentials(ca, gateway_key.read_bytes(), gateway_cert.read_bytes())
    async with living(EppApp(config, registry=MemoryRegistry()), registered=False) as app:
        async with grpc.aio.secure_channel(app.ext_proc_address, known) as channel:
            assert await status_of(channel) == 404
        unknown = grpc.ssl_channel_credentials(ca)
        async with grpc.aio.secure_channel(app.ext_proc_address, unknown) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await status_of(channel)


async def test_a_certificate_that_cannot_be_read_is_named() -> None:
    missing = Path("/none.pem")
    config = tls_config(missing, missing)
    with pytest.raises(InvalidRequest, match=r"cannot read /none\.pem") as caught:
        async with living(EppApp(config, registry=MemoryRegistry()), registered=False):
            pass
    assert caught.value.field == "ext_proc_tls_cert_path"


async def test_a_renewed_certificate_is_used_for_new_connections_without_a_restart(
    tmp_path: Path,
) -> None:
    authority, next_authority = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    cert, key = authority.issue("picker")
    config = tls_config(cert, key)

    def trusting(one: Authority, app: EppApp) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(one.ca.read_bytes())
        # A channel of its own, not that of the same address before.
        options = [("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.secure_channel(app.ext_proc_address, credentials, options=options)

    async with (
        living(EppApp(config, registry=MemoryRegistry()), registered=False) as app,
        trusting(authority, app) as before,
    ):
        assert await status_of(before) == 404
        for old, new in zip((cert, key), next_authority.issue("picker"), strict=True):
            old.write_bytes(new.read_bytes())
        async with trusting(next_authority, app) as after:
            assert await status_of(after) == 404
        assert await status_of(before) == 404, "an open connection stays"
        async with trusting(authority, app) as unknown:
            with pytest.raises(grpc.aio.AioRpcError):
                await status_of(unknown)
