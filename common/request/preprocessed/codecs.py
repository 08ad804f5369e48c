"""Codecs between JSON and Python values, derived from the annotations of dataclasses and named
tuples. Pure.

A field is declared once: its annotation selects the codec (`codec_of`), its default and metadata
the presence rule. `common/wire/preprocessed.py` reads the same declarations for protobuf.

Presence of a key in JSON: *skip* omits it while the field has its default (the rule for a default
of None), *null* always writes it, *always* writes the value even if it is empty (the rule for all
other fields). On input a key may be missing if the field has a default; null selects the default
if null is not a value of the field. Unknown keys are ignored, because the writer may be newer.

pydantic's `TypeAdapter` does not read these classes: the protobuf codec needs the codecs of all
fields in any case, and most of pydantic's errors would need a text and a path of their own. Its
JSON parser accepts NaN and refuses 200 levels; a check before it takes the time that it saves.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import json
import math
import re
import reprlib
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from enum import StrEnum
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from common.errors import InvalidRequest
from common.request.preprocessed.token_ids import TOKEN_ID_MAX, TokenIds

# Any: mypy cannot infer through a recursive alias where JSON is only passed on.
JsonValue: TypeAlias = Any

P = TypeVar("P")
E = TypeVar("E", bound=StrEnum)


class FieldCodec(Protocol):
    """Converts the values of one field; Any, because each field has its own type."""

    def read(self, value: JsonValue, path: str) -> Any:
        """Returns the Python value. Raises InvalidRequest with `path` for any other kind."""

    def write(self, value: Any) -> JsonValue:
        """Returns the JSON value."""


class _IdentityCodec:
    """Base of codecs with equal Python and JSON values."""

    def write(self, value: Any) -> JsonValue:
        return value


def invalid_value(path: str, expected: str, value: object) -> InvalidRequest:
    """Returns the error for a value at `path` that is not as expected."""
    return InvalidRequest(
        f"{path or 'the value'} must be {expected}, not {_describe(value)}", path or None
    )


def _describe(value: object) -> str:
    match value:
        case None | bool():
            return json.dumps(value)
        case dict():
            return "an object"
        case list():
            return "a list"
        case _:
            return reprlib.repr(value)


@dataclass(frozen=True, slots=True)
class IntegerCodec(_IdentityCodec):
    low: int
    high: int

    def read(self, value: JsonValue, path: str) -> int:
        if type(value) is not int or not self.low <= value <= self.high:
            raise invalid_value(path, f"an integer from {self.low} to {self.high}", value)
        return value


@dataclass(frozen=True, slots=True)
class FloatCodec(_IdentityCodec):
    """A finite float; an integer in JSON is one too."""

    def read(self, value: JsonValue, path: str) -> float:
        if type(value) not in (int, float) or abs(value) > sys.float_info.max or value != value:
            raise invalid_value(path, "a finite number", value)
        return float(value)


@dataclass(frozen=True, slots=True)
class TextCodec(_IdentityCodec):
    """A string without lone surrogates, which UTF-8 cannot encode."""

    def read(self, value: JsonValue, path: str) -> str:
        if not isinstance(value, str):
            raise invalid_value(path, "a string", value)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid_value(path, "valid Unicode", value) from None
        return value


@dataclass(frozen=True, slots=True)
class BoolCodec(_IdentityCodec):
    def read(self, value: JsonValue, path: str) -> bool:
        if not isinstance(value, bool):
            raise invalid_value(path, "true or false", value)
        return value


@dataclass(frozen=True, slots=True)
class BytesCodec:
    """Bytes; base64 text in JSON."""

    def read(self, value: JsonValue, path: str) -> bytes:
        try:
            return base64.b64decode(TEXT.read(value, path), validate=True)
        except (binascii.Error, ValueError):
            raise invalid_value(path, "base64 text", value) from None

    def write(self, value: bytes) -> JsonValue:
        return base64.b64encode(value).decode()


@dataclass(frozen=True, slots=True)
class AnyJsonCodec(_IdentityCodec):
    """Any JSON value, not interpreted."""

    def read(self, value: JsonValue, path: str) -> JsonValue:
        dump_json_text(value, path)
        return value


@dataclass(frozen=True, slots=True)
class EnumCodec(Generic[E]):
    """A member of an enumeration, by value."""

    enum_type: type[E]

    def read(self, value: JsonValue, path: str) -> E:
        try:
            return self.enum_type(value)
        except ValueError:
            expected = "one of " + ", ".join(self.enum_type)
            raise invalid_value(path, expected, value) from None

    def write(self, value: E) -> JsonValue:
        return value.value


@dataclass(frozen=True, slots=True)
class TokenIdsCodec:
    def read(self, value: JsonValue, path: str) -> TokenIds:
        if not isinstance(value, list):
            raise invalid_value(path, "a list of token ids", value)
        for index, item in enumerate(value):
            if type(item) is not int or not 0 <= item <= TOKEN_ID_MAX:
                raise invalid_value(
                    f"{path}[{index}]", f"an integer from 0 to {TOKEN_ID_MAX}", item
                )
        return TokenIds.of(value)

    def write(self, value: TokenIds) -> JsonValue:
        return value.tolist()


@dataclass(frozen=True, slots=True)
class ObjectCodec(Generic[P]):
    """A nested wire dataclass, an object in JSON."""

    cls: type[P]

    def read(self, value: JsonValue, path: str) -> P:
        return from_json_value(self.cls, value, path)

    def write(self, value: P) -> JsonValue:
        return to_json_value(value)


@dataclass(frozen=True, slots=True)
class NullableCodec:
    """An element that may be null."""

    item: FieldCodec

    def read(self, value: JsonValue, path: str) -> Any:
        return None if value is None else self.item.read(value, path)

    def write(self, value: Any) -> JsonValue:
        return None if value is None else self.item.write(value)


@dataclass(frozen=True, slots=True)
class ListCodec:
    """A list in JSON, a tuple in Python."""

    item: FieldCodec

    def read(self, value: JsonValue, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise invalid_value(path, "a list", value)
        return tuple(self.item.read(item, f"{path}[{index}]") for index, item in enumerate(value))

    def write(self, value: tuple[Any, ...]) -> JsonValue:
        return [self.item.write(item) for item in value]


@dataclass(frozen=True, slots=True)
class SetCodec:
    """A list in JSON, written in ascending order; a frozenset in Python."""

    item: FieldCodec

    def read(self, value: JsonValue, path: str) -> frozenset[Any]:
        return frozenset(ListCodec(self.item).read(value, path))

    def write(self, value: frozenset[Any]) -> JsonValue:
        return [self.item.write(item) for item in sorted(value)]


@dataclass(frozen=True, slots=True)
class MapCodec:
    """An object in JSON with free keys. token_keys: decimal token ids, int in Python."""

    item: FieldCodec
    token_keys: bool = False

    def read(self, value: JsonValue, path: str) -> dict[str | int, Any]:
        if not isinstance(value, dict):
            raise invalid_value(path, "an object", value)
        return {
            self._read_key(key, path): self.item.read(item, f"{path}.{key}")
            for key, item in value.items()
        }

    def _read_key(self, key: str, path: str) -> str | int:
        if not self.token_keys:
            return TEXT.read(key, path)
        if not re.fullmatch(r"(0|[1-9][0-9]{0,9})", key) or int(key) > TOKEN_ID_MAX:
            raise invalid_value(f"{path}.{key}", "named by a token id", key)
        return int(key)

    def write(self, value: Mapping[Any, Any]) -> JsonValue:
        return {str(key): self.item.write(item) for key, item in value.items()}


@dataclass(frozen=True, slots=True)
class TokenSpanCodec:
    """A pair [start, end) in JSON and in Python."""

    def read(self, value: JsonValue, path: str) -> tuple[int, int]:
        match value:
            case [start, end] if type(start) is int is type(end) and 0 <= start <= end < 2**64:
                return start, end
        raise invalid_value(path, "a pair [start, end] with start <= end", value)

    def write(self, value: tuple[int, int]) -> JsonValue:
        return list(value)


TEXT = TextCodec()

U16: TypeAlias = Annotated[int, IntegerCodec(0, 2**16 - 1)]
U32: TypeAlias = Annotated[int, IntegerCodec(0, 2**32 - 1)]
U64: TypeAlias = Annotated[int, IntegerCodec(0, 2**64 - 1)]
I32: TypeAlias = Annotated[int, IntegerCodec(-(2**31), 2**31 - 1)]
I64: TypeAlias = Annotated[int, IntegerCodec(-(2**63), 2**63 - 1)]

_CODEC_BY_TYPE: Mapping[Any, FieldCodec] = {
    str: TEXT,
    bool: BoolCodec(),
    float: FloatCodec(),
    Any: AnyJsonCodec(),
    TokenIds: TokenIdsCodec(),
    tuple[int, int]: TokenSpanCodec(),
}


def codec_of(hint: Any) -> FieldCodec:
    """Returns the codec of an annotation. Raises TypeError if it has none."""
    if hint in _CODEC_BY_TYPE:
        return _CODEC_BY_TYPE[hint]
    arguments = get_args(hint)
    origin = get_origin(hint)
    if origin is Annotated:
        codec: FieldCodec = hint.__metadata__[0]
        return codec
    if origin in (Union, types.UnionType) and arguments[1:] == (types.NoneType,):
        return NullableCodec(codec_of(arguments[0]))
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return ListCodec(codec_of(arguments[0]))
    if origin is frozenset:
        return SetCodec(codec_of(arguments[0]))
    if origin is Mapping and arguments[0] in (str, int):
        return MapCodec(codec_of(arguments[1]), token_keys=arguments[0] is int)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return EnumCodec(hint)
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or _is_named_tuple(hint)):
        return ObjectCodec(hint)
    raise TypeError(f"{hint} has no codec")


PresenceRule = Literal["skip", "null", "always"]

# Metadata of fields: a presence rule that the default does not imply, or not on the wire at all.
SKIP: Mapping[str, Any] = {"rule": "skip"}
NULL: Mapping[str, Any] = {"rule": "null"}
LOCAL: Mapping[str, Any] = {"local": True}


def no_op(*values: object) -> Mapping[str, Any]:
    """Returns the metadata of a field in which `values` have no effect."""
    return {"no_op_values": values}


@dataclass(frozen=True, slots=True)
class WireField:
    """A field of a wire dataclass as the codecs see it.

    key: its JSON key. proto: its protobuf field. no_op_values: values that have no effect, so that
    an engine without the feature honours them.
    """

    name: str
    key: str
    proto: str
    kind: FieldCodec
    rule: PresenceRule
    no_op_values: tuple[object, ...]
    default: object
    required: bool

    @property
    def nullable(self) -> bool:
        """Whether null on input selects the default."""
        return self.default is None or (self.rule == "skip" and self.default in ((), {}))


def wire_fields(cls: type[Any]) -> tuple[WireField, ...]:
    """Returns the fields of `cls` that are on the wire, in the order of declaration."""
    # mypy takes the hash of a class for that of its instances.
    return _cached_wire_fields(cls)  # type: ignore[arg-type]


@functools.cache
def _cached_wire_fields(cls: type[Any]) -> tuple[WireField, ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        _wire_field(name, codec_of(hints[name]), default, metadata)
        for name, default, metadata in _declarations(cls)
        if "local" not in metadata
    )


def _declarations(cls: type[Any]) -> Iterator[tuple[str, object, Mapping[str, Any]]]:
    """Returns name, default (MISSING: none) and metadata of each field."""
    if _is_named_tuple(cls):
        for name in cls._fields:
            yield name, cls._field_defaults.get(name, MISSING), {}
        return
    for declared in dataclasses.fields(cls):
        factory = declared.default_factory
        default = declared.default if factory is MISSING else factory()
        yield declared.name, default, declared.metadata


def _is_named_tuple(cls: type[Any]) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def _wire_field(
    name: str, kind: FieldCodec, default: object, metadata: Mapping[str, Any]
) -> WireField:
    if isinstance(kind, NullableCodec):
        kind = kind.item  # None is absence, or null by the presence rule.
    proto = f"{name}_json" if isinstance(kind, AnyJsonCodec) else name
    return WireField(
        name=name,
        key=metadata.get("key", name),
        proto=metadata.get("proto", proto),
        kind=kind,
        rule=metadata.get("rule", "skip" if default is None else "always"),
        no_op_values=metadata.get("no_op_values", ()),
        default=default,
        required=default is MISSING,
    )


def from_json_value(cls: type[P], value: JsonValue, path: str = "") -> P:
    """Returns a `cls` from a parsed JSON object. Raises InvalidRequest with the invalid field."""
    if not isinstance(value, dict):
        raise invalid_value(path, "an object", value)
    fields: dict[str, object] = {}
    for field in wire_fields(cls):
        field_path = f"{path}.{field.key}" if path else field.key
        if field.key in value:
            raw_value = value[field.key]
            if raw_value is not None or not field.nullable:
                fields[field.name] = field.kind.read(raw_value, field_path)
        elif field.required:
            raise InvalidRequest(f"{field_path} is required", field_path)
    return cls(**fields)


def to_json_value(obj: object) -> JsonValue:
    """Returns the JSON object of a wire dataclass, for `json.dumps`."""
    json_object: dict[str, JsonValue] = {}
    for field in wire_fields(type(obj)):
        value = getattr(obj, field.name)
        if field.rule == "skip" and value == field.default:
            continue
        json_object[field.key] = None if value is None else field.kind.write(value)
    return json_object


def from_json(cls: type[P], text: str | bytes) -> P:
    """Returns a `cls` from JSON text. Raises InvalidRequest with the invalid field."""
    return from_json_value(cls, load_json_text(text, ""))


def to_json(obj: object) -> str:
    """Returns compact JSON text."""
    return dump_json_text(to_json_value(obj), "")


def load_json_text(text: str | bytes, path: str) -> JsonValue:
    """Returns the value of JSON text without NaN and Infinity. Raises InvalidRequest with
    `path`."""
    try:
        return json.loads(text, parse_constant=_parse_finite_float, parse_float=_parse_finite_float)
    except (ValueError, RecursionError) as error:
        name = path or "the request"
        raise InvalidRequest(f"{name} is not valid JSON: {error}", path or None) from None


def dump_json_text(value: JsonValue, path: str) -> str:
    """Returns compact RFC 8259 text. Raises InvalidRequest with `path` for a value outside JSON."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{path or 'the value'} is not JSON: {error}", path or None) from None


def _parse_finite_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:40]} is not a finite number")
    return number
