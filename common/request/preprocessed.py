"""The preprocessed request: what the frontend hands to a worker, as plain Python values.

The same types have two wire forms: JSON here, protobuf in `common/wire/preprocessed.py`. Both are
driven by the `WireSpec` in each field's metadata, so that a field is declared once. The rules of
the
JSON form: *skip* leaves a key out while the field has its default, *null* always writes the key,
*always* writes the value even when it is empty. On input a key may be missing wherever the field
has a default; `null` means the default where nothing else could be meant. Unknown keys are
ignored on input, because the writer may be newer than the reader.

Invariants: everything but `PreprocessedRequest`, `RoutingHints` and `RequestTracker` is frozen;
collections are tuples, frozensets and never-changed dicts; arbitrary JSON is kept as parsed and
not interpreted. Pure: no I/O, no clock.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import reprlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from enum import StrEnum
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, overload
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from common.errors import InvalidRequest

# Any: mypy cannot infer through a recursive alias in the places where JSON is only carried.
JsonValue: TypeAlias = Any
TokenIdType: TypeAlias = int
TOKEN_ID_MAX = 2**32 - 1
# Longer than any scheme, user and host that a fetcher accepts.
URL_HEAD_CHARS_MAX = 2048

P = TypeVar("P")
E = TypeVar("E", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class TokenIds(Sequence[int]):
    """Token ids (u32), kept as 4 bytes little endian each: compared, hashed and sent as they are.

    `array` is a read-only view of shape [tokens], dtype uint32, without a copy.
    """

    little_endian: bytes = b""

    def __post_init__(self) -> None:
        assert len(self.little_endian) % 4 == 0, "token ids are 4 bytes each"

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        """The ids as a value; OverflowError or TypeError for one that is not a u32."""
        if isinstance(ids, TokenIds):
            return ids
        if isinstance(ids, np.ndarray):
            return cls(_check_u32_range(ids).astype("<u4").tobytes())
        return cls(np.asarray(array("I", ids)).astype("<u4").tobytes())

    @property
    def array(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self.little_endian, dtype="<u4")

    def tolist(self) -> list[int]:
        ids: list[int] = self.array.tolist()
        return ids

    def extended(self, ids: Iterable[int]) -> TokenIds:
        """These ids followed by `ids`."""
        return TokenIds(self.little_endian + TokenIds.of(ids).little_endian)

    def __len__(self) -> int:
        return len(self.little_endian) // 4

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...
    def __getitem__(self, index: int | slice) -> int | TokenIds:
        if isinstance(index, slice):
            return TokenIds(self.array[index].tobytes())
        return int(self.array[index])

    def __repr__(self) -> str:
        return f"TokenIds({reprlib.repr(self[:7].tolist())}, len={len(self)})"


def _check_u32_range(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > TOKEN_ID_MAX):
        raise OverflowError(f"token ids are integers from 0 to {TOKEN_ID_MAX}")
    return ids


class FieldCodec(Protocol):
    """Any: what comes out of `read` is as various as the fields are."""

    def read(self, value: JsonValue, path: str) -> Any:
        """The Python value; InvalidRequest names `path` where it is not of this kind."""

    def write(self, value: Any) -> JsonValue:
        """The JSON value."""


def _invalid_value(path: str, expected: str, value: object) -> InvalidRequest:
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
class IntegerCodec:
    low: int
    high: int

    def read(self, value: JsonValue, path: str) -> int:
        if type(value) is not int or not self.low <= value <= self.high:
            raise _invalid_value(path, f"an integer from {self.low} to {self.high}", value)
        return value

    def write(self, value: int) -> JsonValue:
        return value


@dataclass(frozen=True, slots=True)
class FloatCodec:
    """A finite float; an integer in JSON is one too."""

    def read(self, value: JsonValue, path: str) -> float:
        if type(value) not in (int, float) or abs(value) > sys.float_info.max or value != value:
            raise _invalid_value(path, "a finite number", value)
        return float(value)

    def write(self, value: float) -> JsonValue:
        return value


@dataclass(frozen=True, slots=True)
class TextCodec:
    """A string that UTF-8 can carry, so not one with half a surrogate pair."""

    def read(self, value: JsonValue, path: str) -> str:
        if not isinstance(value, str):
            raise _invalid_value(path, "a string", value)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _invalid_value(path, "valid Unicode", value) from None
        return value

    def write(self, value: str) -> JsonValue:
        return value


@dataclass(frozen=True, slots=True)
class BoolCodec:
    def read(self, value: JsonValue, path: str) -> bool:
        if not isinstance(value, bool):
            raise _invalid_value(path, "true or false", value)
        return value

    def write(self, value: bool) -> JsonValue:
        return value


@dataclass(frozen=True, slots=True)
class AnyJsonCodec:
    """Any JSON value, carried and not interpreted."""

    def read(self, value: JsonValue, path: str) -> JsonValue:
        dump_json_text(value, path)
        return value

    def write(self, value: JsonValue) -> JsonValue:
        return value


@dataclass(frozen=True, slots=True)
class EnumCodec(Generic[E]):
    """One word of an enumeration."""

    enum_type: type[E]

    def read(self, value: JsonValue, path: str) -> E:
        try:
            return self.enum_type(value)
        except ValueError:
            expected = "one of " + ", ".join(self.enum_type)
            raise _invalid_value(path, expected, value) from None

    def write(self, value: E) -> JsonValue:
        return value.value


@dataclass(frozen=True, slots=True)
class TokenIdsCodec:
    def read(self, value: JsonValue, path: str) -> TokenIds:
        if not isinstance(value, list):
            raise _invalid_value(path, "a list of token ids", value)
        for index, item in enumerate(value):
            if type(item) is not int or not 0 <= item <= TOKEN_ID_MAX:
                raise _invalid_value(
                    f"{path}[{index}]", f"an integer from 0 to {TOKEN_ID_MAX}", item
                )
        return TokenIds.of(value)

    def write(self, value: TokenIds) -> JsonValue:
        return value.tolist()


@dataclass(frozen=True, slots=True)
class ObjectCodec(Generic[P]):
    """A nested dataclass, an object in JSON."""

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
            raise _invalid_value(path, "a list", value)
        return tuple(self.item.read(one, f"{path}[{index}]") for index, one in enumerate(value))

    def write(self, value: tuple[Any, ...]) -> JsonValue:
        return [self.item.write(one) for one in value]


@dataclass(frozen=True, slots=True)
class SetCodec:
    """A list in JSON, written in ascending order; a frozenset in Python."""

    item: FieldCodec

    def read(self, value: JsonValue, path: str) -> frozenset[Any]:
        return frozenset(ListCodec(self.item).read(value, path))

    def write(self, value: frozenset[Any]) -> JsonValue:
        return [self.item.write(one) for one in sorted(value)]


@dataclass(frozen=True, slots=True)
class MapCodec:
    """An object in JSON with free keys."""

    item: FieldCodec

    def read(self, value: JsonValue, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _invalid_value(path, "an object", value)
        return {
            TextCodec().read(key, path): self.item.read(one, f"{path}.{key}")
            for key, one in value.items()
        }

    def write(self, value: Mapping[str, Any]) -> JsonValue:
        return {key: self.item.write(one) for key, one in value.items()}


@dataclass(frozen=True, slots=True)
class TokenMapCodec:
    """An object in JSON whose keys are token ids in decimal; a dict by id in Python."""

    item: FieldCodec

    def read(self, value: JsonValue, path: str) -> dict[int, Any]:
        if not isinstance(value, dict):
            raise _invalid_value(path, "an object", value)
        return {
            self._parse_token_id(key, path): self.item.read(one, f"{path}.{key}")
            for key, one in value.items()
        }

    def _parse_token_id(self, key: str, path: str) -> int:
        if not re.fullmatch(r"(0|[1-9][0-9]{0,9})", key) or int(key) > TOKEN_ID_MAX:
            raise _invalid_value(f"{path}.{key}", "named by a token id", key)
        return int(key)

    def write(self, value: Mapping[int, Any]) -> JsonValue:
        return {str(key): self.item.write(one) for key, one in value.items()}


@dataclass(frozen=True, slots=True)
class TokenSpanCodec:
    """A pair [start, end) in JSON and in Python."""

    def read(self, value: JsonValue, path: str) -> tuple[int, int]:
        match value:
            case [start, end] if type(start) is int is type(end) and 0 <= start <= end < 2**64:
                return start, end
        raise _invalid_value(path, "a pair [start, end] with start <= end", value)

    def write(self, value: tuple[int, int]) -> JsonValue:
        return list(value)


@dataclass(frozen=True, slots=True)
class MediaCodec:
    """One medium: an object with exactly one tag."""

    def read(self, value: JsonValue, path: str) -> MultimodalData:
        match value:
            case {"Url": url, **rest} if not rest:
                return MediaUrl(check_absolute_url(TEXT.read(url, f"{path}.Url"), f"{path}.Url"))
            case {"RawUrl": url, **rest} if not rest:
                return MediaRawUrl(TEXT.read(url, f"{path}.RawUrl"))
            case {"Decoded": decoded, **rest} if not rest:
                return from_json_value(RdmaMediaDataDescriptor, decoded, f"{path}.Decoded")
        raise _invalid_value(path, "an object with one key of Url, RawUrl, Decoded", value)

    def write(self, value: MultimodalData) -> JsonValue:
        match value:
            case MediaUrl(url) | MediaRawUrl(url):
                return {"Url": url}
            case RdmaMediaDataDescriptor():
                return {"Decoded": to_json_value(value)}


TEXT = TextCodec()
BOOL = BoolCodec()
FLOAT = FloatCodec()
ANY_JSON = AnyJsonCodec()
TOKEN_IDS = TokenIdsCodec()
U16 = IntegerCodec(0, 2**16 - 1)
U32 = IntegerCodec(0, 2**32 - 1)
U64 = IntegerCodec(0, 2**64 - 1)
I32 = IntegerCodec(-(2**31), 2**31 - 1)
I64 = IntegerCodec(-(2**63), 2**63 - 1)


def check_absolute_url(url: str, path: str) -> str:
    """`url` if it is absolute and could be fetched; InvalidRequest naming `path` otherwise."""
    # Only the head is parsed: urlsplit keeps what it was given in a cache, and a data: URL is big.
    url_head = url[:URL_HEAD_CHARS_MAX]
    try:
        parts = urlsplit(url_head)
        # Reading the port is what makes urlsplit check it.
        has_host = bool(parts.hostname) and (parts.port is None or parts.port >= 0)
    except ValueError:
        raise _invalid_value(path, "a valid URL", url_head) from None
    needs_host = parts.scheme in ("http", "https", "ws", "wss", "ftp")
    is_absolute = bool(parts.scheme) and (has_host or bool(parts.path and not needs_host))
    if not is_absolute or any(whitespace in url for whitespace in " \t\r\n\0"):
        raise _invalid_value(path, "a valid URL", url_head)
    return url


PresenceRule = Literal["skip", "null", "always"]


@dataclass(frozen=True, slots=True)
class WireSpec:
    """How one field travels.

    key: its JSON key, where that is not its name. proto: its protobuf field, likewise.
    neutral: values that ask for nothing, so that an engine without the feature honours them.
    """

    kind: FieldCodec
    rule: PresenceRule
    key: str | None = None
    proto: str | None = None
    no_op_values: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class WireField:
    """A field of a wire dataclass as the codecs see it."""

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
        """Whether null on input can only mean the default."""
        return self.default is None or (self.rule == "skip" and self.default in ((), {}))


def _optional(
    kind: FieldCodec, *no_op_values: object, key: str | None = None, proto: str | None = None
) -> dict[str, WireSpec]:
    return {"wire": WireSpec(kind, "skip", key, proto, no_op_values)}


def _nullable(kind: FieldCodec) -> dict[str, WireSpec]:
    return {"wire": WireSpec(kind, "null")}


def _always(kind: FieldCodec) -> dict[str, WireSpec]:
    return {"wire": WireSpec(kind, "always")}


def wire_fields(cls: type[Any]) -> tuple[WireField, ...]:
    """The fields of `cls` that travel, in the order of declaration."""
    # mypy takes the hash of a class for that of its instances.
    return _cached_wire_fields(cls)  # type: ignore[arg-type]


@functools.cache
def _cached_wire_fields(cls: type[Any]) -> tuple[WireField, ...]:
    return tuple(
        _wire_field(one, one.metadata["wire"])
        for one in dataclasses.fields(cls)
        if "wire" in one.metadata
    )


def _wire_field(one: dataclasses.Field[Any], wire: WireSpec) -> WireField:
    default = one.default
    if one.default_factory is not MISSING:
        default = one.default_factory()
    suffix = "_json" if isinstance(wire.kind, AnyJsonCodec) else ""
    return WireField(
        name=one.name,
        key=wire.key or one.name,
        proto=wire.proto or one.name + suffix,
        kind=wire.kind,
        rule=wire.rule,
        no_op_values=wire.no_op_values,
        default=default,
        required=default is MISSING,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParams:
    """Latency targets in milliseconds for a router of routers (`nvext.router`).

    Engines never read it.
    """

    ttft_target: float | None = field(default=None, metadata=_optional(FLOAT))
    itl_target: float | None = field(default=None, metadata=_optional(FLOAT))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConstraints:
    """Taints of a worker: all of `required_taints` must match, `preferred_taints` weigh."""

    required_taints: frozenset[str] = field(default=frozenset(), metadata=_always(SetCodec(TEXT)))
    preferred_taints: Mapping[str, float] = field(
        default_factory=dict, metadata=_always(MapCodec(FLOAT))
    )


class SessionAction(StrEnum):
    """What a request does to its session's binding to a worker."""

    OPEN = "open"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class SessionControl:
    """Keeps the requests of one session on one worker."""

    session_id: str = field(metadata=_always(TEXT))
    action: SessionAction | None = field(default=None, metadata=_optional(EnumCodec(SessionAction)))


