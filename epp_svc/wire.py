"""Messages of the gateway to parts, and answers to messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from google.protobuf import struct_pb2

from common.errors import InvalidRequest
from epp_svc.core.messages import (
    Answer,
    BodyMode,
    ContinueHeaders,
    EndRequestTrailers,
    Part,
    Refuse,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    SendBody,
    SendHeaders,
    SendWholeBody,
    TakeResponseBody,
    TakeResponseHeaders,
    TakeResponseTrailers,
)
from kvmesh.extproc.v1 import extproc_pb2 as pb

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"
# In requests and answers, as a header and as metadata.
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_UPSTREAM = "upstream.address"
_MODES: Mapping[int, BodyMode] = {
    pb.BODY_SEND_MODE_UNSPECIFIED: BodyMode.NONE,
    pb.BODY_SEND_MODE_STREAMED: BodyMode.STREAMED,
    pb.BODY_SEND_MODE_BUFFERED: BodyMode.BUFFERED,
    pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED: BodyMode.DUPLEX,
}


def read_part(message: pb.ProcessingRequest) -> Part:
    """Returns the part in a message. Raises InvalidRequest for a message without one."""
    match message.WhichOneof("request"):
        case "request_headers":
            return _read_head(message)
        case "request_body":
            return RequestBody(message.request_body.body, message.request_body.end_of_stream)
        case "request_trailers":
            return RequestTrailers()
        case "response_headers":
            return ResponseHeaders(message.response_headers.end_of_stream, _served(message))
        case "response_body":
            return ResponseBody(message.response_body.body, message.response_body.end_of_stream)
        case "response_trailers":
            return ResponseTrailers()
        case _:
            raise InvalidRequest("the message has no part of a request or response", "request")


def _read_head(message: pb.ProcessingRequest) -> RequestHeaders:
    modes = {}
    if message.HasField("protocol_config"):
        config = message.protocol_config
        modes = {
            "request_mode": _MODES.get(config.request_body_mode, BodyMode.STREAMED),
            "response_mode": _MODES.get(config.response_body_mode, BodyMode.STREAMED),
        }
    return RequestHeaders(
        {
            header.key.lower(): header.raw_value.decode("latin-1") or header.value
            for header in message.request_headers.headers.headers
        },
        message.request_headers.end_of_stream,
        _subset(message),
        **modes,
    )


def _subset(message: pb.ProcessingRequest) -> tuple[str, ...] | None:
    """Returns the endpoints that the gateway permits: a list, or a text with commas; None: all."""
    metadata = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata or SUBSET not in metadata[SUBSET_NAMESPACE].fields:
        return None
    value = metadata[SUBSET_NAMESPACE].fields[SUBSET]
    texts = [one.string_value for one in value.list_value.values] or [value.string_value]
    parts = (part.strip() for text in texts for part in text.split(","))
    return tuple(filter(None, parts))


def _served(message: pb.ProcessingRequest) -> str:
    """Returns the endpoint that has served, from metadata, or from an attribute of Envoy."""
    metadata = message.metadata_context.filter_metadata
    if NAMESPACE in metadata and SERVED in metadata[NAMESPACE].fields:
        return metadata[NAMESPACE].fields[SERVED].string_value
    for attributes in message.attributes.values():
        if _UPSTREAM in attributes.fields:
            return attributes.fields[_UPSTREAM].string_value
    return ""


def write_answer(answer: Answer) -> pb.ProcessingResponse:
    """Returns the message of an answer."""
    match answer:
        case ContinueHeaders():
            return pb.ProcessingResponse(request_headers=pb.PartResponse())
        case SendHeaders(endpoints, has_new_body):
            response = _picked(endpoints, ["content-length"] if has_new_body else [])
            message = pb.ProcessingResponse(request_headers=pb.PartResponse(response=response))
            return _with_destination(message, endpoints)
        case SendBody(data, is_last):
            return pb.ProcessingResponse(request_body=_piece(data, is_last))
        case SendWholeBody(endpoints, new_body):
            response = _picked(endpoints, [])
            if new_body is not None:
                response.body_mutation.body = new_body
                length = [("content-length", str(len(new_body)))]
                response.header_mutation.set_headers.extend(_set(length))
            message = pb.ProcessingResponse(request_body=pb.PartResponse(response=response))
            return _with_destination(message, endpoints)
        case EndRequestTrailers():
            return pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
        case TakeResponseHeaders():
            return pb.ProcessingResponse(response_headers=pb.PartResponse())
        case TakeResponseBody(data, is_last, is_echo):
            part = _piece(data, is_last) if is_echo else pb.PartResponse()
            return pb.ProcessingResponse(response_body=part)
        case TakeResponseTrailers():
            return pb.ProcessingResponse(response_trailers=pb.TrailersResponse())
        case Refuse(status, headers, body, reason):
            return pb.ProcessingResponse(
                immediate_response=pb.ImmediateResponse(
                    status=pb.HttpStatus(code=status),
                    headers=pb.HeaderMutation(set_headers=_set(headers)),
                    body=body,
                    details=f"kvmesh_{reason.lower()}",
                )
            )


def _picked(endpoints: Iterable[str], removed: Iterable[str]) -> pb.CommonResponse:
    """Returns the change of the headers that names the endpoints."""
    destination = [(DESTINATION, ",".join(endpoints))]
    mutation = pb.HeaderMutation(set_headers=_set(destination), remove_headers=removed)
    return pb.CommonResponse(header_mutation=mutation, clear_route_cache=True)


def _set(headers: Iterable[tuple[str, str]]) -> list[pb.HeaderValueOption]:
    return [
        pb.HeaderValueOption(
            header=pb.HeaderValue(key=name, raw_value=value.encode("latin-1", "replace")),
            append_action=pb.APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in headers
    ]


def _piece(data: bytes, is_last: bool) -> pb.PartResponse:
    piece = pb.StreamedBody(body=data, end_of_stream=is_last)
    mutation = pb.BodyMutation(streamed_response=piece)
    return pb.PartResponse(response=pb.CommonResponse(body_mutation=mutation))


def _with_destination(
    message: pb.ProcessingResponse, endpoints: Iterable[str]
) -> pb.ProcessingResponse:
    """Returns the message with the metadata that equals the header."""
    inner = struct_pb2.Struct()
    inner.fields[DESTINATION].string_value = ",".join(endpoints)
    message.dynamic_metadata.fields[NAMESPACE].struct_value.CopyFrom(inner)
    return message
