"""The preprocessed request as protobuf (`kvmesh.types.v1`), both ways and without loss.

One walk over the fields that `common/request/preprocessed.py` declares. Names agree in both
places; the
exceptions: token ids are bytes, arbitrary JSON is text in a field `..._json`, and a list whose
absence or emptiness means something, or that stands in a map, is wrapped in a message that has
just this list.

Reading checks what proto3 cannot: required fields, ranges narrower than the wire's, enums that
are unspecified or unknown, finite numbers, JSON text, token ids given twice or cut off. Every
refusal is an InvalidRequest that names the protobuf field.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from common.errors import InvalidRequest
from common.request.preprocessed import (
    AnyJson,
    Choice,
    FinishReason,
    Kind,
    Many,
    MapOf,
    Maybe,
    Media,
    MediaRawUrl,
    MediaUrl,
    MultimodalData,
    Part,
    PreprocessedEmbeddingRequest,
    PreprocessedRequest,
    RdmaMediaDataDescriptor,
    SetOf,
    TokenIds,
    TokenMapOf,
    Tokens,
    TokenSpan,
    WireField,
    absolute_url,
    json_text,
    parsed_json,
    wire_fields,
)
from kvmesh.types.v1 import request_pb2

P = TypeVar("P")
M = TypeVar("M", bound=Message)


def to_proto(
    request: PreprocessedRequest, *, with_token_ids: bool = True
) -> request_pb2.PreprocessedRequest:
    """The message; without the prompt's token ids where these travel by themselves."""
    message = request_pb2.PreprocessedRequest()
    _fill(message, request)
    if not with_token_ids:
        message.ClearField("token_ids_le")
    return message


def from_proto(message: request_pb2.PreprocessedRequest) -> PreprocessedRequest:
    """The request; InvalidRequest names the field at fault."""
    return _value(PreprocessedRequest, message, "")


def embedding_to_proto(
    request: PreprocessedEmbeddingRequest,
) -> request_pb2.PreprocessedEmbeddingRequest:
    return part_to_proto(request, request_pb2.PreprocessedEmbeddingRequest())


def embedding_from_proto(
    message: request_pb2.PreprocessedEmbeddingRequest,
) -> PreprocessedEmbeddingRequest:
    """The request; InvalidRequest names the field at fault."""
    return _value(PreprocessedEmbeddingRequest, message, "")


def part_to_proto(part: object, message: M) -> M:
    """Fills the empty `message` of the same name with any dataclass of
    common.request.preprocessed."""
    assert message.DESCRIPTOR.name == type(part).__name__, "a part fills the message of its name"
    _fill(message, part)
    return message


def part_from_proto(cls: type[P], message: Message, field: str = "") -> P:
    """A `cls` from the message of the same name; InvalidRequest names fields from `field` on."""
    assert message.DESCRIPTOR.name == cls.__name__, "a part is read from the message of its name"
    return _value(cls, message, field)


def finish_reason_to_proto(reason: FinishReason) -> request_pb2.FinishReason.ValueType:
    return request_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")


def finish_reason_from_proto(
    value: request_pb2.FinishReason.ValueType, field: str = "finish_reason"
) -> FinishReason:
    """The reason; InvalidRequest names `field` where it is unspecified or unknown."""
    word: FinishReason = _word(
        Choice(FinishReason), request_pb2.FinishReason.DESCRIPTOR, value, field
    )
    return word


def _fill(message: Message, part: object) -> None:
    for one, target in _plan(type(part), message):
        value = getattr(part, one.name)
        # A required null is JSON that happens to be null; any other None is absence.
        if value is not None or one.required:
            _put(message, target, one.kind, value)


def _put(message: Message, target: FieldDescriptor, kind: Kind, value: Any) -> None:
    name = target.name
    match kind:
        case AnyJson():
            setattr(message, name, json_text(value, name))
        case Choice():
            setattr(message, name, _number(target.enum_type, value.name))
        case Tokens():
            _put_tokens(message if target.message_type is None else getattr(message, name), value)
        case Part():
            _put_part(getattr(message, name), value)
        case Many(item) | SetOf(item):
            if not target.is_repeated:
                getattr(message, name).SetInParent()
            values = sorted(value) if isinstance(kind, SetOf) else value
            _extend(_list_of(message, target), item, values)
        case MapOf(Many(item)):
            for key, values in value.items():
                _extend(_only_list(getattr(message, name)[key]), item, values)
        case MapOf() | TokenMapOf():
            getattr(message, name).update(value)
        case _:
            setattr(message, name, value)


def _extend(items: Any, kind: Kind, values: Iterable[Any]) -> None:
    match kind:
        case Part():
            for value in values:
                _fill(items.add(), value)
        case Maybe(Part()):
            for value in values:
                slot = items.add()
                if value is not None:
                    _put_part(slot.info, value)
        case Tokens():
            for value in values:
                _put_tokens(items.add(), value)
        case TokenSpan():
            for start, end in values:
                items.add(start=start, end=end)
        case Media():
            for value in values:
                _put_medium(items.add(), value)
        case _:
            items.extend(values)


def _put_part(message: Message, part: object) -> None:
    # An empty part is still a part.
    message.SetInParent()
    _fill(message, part)


def _put_tokens(message: Any, ids: TokenIds) -> None:
    message.token_ids_le = ids.le


