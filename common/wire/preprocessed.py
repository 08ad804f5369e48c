"""The preprocessed request as protobuf (`kvmesh.types.v1`), both ways and without loss.

The fields come from the declarations in `common/request/preprocessed`. Names are equal in both
forms, with these exceptions: token ids are bytes; arbitrary JSON is text in a field `..._json`; a
list that may be absent or is the value of a map is wrapped in a message.

Reading checks what proto3 cannot: required fields, ranges narrower than the wire's, unspecified or
unknown enums, finite numbers, JSON text, token ids given twice or truncated. Each error is an
InvalidRequest with the protobuf field.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from common.errors import InvalidRequest
from common.request.preprocessed import (
    FinishReason,
    MediaRawUrl,
    MediaUrl,
    MultimodalData,
    PreprocessedRequest,
    RdmaMediaDataDescriptor,
    TokenIds,
    check_absolute_url,
    dump_json_text,
    load_json_text,
)
from common.request.preprocessed.codecs import (
    AnyJsonCodec,
    EnumCodec,
    FieldCodec,
    ListCodec,
    MapCodec,
    NullableCodec,
    ObjectCodec,
    SetCodec,
    TokenIdsCodec,
    TokenSpanCodec,
    WireField,
    wire_fields,
)
from common.request.preprocessed.media import MediaCodec
from kvmesh.types.v1 import request_pb2

P = TypeVar("P")
M = TypeVar("M", bound=Message)


def to_proto(request: PreprocessedRequest) -> request_pb2.PreprocessedRequest:
    """Return the message."""
    return dataclass_to_proto(request, request_pb2.PreprocessedRequest())


def from_proto(message: request_pb2.PreprocessedRequest) -> PreprocessedRequest:
    """Return the request. Raises InvalidRequest with the invalid field."""
    return _read_message(PreprocessedRequest, message, "")


def dataclass_to_proto(obj: object, message: M) -> M:
    """Fill the empty `message` with the dataclass of the same name; returns the message."""
    assert message.DESCRIPTOR.name == type(obj).__name__, "message and dataclass have the same name"
    _fill_message(message, obj)
    return message


def dataclass_from_proto(cls: type[P], message: Message, field: str = "") -> P:
    """Return a `cls` from the message of the same name; `field` prefixes paths in errors."""
    assert message.DESCRIPTOR.name == cls.__name__, "message and dataclass have the same name"
    return _read_message(cls, message, field)


def finish_reason_to_proto(reason: FinishReason) -> request_pb2.FinishReason.ValueType:
    return request_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")


def finish_reason_from_proto(
    value: request_pb2.FinishReason.ValueType, field: str = "finish_reason"
) -> FinishReason:
    """Return the reason. Raises InvalidRequest with `field` if it is unspecified or unknown."""
    member: FinishReason = _read_enum(
        EnumCodec(FinishReason), request_pb2.FinishReason.DESCRIPTOR, value, field
    )
    return member


def _fill_message(message: Message, obj: object) -> None:
    for one, descriptor in _field_pairs(type(obj), message):
        value = getattr(obj, one.name)
        # None in a required field is the JSON value null; any other None is absence.
        if value is not None or one.required:
            _set_field(message, descriptor, one.kind, value)


def _set_field(message: Message, descriptor: FieldDescriptor, kind: FieldCodec, value: Any) -> None:
    name = descriptor.name
    match kind:
        case AnyJsonCodec():
            setattr(message, name, dump_json_text(value, name))
        case EnumCodec():
            setattr(message, name, _enum_number(descriptor.enum_type, value.name))
        case TokenIdsCodec():
            holder: Any = message if descriptor.message_type is None else getattr(message, name)
            holder.token_ids_le = value.little_endian
        case ObjectCodec():
            _fill_submessage(getattr(message, name), value)
        case ListCodec(item) | SetCodec(item):
            if not descriptor.is_repeated:
                getattr(message, name).SetInParent()
            values = sorted(value) if isinstance(kind, SetCodec) else value
            _append_items(_repeated_field(message, descriptor), item, values)
        case MapCodec(ListCodec(item)):
            for key, values in value.items():
                _append_items(_wrapped_list(getattr(message, name)[key]), item, values)
        case MapCodec():
            if value:
                getattr(message, name).update(value)
        case _:
            setattr(message, name, value)


def _append_items(items: Any, kind: FieldCodec, values: Iterable[Any]) -> None:
    match kind:
        case ObjectCodec():
            for value in values:
                _fill_message(items.add(), value)
        case NullableCodec(ObjectCodec()):
            for value in values:
                added = items.add()
                if value is not None:
                    _fill_submessage(added.info, value)
        case TokenIdsCodec():
            for value in values:
                items.add(token_ids_le=value.little_endian)
        case TokenSpanCodec():
            for start, end in values:
                items.add(start=start, end=end)
        case MediaCodec():
            for value in values:
                _set_media_item(items.add(), value)
        case _:
            items.extend(values)


def _fill_submessage(message: Message, obj: object) -> None:
    # An empty message differs from an absent one.
    message.SetInParent()
    _fill_message(message, obj)


def _set_media_item(message: request_pb2.MultimodalData, media_item: MultimodalData) -> None:
    match media_item:
        case MediaUrl(url):
            message.url = url
        case MediaRawUrl(url):
            message.raw_url = url
        case RdmaMediaDataDescriptor():
            _fill_submessage(message.decoded, media_item)


def _read_message(cls: type[P], message: Message, path: str) -> P:
    # mypy takes the hash of a class for that of its instances.
    plan = _read_plan(cls, type(message))  # type: ignore[arg-type]
    fields = dict(plan.absent)
    for name in plan.empty_maps:
        fields[name] = {}
    # Only the fields that are set: most of a request are not.
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if (one := plan.fields.get(name)) is not None:
            field_path = f"{path}.{name}" if path else name
            fields[one.name] = _read_field(message, descriptor, one.kind, value, field_path)
    for one, descriptor in plan.token_ids:
        if descriptor.message_type is None:
            fields[one.name] = _read_token_ids(message, path)
        else:
            inner_path = f"{path}.{descriptor.name}" if path else descriptor.name
            fields[one.name] = _read_token_ids(getattr(message, descriptor.name), inner_path)
    for one, descriptor in plan.required:
        if one.name not in fields:
            field_path = f"{path}.{descriptor.name}" if path else descriptor.name
            if descriptor.has_presence:
                raise InvalidRequest(f"{field_path} is required", field_path)
            raise InvalidRequest(f"{field_path} is unspecified", field_path)
    return cls(**fields)


def _read_field(
    message: Message, descriptor: FieldDescriptor, kind: FieldCodec, value: Any, path: str
) -> Any:
    match kind:
        case AnyJsonCodec():
            return load_json_text(value, path)
        case EnumCodec():
            return _read_enum(kind, descriptor.enum_type, value, path)
        case ObjectCodec(cls):
            return _read_message(cls, value, path)
        case ListCodec(item):
            return tuple(_read_items(_repeated_field(message, descriptor), item, path))
        case SetCodec(item):
            return frozenset(_read_items(_repeated_field(message, descriptor), item, path))
        case MapCodec(ListCodec(item)):
            return {
                key: tuple(_read_items(_wrapped_list(inner), item, f"{path}.{key}"))
                for key, inner in value.items()
            }
        case MapCodec(item):
            return {key: item.read(one, f"{path}.{key}") for key, one in value.items()}
        case _:
            return kind.read(value, path)


def _read_items(items: Any, kind: FieldCodec, path: str) -> Iterator[Any]:
    for index, item in enumerate(items):
        field_path = f"{path}[{index}]"
        match kind:
            case ObjectCodec(cls):
                yield _read_message(cls, item, field_path)
            case NullableCodec(ObjectCodec(cls)):
                yield (
                    _read_message(cls, item.info, f"{field_path}.info")
                    if item.HasField("info")
                    else None
                )
            case TokenIdsCodec():
                yield _read_token_ids(item, field_path)
            case TokenSpanCodec():
                yield kind.read([item.start, item.end], field_path)
            case MediaCodec():
                yield _read_media_item(item, field_path)
            case _:
                yield kind.read(item, field_path)


def _read_token_ids(message: Any, path: str) -> TokenIds:
    field_path = f"{path}.token_ids_le" if path else "token_ids_le"
    if not message.HasField("token_ids_le"):
        return TokenIds.of(message.token_ids)
    if message.token_ids:
        raise InvalidRequest(f"{field_path} and token_ids are both set: give one", field_path)
    if len(message.token_ids_le) % 4:
        raise InvalidRequest(
            f"{field_path} has {len(message.token_ids_le)} bytes, not a multiple of 4", field_path
        )
    return TokenIds(message.token_ids_le)


def _read_media_item(message: request_pb2.MultimodalData, path: str) -> MultimodalData:
    match message.WhichOneof("data"):
        case "url":
            return MediaUrl(check_absolute_url(message.url, f"{path}.url"))
        case "raw_url":
            return MediaRawUrl(message.raw_url)
        case "decoded":
            return _read_message(RdmaMediaDataDescriptor, message.decoded, f"{path}.decoded")
        case None:
            raise InvalidRequest(f"{path} needs one of url, raw_url, decoded", path)


def _field_pairs(cls: type[Any], message: Message) -> tuple[tuple[WireField, FieldDescriptor], ...]:
    """Return each field with its descriptor. Raises KeyError if the message has no such field."""
    # mypy takes the hash of a class for that of its instances.
    return _cached_field_pairs(cls, type(message))  # type: ignore[arg-type]


@functools.cache
def _cached_field_pairs(
    cls: type[Any], message: type[Message]
) -> tuple[tuple[WireField, FieldDescriptor], ...]:
    fields = message.DESCRIPTOR.fields_by_name
    # The stubs also allow the FieldDescriptor class of the C implementation.
    return tuple((one, cast(FieldDescriptor, fields[one.proto])) for one in wire_fields(cls))


@dataclass(frozen=True, slots=True)
class _ReadPlan:
    """How to read a class from a message. fields: by the name of the protobuf field. absent: values
    of fields that have no presence, if they are not set; empty_maps: such fields whose value is an
    empty dict. required: fields that must be set.
    """

    fields: Mapping[str, WireField]
    absent: Mapping[str, Any]
    empty_maps: Sequence[str]
    token_ids: Sequence[tuple[WireField, FieldDescriptor]]
    required: Sequence[tuple[WireField, FieldDescriptor]]


@functools.cache
def _read_plan(cls: type[Any], message: type[Message]) -> _ReadPlan:
    pairs = _cached_field_pairs(cls, message)  # type: ignore[arg-type]
    token_ids = [pair for pair in pairs if isinstance(pair[0].kind, TokenIdsCodec)]
    fields = {pair[1].name: pair[0] for pair in pairs if pair not in token_ids}
    empty = message()
    absent: dict[str, Any] = {}
    empty_maps, required = [], []
    for one, descriptor in pairs:
        if descriptor.name not in fields:
            continue
        if descriptor.has_presence:
            if one.required:
                required.append((one, descriptor))
        elif isinstance(one.kind, EnumCodec):
            required.append((one, descriptor))
        elif isinstance(one.kind, MapCodec):
            empty_maps.append(one.name)
        else:
            value = getattr(empty, descriptor.name)
            absent[one.name] = _read_field(empty, descriptor, one.kind, value, descriptor.name)
    return _ReadPlan(fields, absent, empty_maps, token_ids, required)


def _repeated_field(message: Message, descriptor: FieldDescriptor) -> Any:
    """Return the repeated field, directly or inside its wrapper message."""
    inner = getattr(message, descriptor.name)
    return inner if descriptor.is_repeated else _wrapped_list(inner)


def _wrapped_list(wrapper: Message) -> Any:
    return getattr(wrapper, wrapper.DESCRIPTOR.fields[0].name)


def _enum_prefix(enum_type: EnumDescriptor) -> str:
    """Return the prefix of the members: SESSION_ACTION_ from SESSION_ACTION_UNSPECIFIED."""
    return enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")


def _enum_number(enum_type: EnumDescriptor | None, member: str) -> int:
    assert enum_type is not None, "the field is an enumeration"
    return enum_type.values_by_name[_enum_prefix(enum_type) + member].number


def _read_enum(
    kind: EnumCodec[Any], enum_type: EnumDescriptor | None, number: int, path: str
) -> Any:
    assert enum_type is not None, "the field is an enumeration"
    found = enum_type.values_by_number.get(number)
    if found is None:
        raise InvalidRequest(f"{path} has the unknown value {number}", path)
    if number == 0:
        raise InvalidRequest(f"{path} is unspecified", path)
    return kind.enum_type[found.name.removeprefix(_enum_prefix(enum_type))]
