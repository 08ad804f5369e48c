"""Requests after templating and tokenization. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from common.request.preprocessed.codecs import (
    LOCAL,
    NULL,
    SKIP,
    U16,
    U32,
    U64,
    JsonValue,
    ObjectCodec,
    WireField,
    wire_fields,
)
from common.request.preprocessed.media import BlockExtraInfo, MmRoutingInfo, MultimodalData
from common.request.preprocessed.options import (
    GuidedDecoding,
    OutputOptions,
    SamplingOptions,
    StopConditions,
)
from common.request.preprocessed.response import PrefillResult, TraceLink
from common.request.preprocessed.routing import (
    AgentContext,
    RouterConfigOverride,
    RouterParams,
    RoutingHints,
)
from common.request.preprocessed.token_ids import TokenIds


@dataclass(frozen=True, slots=True)
class BootstrapInfo:
    """Rendezvous of prefill and decode; the room is unique per transfer."""

    bootstrap_host: str
    bootstrap_port: U16
    bootstrap_room: U64


TimingPoint = Literal[
    "prefill_started", "prefill_finished", "first_token", "last_token", "finished"
]


@dataclass(slots=True, kw_only=True)
class RequestTracker:
    """Times of one request inside one process; never on the wire.

    received_ms: wall clock since the Unix epoch. All other times are seconds of the caller's
    monotonic clock. The first mark of a point counts, so a retry does not move it; of
    `last_token`, the last one.
    """

    received_ms: float
    received_s: float
    prompt_blocks: int | None = None
    cached_blocks: int | None = None
    marks: dict[TimingPoint, float] = field(default_factory=dict)

    def mark(self, point: TimingPoint, now: float) -> None:
        assert now >= self.received_s, "the clock is monotonic"
        self.marks.setdefault(point, now)

    def output_ended(self, now: float) -> None:
        """Marks the end of the output of one of its choices."""
        self.marks["last_token"] = now

    def timing(self) -> dict[str, float]:
        """Returns known `nvext.timing` values in ms; prefill may end at the first token."""
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


# Of the card that the prompt was tokenized for.
_CARD_CHECKSUM: Mapping[str, Any] = {**NULL, "key": "mdc_sum", "proto": "mdc_sum"}


@dataclass(slots=True, kw_only=True)
class PreprocessedRequest:
    """One request for generation after templating and tokenization. Mutable; compared by value.

    tracker: local to the process, not on the wire and not compared.
    is_probe: set only by probes of the worker and of frontends.
    """

    model: str = ""
    token_ids: TokenIds
    prompt_embeds: str | None = None
    multi_modal_data: Mapping[str, tuple[MultimodalData, ...]] = field(
        default_factory=dict, metadata=SKIP
    )
    mm_routing_info: MmRoutingInfo | None = None
    stop_conditions: StopConditions = field(default=StopConditions())
    sampling_options: SamplingOptions = field(default=SamplingOptions())
    output_options: OutputOptions = field(default=OutputOptions())
    eos_token_ids: tuple[U32, ...] = ()
    card_checksum: str | None = field(default=None, metadata=_CARD_CHECKSUM)
    annotations: tuple[str, ...] = ()
    routing: RoutingHints | None = None
    router_config_override: RouterConfigOverride | None = field(default=None, metadata=NULL)
    prefill_result: PrefillResult | None = None
    migration_link: TraceLink | None = None
    bootstrap_info: BootstrapInfo | None = None
    extra_args: JsonValue = None
    router: RouterParams | None = None
    agent_context: AgentContext | None = None
    mm_processor_kwargs: JsonValue = None
    request_timestamp_ms: float | None = None
    is_probe: bool = field(default=False, metadata={"rule": "skip", "key": "_HEALTH_CHECK"})
    tracker: RequestTracker | None = field(default=None, compare=False, repr=False, metadata=LOCAL)

    def has_annotation(self, annotation: str) -> bool:
        return annotation in self.annotations

    def get_annotation_value(self, key: str) -> str | None:
        """Returns the text after `key:` of the first annotation that starts with it, or None."""
        for annotation in self.annotations:
            if annotation.startswith(f"{key}:"):
                return annotation.split(":", 1)[1]
        return None

    def routing_tokens(
        self,
    ) -> tuple[TokenIds, tuple[BlockExtraInfo | None, ...] | None]:
        """Returns the tokens to route by and the media of their blocks, None without media."""
        info = self.mm_routing_info
        if info is not None and info.routing_token_ids:
            return info.routing_token_ids, info.block_mm_infos
        return self.token_ids, None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessedEmbeddingRequest:
    """One request for embeddings after tokenization; token_ids: one entry per text."""

    token_ids: tuple[TokenIds, ...]
    model: str
    encoding_format: str | None = field(default=None, metadata=NULL)
    dimensions: U32 | None = field(default=None, metadata=NULL)
    card_checksum: str | None = field(default=None, metadata=_CARD_CHECKSUM)
    annotations: tuple[str, ...]

    def has_annotation(self, annotation: str) -> bool:
        return annotation in self.annotations


# Fields that every engine takes, and fields that the worker reads for it.
_ALWAYS_SUPPORTED = frozenset(
    {
        *("model", "token_ids", "eos_token_ids", "card_checksum", "migration_link", "is_probe"),
        *("annotations", "routing.dp_rank", "routing.priority"),
    }
)
# Their inner fields are named, not they.
_NESTED_OPTIONS = frozenset({"sampling_options.guided_decoding"})
_OPTION_FIELDS = frozenset({"stop_conditions", "sampling_options", "output_options", "routing"})


def unsupported_fields(request: PreprocessedRequest, supported: frozenset[str]) -> list[str]:
    """Returns dotted names of the set fields that an engine must refuse.

    These are all fields except the prompt, its EOS ids, placement and annotations, and those that
    `supported` contains. A name in `supported` includes all fields below it; a full path such as
    `sampling_options.guided_decoding.regex` includes only that field. Values without effect
    (n = 1, top_p = 1, a penalty of 0, ...) request nothing, nor does a best-effort constraint.
    """
    # Most fields are None, so each call that they do not need counts.
    return [
        name
        for wire_field in _refusable_fields()
        if (value := getattr(request, wire_field.name)) is not None
        for name in _unsupported_names(wire_field, value, wire_field.name, supported)
    ]


@functools.cache
def _refusable_fields() -> tuple[WireField, ...]:
    fields = wire_fields(PreprocessedRequest)
    return tuple(wire_field for wire_field in fields if wire_field.name not in _ALWAYS_SUPPORTED)


@functools.cache
def option_names() -> frozenset[str]:
    """Returns the dotted names of the options that an engine may refuse: those of stop conditions,
    sampling and output, the cache salt and the engine's own arguments."""
    names = (
        name
        for wire_field in wire_fields(PreprocessedRequest)
        if wire_field.name in _OPTION_FIELDS
        for name in _leaf_names(wire_field, wire_field.name)
    )
    options = (n for n in names if not n.startswith("routing.") or n == "routing.cache_salt")
    return frozenset({*options, "extra_args"})


