"""Two endpoint pickers between a gateway and stock servers (stand-ins with a prefix cache)."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.extproc.v1 import extproc_pb2 as pb
from tests.kit.caching_server import CachingServer
from tests.kit.gateways import CHAT, GatewayStream, pick
from tests.kit.model_server import MODEL
from tests.kit.picker_mesh import PickerMesh
from tests.kit.processes import Service
from tests.kit.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.slow

# A system prompt of some pages, and what differs.
LONG = " ".join(f"rule {number}: answer in words" for number in range(40))
OBJECTIVES = "--objectives=high=5,batch=-1"
# Of the second picker.
ALIASES = {
    "chat": {"variants": [{"model": MODEL, "weight": 1}, {"model": "absent", "weight": 0}]},
    "safe": {"variants": [{"model": "absent"}], "fallback": [MODEL]},
    "gone": {"variants": [{"model": "absent"}]},
}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[CachingServer]]:
    with CachingServer() as first, CachingServer() as second:
        yield [first, second]


@pytest.fixture(scope="module")
def mesh(
    servers: list[CachingServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PickerMesh]:
    folder = tmp_path_factory.mktemp("mesh")
    # A server with 400 booked tokens of prompts is busy.
    flags = ["--queue-threshold=0.2"]
    with PickerMesh(folder, [server.url for server in servers], router_flags=flags) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def picker(mesh: PickerMesh) -> Service:
    return mesh.add_picker("picker", OBJECTIVES, "--shed-after-s=0.1")


@pytest.fixture(scope="module")
def other(mesh: PickerMesh, servers: list[CachingServer], picker: Service) -> Service:
    """A picker that starts when the servers have a prompt."""
    served(servers[1], chat("first"))
    await_events(mesh, chat("second"), CHAT)
    return mesh.add_picker("other", f"--aliases={json.dumps(ALIASES)}", "--health-port=0")


def address(picker: Service) -> str:
    return picker.addresses["ext_proc"]


def chat(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": 4, **fields}


# Any: the fields of a log line.
def line_of(picker: Service, client_id: str) -> dict[str, Any]:
    """Waits for the log line of a request and returns it."""

    def find() -> list[dict[str, Any]]:
        lines = picker.events("pick")
        return [line for line in lines if line.get("client_request_id") == client_id]

    return wait_for(find, f"the line of {client_id} is in the log")[0]


def no_bookings(mesh: PickerMesh) -> None:
    wait_for(lambda: mesh.router.bookings() == 0, "all bookings are freed")


def await_events(mesh: PickerMesh, body: dict[str, Any], path: str) -> None:
    """Waits until the router has the events of a server that has served a body."""
    nvext = {"annotations": ["query_instance_id"], "extra_fields": ["kv_hit"]}

    def has_hit() -> bool:
        response = mesh.http.post(f"{mesh.url}{path}", json=body | {"nvext": nvext})
        return bool(response.json()["nvext"]["kv_hit"]["overlap_blocks"] >= 8)

    wait_for(has_hit, "the router has the events of the server")


def served(server: CachingServer, body: dict[str, Any], path: str = CHAT) -> None:
    """Sends a body to a server, past the pickers."""
    response = httpx.post(f"{server.url}{path}", json=body, timeout=WAIT_S)
    assert response.status_code == 200, response.text


def test_a_prompt_goes_to_the_server_that_has_it_also_by_a_picker_that_has_just_started(
    mesh: PickerMesh, servers: list[CachingServer], picker: Service, other: Service
) -> None:
    for at in (other, picker, other):
        found = pick(address(at), chat("second"))
        assert found.endpoints == [servers[1].address, servers[0].address]
        assert found.metadata == found.endpoints
        assert found.json == chat("second"), "the body is the client's"
    wait_for(lambda: len(other.events("pick")) == 2, "each request has a line")
    assert other.events("pick")[0]["predicted_cached_tokens"] > 100
    no_bookings(mesh)


def test_bodies_of_other_apis_go_by_the_prompt_of_their_translation(
    servers: list[CachingServer], picker: Service, other: Service
) -> None:
    user = {"role": "user", "content": "third"}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/messages": {"system": LONG, "messages": [user], "max_tokens": 4, "top_k": 3},
        "/v1/responses": {
            "instructions": LONG,
            "input": [user],
            "store": False,
            "truncation": "auto",
        },
    }
    for path, fields in bodies.items():
        body = {"model": MODEL, **fields}
        found = pick(address(picker), body, path=path, headers={"x-request-id": path})
        assert found.endpoints == [servers[1].address, servers[0].address]
        assert found.json == body, "the body is the client's"
        assert line_of(picker, path)["predicted_cached_tokens"] > 100
    continued = {"model": MODEL, "input": "x", "previous_response_id": "resp_1"}
    pick(address(picker), continued, path="/v1/responses", headers={"x-request-id": "continued"})
    assert line_of(picker, "continued")["unread"] == "STORED_CONVERSATION"


@pytest.mark.parametrize("prompt", [list(range(100, 260)), "the story of " + LONG[::-1]])
def test_completions_have_the_tokens_of_the_server(
    mesh: PickerMesh, servers: list[CachingServer], picker: Service, prompt: str | list[int]
) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    served(servers[0], body, "/v1/completions")
    await_events(mesh, body, "/v1/completions")
    found = pick(address(picker), body, path="/v1/completions")
    assert found.endpoints[0] == servers[0].address


def test_a_booking_lasts_until_the_response_the_reset_or_the_loss_of_the_gateway(
    mesh: PickerMesh, picker: Service
) -> None:
    with GatewayStream(address(picker)) as answered, GatewayStream(address(picker)) as reset:
        answered.pick(chat("a"), {"x-request-id": "answered"})
        reset.pick(chat("b"), {"x-request-id": "reset"})
        wait_for(lambda: mesh.router.bookings() == 2, "both are booked")
        answered.respond()
        wait_for(lambda: mesh.router.bookings() == 1, "a whole response frees its booking")
    no_bookings(mesh)
    with GatewayStream(address(picker)) as closed:
        closed.pick(chat("c"), {"x-request-id": "closed"})
        closed.close()
        no_bookings(mesh)
    outcomes = {"answered": "complete", "reset": "reset", "closed": "reset"}
    for client_id, outcome in outcomes.items():
        assert line_of(picker, client_id)["outcome"] == outcome


def test_a_subset_is_honoured_and_an_empty_one_is_a_503(
    mesh: PickerMesh, servers: list[CachingServer], picker: Service
) -> None:
    for server in servers:
        found = pick(address(picker), chat("x"), subset=[server.address, "10.9.9.9:1"])
        assert found.endpoints == [server.address]
    for subset in ([], ["10.9.9.9:1"]):
        found = pick(address(picker), chat("x"), subset=subset)
        assert found.status == 503
        assert "subset" in found.json["error"]["message"]
    no_bookings(mesh)


def test_bodies_that_the_mesh_cannot_read_reach_a_server_unchanged(
    mesh: PickerMesh, servers: list[CachingServer], picker: Service
) -> None:
    endpoints = {server.address for server in servers}
    unknown_field = chat("x") | {"some_engine_field": {"a": 1}, "n": 3}
    cases = {
        "invalid_json": (b"no json", CHAT),
        "": (json.dumps(unknown_field).encode(), CHAT),
        "invalid_type": (json.dumps({"model": MODEL, "messages": "none"}).encode(), CHAT),
        "NO_PROMPT": (json.dumps({"model": MODEL, "input": ["a"]}).encode(), "/v1/embeddings"),
    }
    for reason, (body, path) in cases.items():
        client_id = {"x-request-id": f"unread-{reason}"}
        found = pick(address(picker), body, path=path, headers=client_id)
        assert set(found.endpoints) == endpoints
        assert found.body == body
        line = line_of(picker, f"unread-{reason}")
        assert line.get("unread", "").lower() == reason.lower()
    with GatewayStream(address(picker)) as stream:  # A GET.
        head = pb.HeaderMap(headers=[pb.HeaderValue(key=":path", raw_value=b"/v1/models")])
        stream.send(request_headers=pb.HttpHeaders(headers=head, end_of_stream=True))
        answer = next(stream.answers)
        assert answer.request_headers.response.header_mutation.set_headers
    no_bookings(mesh)


def test_a_named_conversation_stays_where_its_prompts_are_unknown(
    mesh: PickerMesh, picker: Service
) -> None:
    body = {"model": MODEL, "input": ["a"]}
    for name in ("one", "two", "three"):
        headers = {"x-session-id": name}
        turns = [
            pick(address(picker), body, path="/v1/embeddings", headers=headers) for _ in range(6)
        ]
        assert len({turn.endpoints[0] for turn in turns}) == 1, name
    no_bookings(mesh)


def test_an_unknown_model_is_a_404_and_a_rewrite_names_another(
    mesh: PickerMesh, picker: Service
) -> None:
    found = pick(address(picker), chat("x", model="other"))
    assert (found.status, found.json["error"]["code"]) == (404, "model_not_found")
    rewrite = {"x-gateway-model-name-rewrite": MODEL}
    found = pick(address(picker), chat("x", model="other"), headers=rewrite)
    assert found.json == chat("x")
    assert found.status == 0
    no_bookings(mesh)


def test_an_alias_names_its_variant_or_its_fallback_to_the_server(
    mesh: PickerMesh, other: Service
) -> None:
    for alias in ("chat", "safe"):
        found = pick(address(other), chat("x", model=alias), headers={"x-request-id": alias})
        assert found.json == chat("x"), "the body has the model of the server"
        line = line_of(other, alias)
        assert (line["alias"], line["model"]) == (alias, MODEL)
    found = pick(address(other), chat("x", model="gone"))
    assert found.status == 503
    assert "'absent'" in found.json["error"]["message"]
    no_bookings(mesh)


def test_bodies_come_in_pieces_or_whole(picker: Service) -> None:
    body = chat(LONG * 40)
    found = pick(address(picker), body, pieces=7)
    assert found.json == body
    whole = pb.ProtocolConfiguration(
        request_body_mode=pb.BODY_SEND_MODE_BUFFERED,
        response_body_mode=pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED,
    )
    found = pick(address(picker), body, config=whole)
    assert found.endpoints
    assert found.body == b"", "the body of the client stays"
    streamed = pb.ProtocolConfiguration(request_body_mode=pb.BODY_SEND_MODE_STREAMED)
    found = pick(address(picker), body, config=streamed)
    assert found.status == 400
    assert "FULL_DUPLEX_STREAMED" in found.json["error"]["message"]


def test_a_full_mesh_sheds_by_priority_with_429(mesh: PickerMesh, picker: Service) -> None:
    with ExitStack() as stack:
        opened = [stack.enter_context(GatewayStream(address(picker))) for _ in range(3)]
        first, second, queued = opened
        endpoints = set()
        for number, stream in enumerate((first, second), 1):
            body = {"model": MODEL, "prompt": list(range(1000 * number, 1000 * number + 600))}
            endpoints.add(stream.pick(body, path="/v1/completions").endpoints[0])
        assert len(endpoints) == 2, "both servers are busy"
        batch = {"x-gateway-inference-objective": "batch"}
        shed = pick(address(picker), chat("shed"), headers=batch)
        assert shed.status == 429
        assert int(shed.headers["retry-after"]) >= 1
        with GatewayStream(address(picker)) as left:
            left.send_request(json.dumps(chat("left")).encode(), {"x-request-id": "left"})
            wait_for(lambda: picker.metric("kvmesh_epp_open_requests") >= 3, "it is queued")
        assert line_of(picker, "left")["outcome"] == "reset"
        high = {"x-gateway-inference-objective": "high"}
        high["x-gateway-inference-fairness-id"] = "tenant-a"
        queued.send_request(json.dumps(chat("queued")).encode(), high)
        first.respond()
        assert queued.read_pick().endpoints[0] in endpoints
        second.respond()
        queued.respond()
    no_bookings(mesh)
    label = 'kvmesh_epp_requests_total{outcome="shed"}'
    wait_for(lambda: picker.metric(label) == 1, "the shed request is counted")


def test_a_booking_moves_to_the_endpoint_that_has_served(mesh: PickerMesh, picker: Service) -> None:
    with GatewayStream(address(picker)) as stream:
        first, second = stream.pick(chat("moved")).endpoints
        stream.send(
            response_headers=pb.HttpHeaders(),
            metadata_context=_served(second),
        )
        assert next(stream.answers).HasField("response_headers")
        wait_for(lambda: mesh.router.bookings() == 1, "one server is booked")
        wait_for(lambda: picker.events("worker_circuit_opened"), f"{first} gets no more requests")
        (other,) = pick(address(picker), chat("moved")).endpoints
        assert other == second
        wait_for(lambda: picker.events("worker_circuit_closed"), "a probe has found it healthy")
    no_bookings(mesh)
    assert picker.metric("kvmesh_epp_moved_requests_total") == 1


def _served(endpoint: str) -> pb.Metadata:
    metadata = pb.Metadata()
    fields = metadata.filter_metadata["envoy.lb"].fields
    fields["x-gateway-destination-endpoint-served"].string_value = endpoint
    return metadata


def test_health_is_served_for_gateways_and_ends_with_a_drain(
    mesh: PickerMesh, other: Service
) -> None:
    with (
        grpc.insecure_channel(address(other)) as channel,
        grpc.insecure_channel(other.addresses["health"]) as own_port,
    ):
        stubs: list[Any] = [health_pb2_grpc.HealthStub(one) for one in (channel, own_port)]

        def is_serving(service: str) -> bool:
            request = health_pb2.HealthCheckRequest(service=service)
            found = {stub.Check(request, timeout=WAIT_S).status for stub in stubs}
            return found == {health_pb2.HealthCheckResponse.SERVING}

        for service in (
            *("", "liveness", "readiness", "inference-extension"),
            "envoy.service.ext_proc.v3.ExternalProcessor",
        ):
            wait_for(partial(is_serving, service), f"{service!r} is SERVING")
        with GatewayStream(address(other)) as stream:
            stream.pick(chat("x"))
            other.send(signal.SIGTERM)
            wait_for(lambda: not is_serving("readiness"), "it drains")
            stream.respond()
        assert other.wait() == 0, "an open stream is served to its end"
    no_bookings(mesh)
