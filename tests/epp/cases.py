"""Cases of the protocol through a real Envoy, each a function that raises if it fails."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Any, Final

import httpx

from tests.epp.envoy import MESSAGE_TIMEOUT_S, SUBSET_HEADER, UPSTREAM_HEADER, Envoy
from tests.epp.load import CHAT, chat_body
from tests.epp.servers import Server
from tests.kit.picker_mesh import PickerMesh
from tests.kit.waiting import WAIT_S, wait_for

# Any, here and below: JSON.
Json = dict[str, Any]


@dataclass(frozen=True)
class Bed:
    """What the cases run on."""

    envoy: Envoy
    mesh: PickerMesh
    servers: list[Server]
    http: httpx.Client
    model: str

    def body(self, text: str, max_tokens: int = 4, **fields: Any) -> Json:
        messages = [{"role": "user", "content": text}]
        return {**chat_body(self.model, messages, max_tokens), "stream": False, **fields}

    def post(
        self,
        text: str,
        listener: str = "picked",
        headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> httpx.Response:
        body = self.body(text, **fields)
        body.pop("stream_options")
        url = self.envoy.url(listener) + CHAT
        return self.http.post(url, json=body, headers=dict(headers or {}))

    def served_by(self, response: httpx.Response) -> str:
        """Returns the server of a response."""
        return str(response.headers[UPSTREAM_HEADER])

    def events(self) -> list[Json]:
        """Returns the log lines of all pickers."""
        pickers = [one for one in self.mesh.services if one.service_name == "epp"]
        return [line for picker in pickers for line in picker.events("pick")]

    def open_requests(self) -> float:
        """Returns the open streams of all pickers."""
        pickers = [one for one in self.mesh.services if one.service_name == "epp"]
        return sum(one.metric("kvmesh_epp_open_requests") for one in pickers)

    def send_raw(self, listener: str, pieces: Iterable[bytes]) -> tuple[int, str]:
        """Sends a chat in chunks of HTTP/1.1 as they are; returns the status and the response."""
        with socket.create_connection(self.envoy.address(listener), WAIT_S) as connection:
            connection.sendall(_HEAD)
            for piece in pieces:
                connection.sendall(piece)
            response = HTTPResponse(connection)
            response.begin()
            return response.status, response.read().decode()

    def line(self, client_id: str) -> Json:
        """Waits for the log line of a request and returns it."""

        def find() -> list[Json]:
            return [one for one in self.events() if one.get("client_request_id") == client_id]

        return wait_for(find, f"a picker has logged {client_id}")[0]

    def no_bookings(self) -> None:
        wait_for(lambda: self.mesh.router.bookings() == 0, "all bookings are freed")


_HEAD: Final = (
    f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    "transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
).encode()


def _chunks(bed: Bed, text: str) -> Sequence[bytes]:
    """Returns the body of a chat in two chunks, without the last one, which is empty."""
    raw = json.dumps(bed.body(text) | {"stream_options": None}).encode()
    half = len(raw) // 2
    return [b"%x\r\n%s\r\n" % (len(part), part) for part in (raw[:half], raw[half:])]


def the_pick_is_honoured(bed: Bed) -> None:
    for number in range(6):
        client_id = f"honoured-{number}"
        response = bed.post(f"pick {number}", headers={"x-request-id": client_id})
        assert response.status_code == 200, response.text
        assert bed.line(client_id)["endpoints"][0] == bed.served_by(response)
    bed.no_bookings()


def a_stream_passes_to_its_end(bed: Bed) -> None:
    body = chat_body(bed.model, [{"role": "user", "content": "stream"}], 40)
    url = bed.envoy.url("picked") + CHAT
    with bed.http.stream("POST", url, json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) >= 20
    bed.no_bookings()


def a_body_of_two_megabytes_arrives_whole(bed: Bed) -> None:
    response = bed.post("large", user="x" * (2 << 20))
    assert response.status_code == 200, response.text
    bed.no_bookings()


def a_body_in_chunks_arrives(bed: Bed) -> None:
    body = bed.body("chunks")
    body.pop("stream_options")
    raw = json.dumps(body).encode()

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(raw), 7):
            yield raw[at : at + 7]

    headers = {"content-type": "application/json"}
    url = bed.envoy.url("picked") + CHAT
    response = bed.http.post(url, content=pieces(), headers=headers)
    assert response.status_code == 200, response.text


def a_body_with_trailers_arrives(bed: Bed) -> None:
    """Without retries of the gateway: with them Envoy 1.40 sends such a body twice."""
    status, text = bed.send_raw(
        "single", [*_chunks(bed, "trailers"), b"0\r\nx-checksum: 1\r\n\r\n"]
    )
    assert status == 200, text
    bed.no_bookings()


def a_body_that_comes_late_outlasts_the_message_timeout(bed: Bed) -> None:
    """Gateways have message timeouts of seconds, and clients may upload for longer."""
    *first, last = _chunks(bed, "late")

    def pieces() -> Iterator[bytes]:
        yield from first
        # Sleep: the client is slower than the timeout.
        time.sleep(4 * MESSAGE_TIMEOUT_S)
        yield last
        yield b"0\r\n\r\n"

    status, text = bed.send_raw("impatient", pieces())
    assert status == 200, text


def a_client_that_leaves_in_its_body_is_forgotten(bed: Bed) -> None:
    first, *_ = _chunks(bed, "leaves")
    with socket.create_connection(bed.envoy.address("picked")) as connection:
        connection.sendall(_HEAD + first)
        wait_for(lambda: bed.open_requests() == 1, "the picker has its head")
    wait_for(lambda: bed.open_requests() == 0, "the picker has its end")
    bed.no_bookings()


def a_body_above_the_limit_of_the_picker_is_a_413(bed: Bed) -> None:
    response = bed.post("large", "limited", user="x" * (2 << 20))
    assert response.status_code == 413, response.text
    assert response.json()["error"]["message"]


def a_gateway_that_verifies_no_certificate_is_served_over_tls(bed: Bed) -> None:
    response = bed.post("secure", "secure", headers={"x-request-id": "secure"})
    assert response.status_code == 200, response.text
    assert bed.line("secure")["endpoints"][0] == bed.served_by(response)


def a_request_without_a_body_passes(bed: Bed) -> None:
    response = bed.http.get(bed.envoy.url("picked") + "/v1/models")
    assert response.status_code == 200, response.text
    assert response.json()["data"][0]["id"] == bed.model
    bed.no_bookings()


def an_unknown_model_is_a_404_of_the_picker(bed: Bed) -> None:
    response = bed.post("x", model="none")
    assert response.status_code == 404, response.text
    assert response.json()["error"]["code"] == "model_not_found"


def a_rewrite_names_the_model_of_the_server(bed: Bed) -> None:
    headers = {"x-gateway-model-name-rewrite": bed.model}
    response = bed.post("x", model="public-name", headers=headers)
    assert response.status_code == 200, response.text


def a_subset_is_honoured(bed: Bed) -> None:
    for server in bed.servers:
        for number in range(3):
            headers = {SUBSET_HEADER: f"{server.address},10.9.9.9:1"}
            response = bed.post(f"subset {number}", headers=headers)
            assert bed.served_by(response) == server.address


def a_subset_without_an_endpoint_is_a_503(bed: Bed) -> None:
    response = bed.post("x", headers={SUBSET_HEADER: "10.9.9.9:1"})
    assert response.status_code == 503, response.text
    assert "subset" in response.json()["error"]["message"]


def a_full_picker_sheds_with_429(bed: Bed) -> None:
    body = chat_body(bed.model, [{"role": "user", "content": "long"}], 300)
    url = bed.envoy.url("limited") + CHAT
    with bed.http.stream("POST", url, json=body) as response:
        assert response.status_code == 200
        shed = bed.post("shed", "limited")
        assert shed.status_code == 429, shed.text
        assert shed.headers["retry-after"]
    bed.no_bookings()


def a_client_that_disconnects_frees_its_booking_and_its_server(bed: Bed) -> None:
    body = chat_body(bed.model, [{"role": "user", "content": "abort"}], 2000)
    url = bed.envoy.url("picked") + CHAT
    with bed.http.stream("POST", url, json=body) as response:
        next(response.iter_lines())
        wait_for(lambda: bed.mesh.router.bookings() == 1, "it is booked while it runs")
    bed.no_bookings()
    wait_for(lambda: all(one.running() == 0 for one in bed.servers), "no server computes")


def a_gateway_that_buffers_works(bed: Bed) -> None:
    for fields in ({}, {"model": "public-name"}):
        headers = {"x-gateway-model-name-rewrite": bed.model}
        response = bed.post("buffered", "buffered", headers=headers, **fields)
        assert response.status_code == 200, f"{response.status_code} {response.text}"
    bed.no_bookings()


def without_bodies_of_responses_a_booking_lasts_until_the_end(bed: Bed) -> None:
    body = chat_body(bed.model, [{"role": "user", "content": "headers only"}], 300)
    url = bed.envoy.url("resilient") + CHAT
    with bed.http.stream("POST", url, json=body) as response:
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
        assert bed.mesh.router.bookings() == 1, "it is booked while it runs"
        *_, last = (line for line in lines if line)
    assert last == "data: [DONE]"
    bed.no_bookings()


def an_objective_and_a_tenant_are_taken(bed: Bed) -> None:
    headers = {
        "x-gateway-inference-objective": "high",
        "x-gateway-inference-fairness-id": "tenant-a",
    }
    assert bed.post("objective", headers=headers).status_code == 200
    headers["x-gateway-inference-fairness-id"] = "t" * 500
    response = bed.post("objective", headers=headers)
    assert response.status_code == 400, response.text
    assert "x-gateway-inference-fairness-id" in response.json()["error"]["message"]


def a_field_that_the_mesh_does_not_have_reaches_the_server(bed: Bed) -> None:
    headers = {"x-request-id": "field"}
    response = bed.post("field", headers=headers, engine_field={"a": [1]})
    assert response.status_code == 200, response.text
    assert "unread" not in bed.line("field")


def requests_of_one_connection_are_placed_each(bed: Bed) -> None:
    with httpx.Client(timeout=60.0, trust_env=False) as http:
        url = bed.envoy.url("picked") + CHAT
        for number in range(4):
            body = bed.body(f"connection {number}")
            body.pop("stream_options")
            assert http.post(url, json=body).status_code == 200
    bed.no_bookings()


CASES: Final[tuple[Callable[[Bed], None], ...]] = (
    the_pick_is_honoured,
    a_stream_passes_to_its_end,
    a_body_of_two_megabytes_arrives_whole,
    a_body_in_chunks_arrives,
    a_body_with_trailers_arrives,
    a_body_that_comes_late_outlasts_the_message_timeout,
    a_body_above_the_limit_of_the_picker_is_a_413,
    a_client_that_leaves_in_its_body_is_forgotten,
    a_gateway_that_verifies_no_certificate_is_served_over_tls,
    a_request_without_a_body_passes,
    an_unknown_model_is_a_404_of_the_picker,
    a_rewrite_names_the_model_of_the_server,
    a_subset_is_honoured,
    a_subset_without_an_endpoint_is_a_503,
    a_full_picker_sheds_with_429,
    a_client_that_disconnects_frees_its_booking_and_its_server,
    a_gateway_that_buffers_works,
    without_bodies_of_responses_a_booking_lasts_until_the_end,
    an_objective_and_a_tenant_are_taken,
    a_field_that_the_mesh_does_not_have_reaches_the_server,
    requests_of_one_connection_are_placed_each,
)


def a_server_that_is_lost_costs_no_request(bed: Bed) -> None:
    """Kills the first server: the gateway uses the second one, and the picker avoids the lost
    one."""
    lost, other = bed.servers
    lost.kill()
    for number in range(30):
        response = bed.post(f"lost {number}", headers={"x-request-id": f"lost-{number}"})
        assert response.status_code == 200, response.text
        assert bed.served_by(response) == other.address
    lines = [bed.line(f"lost-{number}") for number in range(30)]
    moved = [line for line in lines if "served" in line]
    assert len(moved) < 20, f"{len(moved)} of 30 went to the lost server first"
    bed.no_bookings()


def without_a_server_the_picker_responds_with_503(bed: Bed) -> None:
    """Removes all servers from the mesh."""
    for worker in bed.mesh.workers:
        worker.kill()

    def is_refused() -> bool:
        return bed.post("none").status_code == 503

    wait_for(is_refused, "the picker has no endpoint")


LAST_CASES: Final[tuple[Callable[[Bed], None], ...]] = (
    a_server_that_is_lost_costs_no_request,
    without_a_server_the_picker_responds_with_503,
)