def unsupported_options(supported: frozenset[str]) -> frozenset[str]:
    """Returns the options that an engine refuses; supported: as in `unsupported_fields`."""
    return frozenset(
        name
        for name in option_names()
        if not any(name == prefix or name.startswith(f"{prefix}.") for prefix in supported)
    )


def _leaf_names(wire_field: WireField, name: str) -> Iterator[str]:
    if name not in _OPTION_FIELDS and name not in _NESTED_OPTIONS:
        yield name
        return
    assert isinstance(wire_field.kind, ObjectCodec), "options are objects"
    for inner in wire_fields(wire_field.kind.cls):
        yield from _leaf_names(inner, f"{name}.{inner.name}")


def _unsupported_names(
    wire_field: WireField, value: object, name: str, supported: frozenset[str]
) -> list[str]:
    """Returns the names of a field and below that are unsupported. value: of the field, not
    None."""
    if value == wire_field.default or value in wire_field.no_op_values or name in supported:
        return []
    if name in _ALWAYS_SUPPORTED:
        return []
    if isinstance(value, GuidedDecoding) and value.best_effort:
        return []
    if not isinstance(wire_field.kind, ObjectCodec):
        return [name]
    if name in _OPTION_FIELDS or any(other.startswith(f"{name}.") for other in supported):
        return [
            unsupported
            for inner in wire_fields(type(value))
            if (inner_value := getattr(value, inner.name)) is not None
            for unsupported in _unsupported_names(
                inner, inner_value, f"{name}.{inner.name}", supported
            )
        ]
    return [name]
