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
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
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

_UNSET = object()

_INTEGER_RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT64: (-(2**63), 2**63 - 1),
}


def to_proto(request: PreprocessedRequest) -> request_pb2.PreprocessedRequest:
    """Returns the message."""
    return dataclass_to_proto(request, request_pb2.PreprocessedRequest())


def from_proto(message: request_pb2.PreprocessedRequest) -> PreprocessedRequest:
    """Returns the request. Raises InvalidRequest with the invalid field."""
    return _read_message(PreprocessedRequest, message, "")


def dataclass_to_proto(obj: object, message: M) -> M:
    """Fills the empty `message` with the dataclass of the same name; returns the message."""
    _fill_message(message, obj)
    return message


def dataclass_from_proto(cls: type[P], message: Message, field: str = "") -> P:
    """Returns a `cls` from the message of the same name; `field` prefixes paths in errors."""
    return _read_message(cls, message, field)


def finish_reason_to_proto(reason: FinishReason) -> request_pb2.FinishReason.ValueType:
    return request_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")


def finish_reason_from_proto(
    value: request_pb2.FinishReason.ValueType, field: str = "finish_reason"
) -> FinishReason:
    """Returns the reason. Raises InvalidRequest with `field` if it is unspecified or unknown."""
    member: FinishReason = _read_enum(
        EnumCodec(FinishReason), request_pb2.FinishReason.DESCRIPTOR, value, field
    )
    return member


def _fill_message(message: Message, obj: object) -> None:
    # mypy takes the hash of a class for that of its instances.
    plan = _write_plan(type(obj), type(message))  # type: ignore[arg-type]
    for name, proto in plan.copied:
        value = getattr(obj, name)
        if value:
            setattr(message, proto, value)
    for name, proto in plan.copied_unless_none:
        value = getattr(obj, name)
        if value is not None:
            setattr(message, proto, value)
    for name, proto in plan.lists:
        value = getattr(obj, name)
        if value:
            getattr(message, proto).extend(value)
    for name, is_null_a_value, write in plan.converted:
        value = getattr(obj, name)
        if value is not None or is_null_a_value:
            write(message, value)


def _writer(kind: FieldCodec, descriptor: FieldDescriptor) -> Callable[[Any, Any], None]:
    """Returns what sets a field of a message to a value."""
    name = descriptor.name
    match kind:
        case AnyJsonCodec():
            return partial(_write_json, name)
        case EnumCodec():
            return partial(_write_enum, name, descriptor.enum_type)
        case TokenIdsCodec():
            return partial(_write_token_ids, None if descriptor.message_type is None else name)
        case ObjectCodec():
            return partial(_write_object, name)
        case ListCodec(item) | SetCodec(item):
            return partial(_write_items, descriptor, item, isinstance(kind, SetCodec))
        case MapCodec(ListCodec(item)):
            return partial(_write_map_of_lists, name, item)
        case MapCodec():
            return partial(_write_map, name)
        case _:
            return partial(_write_scalar, name)


def _write_scalar(name: str, message: Message, value: Any) -> None:
    setattr(message, name, value)


def _write_json(name: str, message: Message, value: Any) -> None:
    setattr(message, name, dump_json_text(value, name))


def _write_enum(name: str, enum_type: EnumDescriptor | None, message: Message, value: Any) -> None:
    setattr(message, name, _enum_number(enum_type, value.name))


def _write_token_ids(name: str | None, message: Any, value: TokenIds) -> None:
    holder = message if name is None else getattr(message, name)
    holder.token_ids_le = value.little_endian


def _write_object(name: str, message: Message, value: object) -> None:
    _fill_submessage(getattr(message, name), value)


def _write_items(
    descriptor: FieldDescriptor, item: FieldCodec, is_set: bool, message: Message, value: Any
) -> None:
    inner = getattr(message, descriptor.name)
    if not descriptor.is_repeated:
        inner.SetInParent()
        inner = _wrapped_list(inner)
    _append_items(inner, item, sorted(value) if is_set else value)


def _write_map(name: str, message: Message, value: Mapping[Any, Any]) -> None:
    if value:
        getattr(message, name).update(value)


