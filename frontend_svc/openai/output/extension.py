"""What `nvext` requests of a response: extra fields, annotations, a placement only (pure).

The extra fields are in the object `nvext` of a whole response, and of the chunk with the finish
reason. Annotations of this module are comments of a stream, which every client ignores that does
not read them, and `nvext.annotations` of a whole response. Other annotations are marks for logs,
traces and engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

import orjson

from common.errors import InvalidRequest, Unsupported
from common.request.placement import Decision
from common.request.preprocessed import (
    CompletionUsage,
    PreprocessedRequest,
    PromptTokensDetails,
)
from frontend_svc.request.types import RequestOutcome

ExtraField: TypeAlias = Literal[
    "worker_id", "timing", "kv_hit", "token_ids", "completion_token_ids"
]
QUERY_ONLY: Final = "query_instance_id"
METRICS: Final = "llm_metrics"
# Those that a response has before its text.
_OPENING: Final = ("request_id", "formatted_prompt", "token_ids")
_QUERY_FIELDS: Final[tuple[ExtraField, ...]] = ("worker_id", "kv_hit", "token_ids")
_ANNOTATIONS: Final = "nvext.annotations"
_EXTRA_FIELDS: Final = "nvext.extra_fields"

# Any, here and below: JSON.
Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseExtension:
    """The extensions of a response with one choice."""

    request: PreprocessedRequest

    fields: frozenset[ExtraField] = frozenset()
    """Extra fields that the client requested, or that a placement query implies."""

    opening: Mapping[str, object] = field(default_factory=dict)
    """Values of annotations by name."""

    block_size: int = 0
    """Tokens per block of the router's counts; 0: unknown."""

    is_query_only: bool = False
    """Whether the response is the placement."""

    def comments(self) -> bytes:
        """Returns the events before the response."""
        return b"".join([_comment(name, value) for name, value in self.opening.items()])

    def last_comments(self, usage: CompletionUsage) -> bytes:
        """Returns the events after the last token."""
        if not self.request.has_annotation(METRICS):
            return b""
        return _comment(METRICS, _metrics(usage))

    def annotations(self, usage: CompletionUsage) -> Json:
        """Returns all annotations, for a response that is no stream."""
        values = dict(self.opening)
        if self.request.has_annotation(METRICS):
            values[METRICS] = _metrics(usage)
        return values

    def extra_fields(
        self, outcome: RequestOutcome, usage: CompletionUsage, output: Sequence[int]
    ) -> Json:
        """Returns the values of the extra fields. output: the generated token ids, at least those
        that `usage` counts."""
        values: Json = {}
        for name in (arg for arg in get_args(ExtraField) if arg in self.fields):
            match name:
                case "worker_id" if outcome.placed is not None:
                    values[name] = dict(_worker_ids(outcome.placed))
                case "kv_hit" if outcome.placed is not None:
                    values[name] = self._kv_hit(outcome.placed, usage)
                case "timing" if (tracker := self.request.tracker) is not None:
                    values[name] = {key: round(ms, 3) for key, ms in tracker.timing().items()}
                case "token_ids":
                    values[name] = self.request.token_ids.tolist()
                case "completion_token_ids":
                    values[name] = output[: usage.completion_tokens]
        return values

    def _kv_hit(self, placed: Decision, usage: CompletionUsage) -> Json:
        details = usage.prompt_tokens_details
        size = self.block_size
        return {
            "block_size": size,
            "prompt_blocks": len(self.request.token_ids) // size if size else 0,
            "overlap_blocks": placed.overlap_blocks,
            "predicted_cached_tokens": placed.predicted_cached_tokens,
            # Absent in a stream or response whose worker did not report it.
            **({} if details is None else _cached_tokens(details)),
        }


def make_extension(
    request: PreprocessedRequest,
    extra_fields: Sequence[ExtraField],
    *,
    request_id: str,
    prompt_text: str | None,
    has_token_data: bool,
    choices: int,
    block_size: int,
) -> ResponseExtension | None:
    """Returns the extensions that a body requests; None if there are none. prompt_text: None if
    the client sent token ids. has_token_data: whether it sent them in `nvext`. Raises
    InvalidRequest and Unsupported with the field of the body."""
    opening: Json = {}
    for name in _OPENING:
        if not request.has_annotation(name):
            continue
        match name:
            case "request_id":
                opening[name] = request_id
            case "formatted_prompt" if prompt_text is None:
                text = "'formatted_prompt' needs a prompt that is no list of token ids"
                raise Unsupported(_ANNOTATIONS, text)
            case "formatted_prompt":
                opening[name] = prompt_text
            case "token_ids" if not has_token_data:
                opening[name] = request.token_ids.tolist()
    fields = set(extra_fields)
    if has_query := is_query_only(request):
        fields |= {name for name in _QUERY_FIELDS if name != "token_ids" or not has_token_data}
    if not (fields or opening or has_query or request.has_annotation(METRICS)):
        return None
    if choices > 1:
        name = _EXTRA_FIELDS if extra_fields else _ANNOTATIONS
        raise Unsupported(name, f"only for responses with one choice, and this one has {choices}")
    return ResponseExtension(request, frozenset(fields), opening, block_size, has_query)


def is_query_only(request: PreprocessedRequest) -> bool:
    """Returns whether the client requests only the placement. Raises InvalidRequest for a value."""
    value = request.get_annotation_value(QUERY_ONLY)
    if value:
        text = f"'{QUERY_ONLY}' has no value, but got {value!r}"
        raise InvalidRequest(f"Invalid '{_ANNOTATIONS}': {text}.", _ANNOTATIONS)
    return value == "" or request.has_annotation(QUERY_ONLY)


def _worker_ids(placed: Decision) -> Iterator[tuple[str, object]]:
    """Yields ids as text, since many programs round large numbers."""
    if placed.prefill is not None:
        yield "prefill_worker_id", str(placed.prefill.worker_id)
        yield "prefill_dp_rank", placed.prefill.dp_rank
    yield "decode_worker_id", str(placed.worker.worker_id)
    yield "decode_dp_rank", placed.worker.dp_rank


def _cached_tokens(details: PromptTokensDetails) -> Json:
    """Returns the counts; those of tiers that the worker reports."""
    tiers = {
        "host_cached_tokens": details.host_cached_tokens,
        "disk_cached_tokens": details.disk_cached_tokens,
    }
    reported = {name: count for name, count in tiers.items() if count is not None}
    return {"cached_tokens": details.cached_tokens, **reported}


def _metrics(usage: CompletionUsage) -> Json:
    details = usage.prompt_tokens_details
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cached_tokens": None if details is None else details.cached_tokens,
    }


def _comment(name: str, value: object) -> bytes:
    return b": %b %b\n\n" % (name.encode(), orjson.dumps(value))
