"""The part of a gateway that talks to an endpoint picker: one stream for each HTTP request."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import struct_pb2

from kvmesh.extproc.v1 import extproc_pb2 as pb
from tests.kit.waiting import WAIT_S

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
CHAT = "/v1/chat/completions"
DUPLEX = pb.ProtocolConfiguration(
    request_body_mode=pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED,
    response_body_mode=pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED,
)


@dataclass
class Picked:
    """What a picker has answered to a request."""

    endpoints: list[str] = field(default_factory=list)
    body: bytes = b""
    status: int = 0
    """Of a response of the picker; 0: none."""

    headers: dict[str, str] = field(default_factory=dict)
    """Of such a response, or those set on the request."""

    metadata: list[str] = field(default_factory=list)
    """The endpoints in the metadata."""

    # Any: JSON.
    @property
    def json(self) -> Any:
        return json.loads(self.body)


class GatewayStream:
    """The stream of one request. Use as a context manager: leaving it resets the stream, and closes
    the channel. channel: to the picker; None: a new one, without TLS."""

    def __init__(self, address: str, channel: grpc.Channel | None = None) -> None:
        self._channel = channel or grpc.insecure_channel(address)
        self._sent: queue.Queue[pb.ProcessingRequest | None] = queue.Queue()
        call = self._channel.stream_stream(
            METHOD,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        self.answers: Iterator[pb.ProcessingResponse] = call(self._messages(), timeout=WAIT_S)

    def __enter__(self) -> GatewayStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._sent.put(None)
        self._channel.close()

    def _messages(self) -> Iterator[pb.ProcessingRequest]:
        # Ends: with the stream.
        while (message := self._sent.get()) is not None:
            yield message

    def send(self, **parts: Any) -> None:
        """Sends a message with these fields."""
        self._sent.put(pb.ProcessingRequest(**parts))

    def close(self) -> None:
        """Ends the stream in order: the picker reads to its end."""
        self._sent.put(None)
        with suppress(StopIteration, grpc.RpcError):
            next(self.answers)

    # Any: JSON.
    def pick(
        self,
        body: Mapping[str, Any] | bytes,
        headers: Mapping[str, str] | None = None,
        *,
        path: str = CHAT,
        subset: Sequence[str] | None = None,
        pieces: int = 1,
        config: pb.ProtocolConfiguration = DUPLEX,
    ) -> Picked:
        """Sends a request, and returns what the picker answers."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        context, size = _subset(subset), -(-len(raw) // pieces)
        options = {"metadata_context": context, "protocol_config": config}
        self.send_request(raw, headers or {}, path=path, size=size, **options)
        return self.read_pick()

    def send_request(
        self,
        raw: bytes,
        headers: Mapping[str, str],
        *,
        path: str = CHAT,
        size: int = 1 << 20,
        **options: Any,
    ) -> None:
        """Sends a request in pieces of this size. options: more fields of the first message."""
        head = _head({":path": path, ":method": "POST", **headers})
        self.send(request_headers=head, **options)
        for at in range(0, len(raw), size):
            is_last = at + size >= len(raw)
            piece = pb.HttpBody(body=raw[at : at + size], end_of_stream=is_last)
            self.send(request_body=piece)

    def read_pick(self) -> Picked:
        """Returns the answer to a whole request."""
        found = Picked()
        while True:
            answer = next(self.answers)
            if answer.HasField("immediate_response"):
                response = answer.immediate_response
                return Picked(
                    body=response.body,
                    status=response.status.code,
                    headers=_texts(response.headers.set_headers),
                )
            kind = answer.WhichOneof("response")
            assert kind is not None, "an answer has a part"
            part = getattr(answer, kind).response
            if DESTINATION in (headers := _texts(part.header_mutation.set_headers)):
                found.headers = headers
                found.endpoints = headers[DESTINATION].split(",")
                inner = answer.dynamic_metadata.fields["envoy.lb"].struct_value
                found.metadata = inner.fields[DESTINATION].string_value.split(",")
            if kind == "request_body":
                mutation = part.body_mutation
                if not mutation.HasField("streamed_response"):
                    found.body = mutation.body
                    return found
                found.body += mutation.streamed_response.body
                if mutation.streamed_response.end_of_stream:
                    return found

    def respond(self, text: bytes = b"data: [DONE]\n\n", *, served: str = "") -> None:
        """Sends a whole response, and reads the answers."""
        attributes = {}
        if served:
            attributes = {"envoy.filters.http.ext_proc": struct_pb2.Struct()}
            attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
        self.send(response_headers=_head({":status": "200"}), attributes=attributes)
        assert next(self.answers).HasField("response_headers")
        self.send(response_body=pb.HttpBody(body=text, end_of_stream=True))
        echo = next(self.answers).response_body.response.body_mutation.streamed_response
        assert (echo.body, echo.end_of_stream) == (text, True)


def pick(address: str, body: Mapping[str, Any] | bytes, **options: Any) -> Picked:
    """Returns the answer to one request whose response is complete at once."""
    with GatewayStream(address) as stream:
        found = stream.pick(body, **options)
        if not found.status:
            stream.respond()
        return found


def _head(headers: Mapping[str, str]) -> pb.HttpHeaders:
    values = [pb.HeaderValue(key=k, raw_value=v.encode()) for k, v in headers.items()]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=values))


def _texts(headers: Sequence[pb.HeaderValueOption]) -> dict[str, str]:
    return {one.header.key: one.header.raw_value.decode() for one in headers}


def _subset(endpoints: Sequence[str] | None) -> pb.Metadata | None:
    if endpoints is None:
        return None
    struct = struct_pb2.Struct()
    struct.update({"x-gateway-destination-endpoint-subset": list(endpoints)})
    return pb.Metadata(filter_metadata={"envoy.lb.subset_hint": struct})