def _write_map_of_lists(
    name: str, item: FieldCodec, message: Message, value: Mapping[Any, Any]
) -> None:
    for key, values in value.items():
        _append_items(_wrapped_list(getattr(message, name)[key]), item, values)


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
    values = plan.values.copy()
    for index, proto in plan.copied:
        values[index] = getattr(message, proto)
    for index, proto in plan.copied_if_set:
        if message.HasField(proto):
            values[index] = getattr(message, proto)
    for index, proto, collection in plan.lists:
        value = getattr(message, proto)
        if value:
            values[index] = collection(value)
    for index, proto, has_presence, read in plan.checked:
        if has_presence:
            if not message.HasField(proto):
                continue
            value = getattr(message, proto)
        else:
            value = getattr(message, proto)
            if not value:
                continue
        values[index] = read(value, f"{path}.{proto}" if path else proto)
    for index, proto in plan.token_ids:
        inner_path = f"{path}.{proto}" if path and proto else path or proto
        values[index] = _read_token_ids(getattr(message, proto) if proto else message, inner_path)
    for index, proto, has_presence in plan.required:
        if values[index] is _UNSET:
            field_path = f"{path}.{proto}" if path else proto
            problem = "required" if has_presence else "unspecified"
            raise InvalidRequest(f"{field_path} is {problem}", field_path)
    if plan.keywords is None:
        return cls(*values)
    # Defaults that are not passed are made again.
    pairs = zip(plan.keywords, values, strict=True)
    return cls(**{name: value for name, value in pairs if value is not _UNSET})


def _reader(kind: FieldCodec, descriptor: FieldDescriptor) -> Callable[[Any, str], Any]:
    """Returns what makes the value of a field from that of the message and a path for errors."""
    match kind:
        case AnyJsonCodec():
            return load_json_text
        case EnumCodec():
            return partial(_read_enum, kind, descriptor.enum_type)
        case ObjectCodec(cls):
            return partial(_read_message, cls)
        case ListCodec(item):
            return partial(_read_collection, tuple, item, descriptor.is_repeated)
        case SetCodec(item):
            return partial(_read_collection, frozenset, item, descriptor.is_repeated)
        case MapCodec(ListCodec(item)):
            return partial(_read_map_of_lists, item)
        case MapCodec(item):
            return partial(_read_map, item)
        case _:
            return kind.read


def _read_collection(
    collection: Callable[[Any], Any], item: FieldCodec, is_repeated: bool, value: Any, path: str
) -> Any:
    return collection(_read_items(value if is_repeated else _wrapped_list(value), item, path))


def _read_map(item: FieldCodec, value: Any, path: str) -> dict[Any, Any]:
    return {key: item.read(inner, f"{path}.{key}") for key, inner in value.items()}


def _read_map_of_lists(item: FieldCodec, value: Any, path: str) -> dict[Any, Any]:
    return {
        key: tuple(_read_items(_wrapped_list(inner), item, f"{path}.{key}"))
        for key, inner in value.items()
    }


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


def _field_pairs(
    cls: type[Any], message: type[Message]
) -> Iterator[tuple[WireField, FieldDescriptor]]:
    """Yields each field with its descriptor. Raises KeyError if the message has no such field."""
    assert message.DESCRIPTOR.name == cls.__name__, "message and dataclass have the same name"
    descriptors = message.DESCRIPTOR.fields_by_name
    for field in wire_fields(cls):
        # The stubs also allow the FieldDescriptor class of the C implementation.
        yield field, cast(FieldDescriptor, descriptors[field.proto])


@dataclass(frozen=True, slots=True)
class _WritePlan:
    """How to write a class to a message. Entries begin with the name of the attribute; then, where
    it is needed, the name of the protobuf field."""

    copied: Sequence[tuple[str, str]]
    """Scalars that are equal in both forms, without presence."""
    copied_unless_none: Sequence[tuple[str, str]]
    """The same with presence."""
    lists: Sequence[tuple[str, str]]
    """Lists of such scalars."""
    converted: Sequence[tuple[str, bool, Callable[[Any, Any], None]]]
    """Other fields: whether None is a value (the JSON value null), not absence; what writes it."""