@dataclass(slots=True, kw_only=True)
class RoutingHints:
    """Where a request may or must run; every part is optional. Mutable: see `routing_mut`."""

    backend_instance_id: int | None = field(default=None, metadata=_optional(U64))
    prefill_worker_id: int | None = field(default=None, metadata=_optional(U64))
    decode_worker_id: int | None = field(default=None, metadata=_optional(U64))
    dp_rank: int | None = field(default=None, metadata=_optional(U32))
    prefill_dp_rank: int | None = field(default=None, metadata=_optional(U32))
    expected_output_tokens: int | None = field(default=None, metadata=_optional(U32))
    lora_name: str | None = field(default=None, metadata=_optional(TEXT, ""))
    # Seconds; positive moves the request forward in the queue.
    priority_jump: float | None = field(default=None, metadata=_optional(FLOAT))
    priority: int | None = field(default=None, metadata=_optional(I32))
    # None lets every worker be scored, the empty set none.
    allowed_worker_ids: frozenset[int] | None = field(
        default=None, metadata=_optional(SetCodec(U64))
    )
    routing_constraints: RoutingConstraints | None = field(
        default=None, metadata=_optional(ObjectCodec(RoutingConstraints))
    )
    session_control: SessionControl | None = field(
        default=None, metadata=_optional(ObjectCodec(SessionControl))
    )

    @staticmethod
    def builder() -> Builder[RoutingHints]:
        return Builder(RoutingHints, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfigOverride:
    """Knobs of the router's cost for one request; None leaves the router's own."""

    overlap_score_credit: float | None = field(default=None, metadata=_optional(FLOAT))
    prefill_load_scale: float | None = field(default=None, metadata=_optional(FLOAT))
    overlap_score_weight: float | None = field(default=None, metadata=_optional(FLOAT))
    router_temperature: float | None = field(default=None, metadata=_optional(FLOAT))
    assume_kv_reuse: bool | None = field(default=None, metadata=_optional(BOOL))
    track_prefill_tokens: bool | None = field(default=None, metadata=_optional(BOOL))
    shared_cache_multiplier: float | None = field(default=None, metadata=_optional(FLOAT))


@dataclass(frozen=True, slots=True)
class BootstrapInfo:
    """Where prefill and decode of one request meet; the room is unique per transfer."""

    bootstrap_host: str = field(metadata=_always(TEXT))
    bootstrap_port: int = field(metadata=_always(U16))
    bootstrap_room: int = field(metadata=_always(U64))


@dataclass(frozen=True, slots=True)
class TraceLink:
    """Points from a run of the request to the `engine.generate` span that went before it."""

    trace_id: str = field(metadata=_always(TEXT))
    span_id: str = field(metadata=_always(TEXT))

    def ids(self) -> tuple[int, int] | None:
        """(trace id, span id) as numbers; None where they are malformed or zero.

        A malformed link is ignored, never a reason to fail a request; the caller logs it.
        """
        if not re.fullmatch(r"[0-9a-fA-F]{32}", self.trace_id):
            return None
        if not re.fullmatch(r"[0-9a-fA-F]{16}", self.span_id):
            return None
        trace_id, span_id = int(self.trace_id, 16), int(self.span_id, 16)
        return (trace_id, span_id) if trace_id and span_id else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokensDetails:
    """What the prompt's tokens were made of; None is not reported."""

    cached_tokens: int | None = field(default=None, metadata=_optional(U32))
    audio_tokens: int | None = field(default=None, metadata=_optional(U32))
    cache_write_tokens: int | None = field(default=None, metadata=_optional(U32))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTokensDetails:
    """What the answer's tokens were made of; None is not reported."""

    reasoning_tokens: int | None = field(default=None, metadata=_optional(U32))
    accepted_prediction_tokens: int | None = field(default=None, metadata=_optional(U32))
    rejected_prediction_tokens: int | None = field(default=None, metadata=_optional(U32))
    audio_tokens: int | None = field(default=None, metadata=_optional(U32))


@dataclass(frozen=True, slots=True)
class CompletionUsage:
    """Token counts of one request, each at most 2^32-1."""

    prompt_tokens: int = field(metadata=_always(U32))
    completion_tokens: int = field(metadata=_always(U32))
    total_tokens: int = field(metadata=_always(U32))
    prompt_tokens_details: PromptTokensDetails | None = field(
        default=None, metadata=_optional(ObjectCodec(PromptTokensDetails))
    )
    completion_tokens_details: CompletionTokensDetails | None = field(
        default=None, metadata=_optional(ObjectCodec(CompletionTokensDetails))
    )


def usage(prompt: int, completion: int) -> CompletionUsage:
    """The counts and their sum, each saturating at 2^32-1, without details."""
    top = U32.high
    return CompletionUsage(min(prompt, top), min(completion, top), min(prompt + completion, top))


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What prefill left for decode; `disaggregated_params` is any JSON, passed on unread."""

    disaggregated_params: JsonValue = field(metadata=_always(ANY_JSON))
    prompt_tokens_details: PromptTokensDetails | None = field(
        default=None, metadata=_optional(ObjectCodec(PromptTokensDetails))
    )


@dataclass(frozen=True, slots=True)
class MmObject:
    """One medium inside a block: its content's hash and the token ranges [start, end)."""

    mm_hash: int = field(metadata=_always(U64))
    offsets: tuple[tuple[int, int], ...] = field(
        default=(), metadata=_always(ListCodec(TokenSpanCodec()))
    )


@dataclass(frozen=True, slots=True)
class BlockExtraInfo:
    """The media that touch one block, in prompt order."""

    mm_objects: tuple[MmObject, ...] = field(
        default=(), metadata=_always(ListCodec(ObjectCodec(MmObject)))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MmRoutingInfo:
    """Identity of a multimodal prompt for routing, never executed.

    block_mm_infos[i] belongs to block i of routing_token_ids; None where it has no media.
    """

    routing_token_ids: TokenIds = field(default=TokenIds(), metadata=_always(TOKEN_IDS))
    block_mm_infos: tuple[BlockExtraInfo | None, ...] = field(
        default=(), metadata=_always(ListCodec(NullableCodec(ObjectCodec(BlockExtraInfo))))
    )


@dataclass(frozen=True, slots=True)
class NixlDescriptor:
    """A registered range of another process's memory; size in bytes."""

    addr: int = field(metadata=_always(U64))
    size: int = field(metadata=_always(U64))
    mem_type: str = field(metadata=_always(TEXT))
    device_id: int = field(metadata=_always(U64))


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaMediaDataDescriptor:
    """A decoded medium to be fetched by RDMA; shape is outermost first."""

    nixl_metadata: str = field(metadata=_always(TEXT))
    nixl_descriptor: NixlDescriptor = field(metadata=_always(ObjectCodec(NixlDescriptor)))
    shape: tuple[int, ...] = field(default=(), metadata=_always(ListCodec(U64)))
    dtype: str = field(metadata=_always(TEXT))
    metadata: JsonValue = field(default=None, metadata=_optional(ANY_JSON))
    content_hash: str | None = field(default=None, metadata=_optional(TEXT))


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """A medium at a URL that was found valid (`check_absolute_url`)."""

    url: str


@dataclass(frozen=True, slots=True)
class MediaRawUrl:
    """A medium at a URL nobody parsed.

    JSON writes it under the tag `Url` and reads it under `RawUrl`: a reader sees an ordinary URL,
    and only a writer that means it can smuggle in one that is not valid.
    """

    url: str


MultimodalData: TypeAlias = MediaUrl | MediaRawUrl | RdmaMediaDataDescriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """The agent session a request belongs to."""

    session_type_id: str | None = field(default=None, metadata=_optional(TEXT))
    session_id: str | None = field(default=None, metadata=_optional(TEXT))
    trajectory_id: str | None = field(default=None, metadata=_optional(TEXT))
    parent_trajectory_id: str | None = field(default=None, metadata=_optional(TEXT))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """When generation ends; the first condition to hold wins.

    Hidden stop tokens end the answer and are left out of it, visible ones are its last token.
    """

    max_tokens: int | None = field(default=None, metadata=_optional(U32))
    stop: tuple[str, ...] = field(default=(), metadata=_optional(ListCodec(TEXT)))
    stop_token_ids_hidden: tuple[int, ...] = field(default=(), metadata=_optional(ListCodec(U32)))
    stop_token_ids_visible: tuple[int, ...] = field(default=(), metadata=_optional(ListCodec(U32)))
    min_tokens: int | None = field(default=None, metadata=_optional(U32, 0))
    ignore_eos: bool | None = field(default=None, metadata=_optional(BOOL, False))
    max_thinking_tokens: int | None = field(default=None, metadata=_optional(U32))


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecoding:
    """A constraint on the text: exactly one of json, regex, choice, grammar, structural_tag.

    InvalidRequest for none, for more, and for a choice without texts.
    """

    json: JsonValue = field(default=None, metadata=_optional(ANY_JSON, proto="json_schema_json"))
    regex: str | None = field(default=None, metadata=_optional(TEXT))
    choice: tuple[str, ...] | None = field(default=None, metadata=_optional(ListCodec(TEXT)))
    grammar: str | None = field(default=None, metadata=_optional(TEXT))
    structural_tag: JsonValue = field(default=None, metadata=_optional(ANY_JSON))
    backend: str | None = field(default=None, metadata=_optional(TEXT))
    whitespace_pattern: str | None = field(default=None, metadata=_optional(TEXT))

    def __post_init__(self) -> None:
        constraints = (self.json, self.regex, self.choice, self.grammar, self.structural_tag)
        if sum(one is not None for one in constraints) != 1:
            raise InvalidRequest(
                "guided decoding needs exactly one of json, regex, choice, grammar, structural_tag",
                "sampling_options.guided_decoding",
            )
        if self.choice == ():
            raise InvalidRequest(
                "guided decoding by choice needs at least one text",
                "sampling_options.guided_decoding.choice",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen; None leaves it to the engine."""

    n: int | None = field(default=None, metadata=_optional(U32, 1))
    best_of: int | None = field(default=None, metadata=_optional(U32, 1))
    presence_penalty: float | None = field(default=None, metadata=_optional(FLOAT, 0))
    frequency_penalty: float | None = field(default=None, metadata=_optional(FLOAT, 0))
    repetition_penalty: float | None = field(default=None, metadata=_optional(FLOAT, 1))
    temperature: float | None = field(default=None, metadata=_optional(FLOAT))
    top_p: float | None = field(default=None, metadata=_optional(FLOAT, 1))
    top_k: int | None = field(default=None, metadata=_optional(I32, -1, 0))
    min_p: float | None = field(default=None, metadata=_optional(FLOAT, 0))
    use_beam_search: bool | None = field(default=None, metadata=_optional(BOOL, False))
    length_penalty: float | None = field(default=None, metadata=_optional(FLOAT, 1))
    seed: int | None = field(default=None, metadata=_optional(I64))
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata=_optional(TokenMapCodec(FLOAT))
    )
    guided_decoding: GuidedDecoding | None = field(
        default=None, metadata=_optional(ObjectCodec(GuidedDecoding))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What the answer carries beside token ids; `logprobs` counts alternatives, 0 is a value."""

    logprobs: int | None = field(default=None, metadata=_optional(U32))
    prompt_logprobs: int | None = field(default=None, metadata=_optional(U32))
    skip_special_tokens: bool | None = field(default=None, metadata=_optional(BOOL, True))
    formatted_prompt: bool | None = field(default=None, metadata=_optional(BOOL, False))
    include_stop_str_in_output: bool | None = field(default=None, metadata=_optional(BOOL, False))
    return_tokens_as_token_ids: bool | None = field(default=None, metadata=_optional(BOOL, False))


class FinishReason(StrEnum):
    """Why a stream ended."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"
    ERROR = "error"
    CANCELLED = "cancelled"
    CONTENT_FILTER = "content_filter"

    @classmethod
    def _missing_(cls, value: object) -> FinishReason | None:
        return cls.CANCELLED if value == "abort" else None

    @property
    def openai(self) -> Literal["stop", "length", "content_filter"] | None:
        """OpenAI's word; None for an end that OpenAI has no word for and tells as an error."""
        match self:
            case FinishReason.EOS | FinishReason.STOP:
                return "stop"
            case FinishReason.LENGTH:
                return "length"
            case FinishReason.CONTENT_FILTER:
                return "content_filter"
            case _:
                return None


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """An alternative token; natural logarithm."""

    token_id: int = field(metadata=_always(U32))
    logprob: float = field(metadata=_always(FLOAT))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability (natural) of one token, and the likeliest at its place, best first."""

    token_id: int = field(metadata=_always(U32))
    logprob: float = field(metadata=_always(FLOAT))
    top: tuple[TopLogprob, ...] = field(
        default=(), metadata=_always(ListCodec(ObjectCodec(TopLogprob)))
    )


TimingPoint = Literal["prefill_started", "prefill_finished", "first_token", "finished"]


@dataclass(slots=True, kw_only=True)
class RequestTracker:
    """The times of one request inside one process; it never travels.

    received_ms is wall clock since the Unix epoch; everything else is seconds of one monotonic
    clock, given by the caller. The first mark of a point counts, so a retry does not move it.
    """

    received_ms: float
    received_s: float
    prompt_blocks: int | None = None
    cached_blocks: int | None = None
    marks: dict[TimingPoint, float] = field(default_factory=dict)

    def mark(self, point: TimingPoint, now: float) -> None:
        assert now >= self.received_s, "the clock of a tracker never runs backwards"
        self.marks.setdefault(point, now)

    def timing(self) -> dict[str, float]:
        """What is known so far, under the names of `nvext.timing`, in milliseconds.

        prefill_time_ms runs to the first token where nobody marked the end of prefill.
        """
        marks = self.marks
        prefill_end = marks.get("prefill_finished", marks.get("first_token"))
        spans = {
            "prefill_wait_time_ms": (self.received_s, marks.get("prefill_started")),
            "prefill_time_ms": (marks.get("prefill_started"), prefill_end),
            "ttft_ms": (self.received_s, marks.get("first_token")),
            "total_time_ms": (self.received_s, marks.get("finished")),
        }
        timing = {"request_received_ms": self.received_ms}
        for name, (start, end) in spans.items():
            if start is not None and end is not None:
                timing[name] = (end - start) * 1e3
        if self.prompt_blocks and self.cached_blocks is not None:
            timing["kv_hit_rate"] = self.cached_blocks / self.prompt_blocks
        return timing


@dataclass(slots=True, kw_only=True)
class PreprocessedRequest:
    """One request for generation after templating and tokenization. Mutable; compared by value.

    `tracker` is local to the process: neither form carries it, equality ignores it. `is_probe` is
    set by the worker's own health check and by nobody else.
    """

    model: str = field(default="", metadata=_always(TEXT))
    token_ids: TokenIds = field(metadata=_always(TOKEN_IDS))
    prompt_embeds: str | None = field(default=None, metadata=_optional(TEXT))
    multi_modal_data: Mapping[str, tuple[MultimodalData, ...]] = field(
        default_factory=dict, metadata=_optional(MapCodec(ListCodec(MediaCodec())))
    )
    mm_routing_info: MmRoutingInfo | None = field(
        default=None, metadata=_optional(ObjectCodec(MmRoutingInfo))
    )
    stop_conditions: StopConditions = field(
        default=StopConditions(), metadata=_always(ObjectCodec(StopConditions))
    )
    sampling_options: SamplingOptions = field(
        default=SamplingOptions(), metadata=_always(ObjectCodec(SamplingOptions))
    )
    output_options: OutputOptions = field(
        default=OutputOptions(), metadata=_always(ObjectCodec(OutputOptions))
    )
    eos_token_ids: tuple[int, ...] = field(default=(), metadata=_always(ListCodec(U32)))
    mdc_sum: str | None = field(default=None, metadata=_nullable(TEXT))
    annotations: tuple[str, ...] = field(default=(), metadata=_always(ListCodec(TEXT)))
    routing: RoutingHints | None = field(
        default=None, metadata=_optional(ObjectCodec(RoutingHints))
    )
    router_config_override: RouterConfigOverride | None = field(
        default=None, metadata=_nullable(ObjectCodec(RouterConfigOverride))
    )
    prefill_result: PrefillResult | None = field(
        default=None, metadata=_optional(ObjectCodec(PrefillResult))
    )
    migration_link: TraceLink | None = field(
        default=None, metadata=_optional(ObjectCodec(TraceLink))
    )
    bootstrap_info: BootstrapInfo | None = field(
        default=None, metadata=_optional(ObjectCodec(BootstrapInfo))
    )
    extra_args: JsonValue = field(default=None, metadata=_optional(ANY_JSON))
    router: RouterParams | None = field(default=None, metadata=_optional(ObjectCodec(RouterParams)))
    agent_context: AgentContext | None = field(
        default=None, metadata=_optional(ObjectCodec(AgentContext))
    )
    mm_processor_kwargs: JsonValue = field(default=None, metadata=_optional(ANY_JSON))
    request_timestamp_ms: float | None = field(default=None, metadata=_optional(FLOAT))
    is_probe: bool = field(default=False, metadata=_optional(BOOL, key="_HEALTH_CHECK"))
    tracker: RequestTracker | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def builder() -> Builder[PreprocessedRequest]:
        return Builder(
            PreprocessedRequest,
            ("model", "token_ids", "stop_conditions", "sampling_options", "output_options"),
        )

    def has_annotation(self, annotation: str) -> bool:
        return annotation in self.annotations

    def get_annotation_value(self, key: str) -> str | None:
        """What follows the first colon of the first annotation that starts with `key:`."""
        for annotation in self.annotations:
            if annotation.startswith(f"{key}:"):
                return annotation.split(":", 1)[1]
        return None

    def routing_mut(self) -> RoutingHints:
        """The routing hints to write to, created where there were none."""
        if self.routing is None:
            self.routing = RoutingHints()
        return self.routing

    def block_mm_routing_info(
        self,
    ) -> tuple[TokenIds, tuple[BlockExtraInfo | None, ...] | None]:
        """The tokens to route by, and the media of their blocks where the prompt has any."""
        info = self.mm_routing_info
        if info is not None and info.routing_token_ids:
            return info.routing_token_ids, info.block_mm_infos
        return self.token_ids, None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessedEmbeddingRequest:
    """One request for embeddings after tokenization; one `token_ids` entry per text."""

    token_ids: tuple[TokenIds, ...] = field(metadata=_always(ListCodec(TOKEN_IDS)))
    model: str = field(metadata=_always(TEXT))
    encoding_format: str | None = field(default=None, metadata=_nullable(TEXT))
    dimensions: int | None = field(default=None, metadata=_nullable(U32))
    mdc_sum: str | None = field(default=None, metadata=_nullable(TEXT))
    annotations: tuple[str, ...] = field(metadata=_always(ListCodec(TEXT)))

    @staticmethod
    def builder() -> Builder[PreprocessedEmbeddingRequest]:
        return Builder(PreprocessedEmbeddingRequest, ("token_ids", "model", "annotations"))

    def has_annotation(self, annotation: str) -> bool:
        return annotation in self.annotations


@dataclass(slots=True)
class Builder(Generic[P]):
    """Collects fields by name and builds a `cls`; the fields of `required_fields` must have been
    set."""

    cls: type[P]
    required_fields: tuple[str, ...]
    values: dict[str, object] = field(default_factory=dict)

    def set(self, **values: object) -> Builder[P]:
        """Sets fields, the last value counts; TypeError for a name the type does not have."""
        known = self.cls.__dataclass_fields__  # type: ignore[attr-defined]
        for name in values:
            if name not in known:
                raise TypeError(f"{self.cls.__name__} has no field {name!r}")
        self.values.update(values)
        return self

    def build(self) -> P:
        """InvalidRequest names the first field that is needed and was not set."""
        for name in self.required_fields:
            if name not in self.values:
                raise InvalidRequest(f"{self.cls.__name__} needs {name}", name)
        return self.cls(**self.values)


def from_json_value(cls: type[P], value: JsonValue, path: str = "") -> P:
    """A `cls` from a parsed JSON object at `path`; InvalidRequest names the field at fault."""
    if not isinstance(value, dict):
        raise _invalid_value(path, "an object", value)
    fields: dict[str, object] = {}
    for one in wire_fields(cls):
        field_path = f"{path}.{one.key}" if path else one.key
        if one.key in value:
            raw_value = value[one.key]
            if raw_value is not None or not one.nullable:
                fields[one.name] = one.kind.read(raw_value, field_path)
        elif one.required:
            raise InvalidRequest(f"{field_path} is required", field_path)
    return cls(**fields)


def to_json_value(obj: object) -> JsonValue:
    """The JSON object of any dataclass of this module, ready for `json.dumps`."""
    json_object: dict[str, JsonValue] = {}
    for one in wire_fields(type(obj)):
        value = getattr(obj, one.name)
        if one.rule == "skip" and value == one.default:
            continue
        json_object[one.key] = None if value is None else one.kind.write(value)
    return json_object


def from_json(cls: type[P], text: str | bytes) -> P:
    """A `cls` from JSON text; InvalidRequest for text that is not JSON, and as
    `from_json_value`."""
    return from_json_value(cls, load_json_text(text, ""))


def to_json(obj: object) -> str:
    """Compact JSON text."""
    return dump_json_text(to_json_value(obj), "")


def load_json_text(text: str | bytes, path: str) -> JsonValue:
    """The value of RFC 8259 text: no NaN or Infinity, also none by overflow.

    InvalidRequest names `path`.
    """
    try:
        return json.loads(text, parse_constant=_reject_constant, parse_float=_parse_finite_float)
    except (ValueError, RecursionError) as error:
        name = path or "the request"
        raise InvalidRequest(f"{name} is not valid JSON: {error}", path or None) from None


def dump_json_text(value: JsonValue, path: str) -> str:
    """Compact RFC 8259 text of a value; InvalidRequest names `path` where JSON has no form."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{path or 'the value'} is not JSON: {error}", path or None) from None


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _parse_finite_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits[:40]} is too large")
    return number


# Top-level fields that change what an engine does, so that it must honour or refuse them. The
# rest is read by the frontend and the router, or describes the prompt.
ENGINE_FIELDS = (
    "prompt_embeds",
    "multi_modal_data",
    "stop_conditions",
    "sampling_options",
    "output_options",
    "prefill_result",
    "bootstrap_info",
    "extra_args",
    "mm_processor_kwargs",
)


def unsupported_fields(request: PreprocessedRequest, supported: frozenset[str]) -> list[str]:
    """Dotted names of what the request asks of an engine and `supported` does not contain.

    A name in `supported` covers all below it; `sampling_options.guided_decoding.regex` alone
    honours just that part. Neutral values (n = 1, top_p = 1, a penalty of 0, ...) ask for nothing.
    """
    unsupported = [
        name
        for one in wire_fields(PreprocessedRequest)
        if one.name in ENGINE_FIELDS
        for name in _unsupported_names(one, getattr(request, one.name), one.name, supported)
    ]
    adapter_name = request.routing is not None and request.routing.lora_name
    if adapter_name and not supported & {"routing", "routing.lora_name"}:
        unsupported.append("routing.lora_name")
    return unsupported


def _unsupported_names(
    one: WireField, value: object, name: str, supported: frozenset[str]
) -> list[str]:
    if value is None or value == one.default or value in one.no_op_values or name in supported:
        return []
    options = name in ("stop_conditions", "sampling_options", "output_options")
    is_partly_supported = any(other.startswith(f"{name}.") for other in supported)
    if isinstance(one.kind, ObjectCodec) and (options or is_partly_supported):
        return [
            unsupported
            for inner in wire_fields(type(value))
            for unsupported in _unsupported_names(
                inner, getattr(value, inner.name), f"{name}.{inner.name}", supported
            )
        ]
    return [name]