def _put_medium(message: request_pb2.MultimodalData, medium: MultimodalData) -> None:
    match medium:
        case MediaUrl(url):
            message.url = url
        case MediaRawUrl(url):
            message.raw_url = url
        case RdmaMediaDataDescriptor():
            _put_part(message.decoded, medium)


def _value(cls: type[P], message: Message, path: str) -> P:
    fields: dict[str, Any] = {}
    for one, target in _plan(cls, message):
        where = f"{path}.{target.name}" if path else target.name
        if isinstance(one.kind, Tokens):
            fields[one.name] = _read_tokens(message, target, where)
        elif target.has_presence and not message.HasField(target.name):
            if one.required:
                raise InvalidRequest(f"{where} is required", where)
        else:
            fields[one.name] = _read(message, target, one.kind, where)
    return cls(**fields)


def _read(message: Message, target: FieldDescriptor, kind: Kind, path: str) -> Any:
    value = getattr(message, target.name)
    match kind:
        case AnyJson():
            return parsed_json(value, path)
        case Choice():
            return _word(kind, target.enum_type, value, path)
        case Part(cls):
            return _value(cls, value, path)
        case Many(item):
            return tuple(_items(_list_of(message, target), item, path))
        case SetOf(item):
            return frozenset(_items(_list_of(message, target), item, path))
        case MapOf(Many(item)):
            return {
                key: tuple(_items(_only_list(inner), item, f"{path}.{key}"))
                for key, inner in value.items()
            }
        case MapOf(item) | TokenMapOf(item):
            return {key: item.read(one, f"{path}.{key}") for key, one in value.items()}
        case _:
            return kind.read(value, path)


def _items(items: Any, kind: Kind, path: str) -> Iterator[Any]:
    for index, item in enumerate(items):
        where = f"{path}[{index}]"
        match kind:
            case Part(cls):
                yield _value(cls, item, where)
            case Maybe(Part(cls)):
                yield _value(cls, item.info, f"{where}.info") if item.HasField("info") else None
            case Tokens():
                yield _read_sequence(item, where)
            case TokenSpan():
                yield kind.read([item.start, item.end], where)
            case Media():
                yield _read_medium(item, where)
            case _:
                yield kind.read(item, where)


def _read_tokens(message: Message, target: FieldDescriptor, path: str) -> TokenIds:
    if target.message_type is None:
        return _read_sequence(message, path.removesuffix(target.name).rstrip("."))
    return _read_sequence(getattr(message, target.name), path)


def _read_sequence(message: Any, path: str) -> TokenIds:
    where = f"{path}.token_ids_le" if path else "token_ids_le"
    if not message.HasField("token_ids_le"):
        return TokenIds.of(message.token_ids)
    if message.token_ids:
        raise InvalidRequest(f"{where} and token_ids are both set: give one", where)
    if len(message.token_ids_le) % 4:
        raise InvalidRequest(
            f"{where} has {len(message.token_ids_le)} bytes, not a multiple of 4", where
        )
    return TokenIds(message.token_ids_le)


def _read_medium(message: request_pb2.MultimodalData, path: str) -> MultimodalData:
    match message.WhichOneof("data"):
        case "url":
            return MediaUrl(absolute_url(message.url, f"{path}.url"))
        case "raw_url":
            return MediaRawUrl(message.raw_url)
        case "decoded":
            return _value(RdmaMediaDataDescriptor, message.decoded, f"{path}.decoded")
        case None:
            raise InvalidRequest(f"{path} needs one of url, raw_url, decoded", path)


def _plan(cls: type[Any], message: Message) -> tuple[tuple[WireField, FieldDescriptor], ...]:
    """Each field with its place in the message; KeyError, so a bug, where there is none."""
    # mypy takes the hash of a class for that of its instances.
    return _planned(cls, type(message))  # type: ignore[arg-type]


@functools.cache
def _planned(
    cls: type[Any], message: type[Message]
) -> tuple[tuple[WireField, FieldDescriptor], ...]:
    fields = message.DESCRIPTOR.fields_by_name
    # The stubs offer the C implementation's twin of FieldDescriptor as well.
    return tuple((one, cast(FieldDescriptor, fields[one.proto])) for one in wire_fields(cls))


def _list_of(message: Message, target: FieldDescriptor) -> Any:
    """The repeated field, directly or inside the message that wraps it."""
    inner = getattr(message, target.name)
    return inner if target.is_repeated else _only_list(inner)


def _only_list(wrapper: Message) -> Any:
    return getattr(wrapper, wrapper.DESCRIPTOR.fields[0].name)


def _prefix(words: EnumDescriptor) -> str:
    """What proto style puts before each word: SESSION_ACTION_ from SESSION_ACTION_UNSPECIFIED."""
    return words.values_by_number[0].name.removesuffix("UNSPECIFIED")


def _number(words: EnumDescriptor | None, word: str) -> int:
    assert words is not None, "an enumeration is declared for a field that is one"
    return words.values_by_name[_prefix(words) + word].number


def _word(kind: Choice[Any], words: EnumDescriptor | None, number: int, path: str) -> Any:
    assert words is not None, "an enumeration is declared for a field that is one"
    found = words.values_by_number.get(number)
    if found is None:
        raise InvalidRequest(f"{path} has the unknown value {number}", path)
    if number == 0:
        raise InvalidRequest(f"{path} is unspecified", path)
    return kind.words[found.name.removeprefix(_prefix(words))]