@functools.cache
def _write_plan(cls: type[Any], message: type[Message]) -> _WritePlan:
    copied: list[tuple[str, str]] = []
    copied_unless_none: list[tuple[str, str]] = []
    lists, converted = [], []
    for field, descriptor in _field_pairs(cls, message):
        kind, names = field.kind, (field.name, descriptor.name)
        if isinstance(kind, IntegerCodec | FloatCodec | TextCodec | BoolCodec | BytesCodec):
            (copied_unless_none if descriptor.has_presence else copied).append(names)
        elif isinstance(kind, ListCodec) and _is_scalar_list(kind.item, descriptor):
            lists.append(names)
        else:
            converted.append((field.name, field.required, _writer(kind, descriptor)))
    return _WritePlan(copied, copied_unless_none, lists, converted)


@dataclass(frozen=True, slots=True)
class _ReadPlan:
    """How to read a class from a message. Entries begin with the index of the value and the name of
    the protobuf field."""

    values: list[Any]
    """The values of fields that are not set, in the order of declaration; _UNSET: none."""
    keywords: Sequence[str] | None
    """Names of the values. None: they are passed by position."""
    copied: Sequence[tuple[int, str]]
    """Scalars without presence, of which each value on the wire is valid."""
    copied_if_set: Sequence[tuple[int, str]]
    """The same with presence."""
    lists: Sequence[tuple[int, str, Callable[[Any], Any]]]
    """Lists of such scalars, with the type of the collection."""
    checked: Sequence[tuple[int, str, bool, Callable[[Any, str], Any]]]
    """Other fields: whether they have presence; what reads a value."""
    token_ids: Sequence[tuple[int, str]]
    """Token ids; without a protobuf field, they are in the message itself."""
    required: Sequence[tuple[int, str, bool]]
    """Fields that must be set: whether they have presence."""


@functools.cache
def _read_plan(cls: type[Any], message: type[Message]) -> _ReadPlan:
    names = [field.name for field in wire_fields(cls)]
    keywords = None if _is_positional(cls) else names
    values: list[Any] = [_UNSET] * len(names)
    copied, copied_if_set, lists, checked, token_ids, required = [], [], [], [], [], []
    empty = message()
    for index, (field, descriptor) in enumerate(_field_pairs(cls, message)):
        kind, has_presence, proto = field.kind, descriptor.has_presence, descriptor.name
        if not field.required and keywords is None:
            values[index] = field.default
        if isinstance(kind, TokenIdsCodec):
            token_ids.append((index, proto if descriptor.message_type is not None else ""))
            continue
        zero, read = getattr(empty, proto), _reader(kind, descriptor)
        if field.required and (has_presence or isinstance(kind, EnumCodec)):
            required.append((index, proto, has_presence))
        elif field.required:
            values[index] = read(zero, proto)
        if isinstance(kind, ListCodec | SetCodec) and _is_scalar_list(kind.item, descriptor):
            collection: Callable[[Any], Any] = tuple if isinstance(kind, ListCodec) else frozenset
            lists.append((index, proto, collection))
        elif not _is_any_value_valid(kind, descriptor):
            checked.append((index, proto, has_presence, read))
        elif has_presence:
            copied_if_set.append((index, proto))
        elif field.required or field.default == zero:
            copied.append((index, proto))
        else:
            checked.append((index, proto, has_presence, read))
    return _ReadPlan(values, keywords, copied, copied_if_set, lists, checked, token_ids, required)


def _is_positional(cls: type[Any]) -> bool:
    """Returns whether the values of the fields on the wire can be passed by position. Values
    that are made for each object are not passed."""
    if not is_dataclass(cls):
        return True  # a named tuple
    declared = fields(cls)
    on_wire = [field.name for field in wire_fields(cls)]
    return [field.name for field in declared[: len(on_wire)]] == on_wire and not any(
        field.kw_only or field.default_factory is not MISSING for field in declared
    )


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


def _wrapped_list(wrapper: Message) -> Any:
    return getattr(wrapper, wrapper.DESCRIPTOR.fields[0].name)


def _enum_prefix(enum_type: EnumDescriptor) -> str:
    """Returns the prefix of the members: SESSION_ACTION_ from SESSION_ACTION_UNSPECIFIED."""
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
