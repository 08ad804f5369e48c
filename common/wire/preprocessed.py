"""Wire dataclasses as protobuf, both ways and without loss: the preprocessed request
(`kvmesh.types.v1`), and the query and decision of a placement (`kvmesh.router.v1`).

The fields come from the declarations in `common/request/preprocessed` and
`common/request/placement.py`. Names are equal in both forms, unless a field's metadata names
another (`proto`), with these exceptions: token ids are bytes; arbitrary JSON is text in a field
`..._json`; a list that may be absent or is the value of a map is wrapped in a message.

A field without presence that is not set gets the default of its declaration.

Reading checks what proto3 cannot: required fields, ranges narrower than the wire's, unspecified or
unknown enums, finite numbers, JSON text, token ids given twice or truncated. Each error is an
InvalidRequest with the protobuf field.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    BoolCodec,
    BytesCodec,
    EnumCodec,
    FieldCodec,
    FloatCodec,
    IntegerCodec,
    ListCodec,
    MapCodec,
    NullableCodec,
    ObjectCodec,
    SetCodec,
    TextCodec,
    TokenIdsCodec,
    TokenSpanCodec,
    WireField,
    wire_fields,
)
from common.request.preprocessed.media import MediaCodec
from kvmesh.types.v1 import request_pb2

P = TypeVar("P")
M = TypeVar("M", bound=Message)

_INTEGER_RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
}


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
    # mypy takes the hash of a class for that of its instances.
    plan = _write_plan(type(obj), type(message))  # type: ignore[arg-type]
    for name, proto in plan.copied:
        value = getattr(obj, name)
        if value is not None:
            setattr(message, proto, value)
    for name, proto in plan.lists:
        values = getattr(obj, name)
        if values:
            getattr(message, proto).extend(values)
    for field, descriptor in plan.converted:
        value = getattr(obj, field.name)
        # None in a required field is the JSON value null; any other None is absence.
        if value is not None or field.required:
            _set_field(message, descriptor, field.kind, value)


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
    for name, proto in plan.copied:
        fields[name] = getattr(message, proto)
    for name, proto in plan.copied_if_set:
        if message.HasField(proto):
            fields[name] = getattr(message, proto)
    for name, proto, collection in plan.lists:
        values = getattr(message, proto)
        if values:
            fields[name] = collection(values)
    for field, descriptor, proto in plan.checked:
        if descriptor.has_presence:
            if not message.HasField(proto):
                continue
            value = getattr(message, proto)
        else:
            value = getattr(message, proto)
            if not value:
                continue
        field_path = f"{path}.{proto}" if path else proto
        fields[field.name] = _read_field(message, descriptor, field.kind, value, field_path)
    for field, descriptor in plan.token_ids:
        if descriptor.message_type is None:
            fields[field.name] = _read_token_ids(message, path)
        else:
            inner_path = f"{path}.{descriptor.name}" if path else descriptor.name
            fields[field.name] = _read_token_ids(getattr(message, descriptor.name), inner_path)
    for field, descriptor in plan.required:
        if field.name not in fields:
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


@functools.cache
def _field_pairs(
    cls: type[Any], message: type[Message]
) -> tuple[tuple[WireField, FieldDescriptor], ...]:
    """Return each field with its descriptor. Raises KeyError if the message has no such field."""
    descriptors = message.DESCRIPTOR.fields_by_name
    # The stubs also allow the FieldDescriptor class of the C implementation.
    return tuple(
        (field, cast(FieldDescriptor, descriptors[field.proto])) for field in wire_fields(cls)
    )


@dataclass(frozen=True, slots=True)
class _WritePlan:
    """How to write a class to a message; names are pairs (attribute, protobuf field)."""

    copied: Sequence[tuple[str, str]]
    """Scalars that are equal in both forms."""
    lists: Sequence[tuple[str, str]]
    """Lists of such scalars."""
    converted: Sequence[tuple[WireField, FieldDescriptor]]


@functools.cache
def _write_plan(cls: type[Any], message: type[Message]) -> _WritePlan:
    copied, lists, converted = [], [], []
    for field, descriptor in _field_pairs(cls, message):  # type: ignore[arg-type]
        names = (field.name, descriptor.name)
        if isinstance(field.kind, IntegerCodec | FloatCodec | TextCodec | BoolCodec | BytesCodec):
            copied.append(names)
        elif isinstance(field.kind, ListCodec) and _is_scalar_list(field.kind.item, descriptor):
            lists.append(names)
        else:
            converted.append((field, descriptor))
    return _WritePlan(copied, lists, converted)


@dataclass(frozen=True, slots=True)
class _ReadPlan:
    """How to read a class from a message; names are pairs (attribute, protobuf field)."""

    absent: Mapping[str, Any]
    """Values of fields without presence and without default, if they are not set."""
    copied: Sequence[tuple[str, str]]
    """Scalars without presence, of which each value on the wire is valid."""
    copied_if_set: Sequence[tuple[str, str]]
    """The same with presence."""
    lists: Sequence[tuple[str, str, Callable[[Any], Any]]]
    """Lists of such scalars, with the type of the collection."""
    checked: Sequence[tuple[WireField, FieldDescriptor, str]]
    """Other fields, with the name of the protobuf field."""
    token_ids: Sequence[tuple[WireField, FieldDescriptor]]
    required: Sequence[tuple[WireField, FieldDescriptor]]
    """Fields that must be set."""


@functools.cache
def _read_plan(cls: type[Any], message: type[Message]) -> _ReadPlan:
    absent: dict[str, Any] = {}
    copied, copied_if_set, lists, checked, token_ids, required = [], [], [], [], [], []
    empty = message()
    for field, descriptor in _field_pairs(cls, message):  # type: ignore[arg-type]
        kind, names = field.kind, (field.name, descriptor.name)
        if isinstance(kind, TokenIdsCodec):
            token_ids.append((field, descriptor))
            continue
        zero = getattr(empty, descriptor.name)
        if field.required and (descriptor.has_presence or isinstance(kind, EnumCodec)):
            required.append((field, descriptor))
        elif field.required:
            absent[field.name] = _read_field(empty, descriptor, kind, zero, descriptor.name)
        if isinstance(kind, ListCodec | SetCodec) and _is_scalar_list(kind.item, descriptor):
            collection: Callable[[Any], Any] = tuple if isinstance(kind, ListCodec) else frozenset
            lists.append((*names, collection))
        elif not _is_any_value_valid(kind, descriptor):
            checked.append((field, descriptor, descriptor.name))
        elif descriptor.has_presence:
            copied_if_set.append(names)
        elif field.required or field.default == zero:
            copied.append(names)
        else:
            checked.append((field, descriptor, descriptor.name))
    return _ReadPlan(absent, copied, copied_if_set, lists, checked, token_ids, required)


def _is_scalar_list(item: FieldCodec, descriptor: FieldDescriptor) -> bool:
    """Returns whether a collection is a repeated field, of which each value is valid."""
    is_direct = descriptor.is_repeated and descriptor.message_type is None
    return is_direct and _is_any_value_valid(item, descriptor)


def _is_any_value_valid(kind: FieldCodec, descriptor: FieldDescriptor) -> bool:
    """Returns whether the codec takes each value that the protobuf type has."""
    if isinstance(kind, IntegerCodec):
        low, high = _INTEGER_RANGES[descriptor.type]
        return kind.low <= low and high <= kind.high
    return isinstance(kind, TextCodec | BoolCodec | BytesCodec)


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
