"""Values that a worker returns: tokens' log probabilities, usage, the finish reason. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal

from common.request.preprocessed.codecs import U32, JsonValue


class FinishReason(StrEnum):
    """Reason of the end of a stream."""

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
        """OpenAI's value; None for an end that OpenAI reports as an error."""
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

    token_id: U32
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural) of one token; top: alternatives, likeliest first."""

    token_id: U32
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceLink:
    """Link from a run of the request to the preceding `engine.generate` span."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokensDetails:
    """Breakdown of the prompt tokens; None: not reported."""

    cached_tokens: U32 | None = None
    """On any tier."""

    audio_tokens: U32 | None = None
    cache_write_tokens: U32 | None = None
    host_cached_tokens: U32 | None = None
    """Those of `cached_tokens` that were on the host, not on the device."""

    disk_cached_tokens: U32 | None = None
    """Those of `cached_tokens` that were on disk or in shared storage only."""

    def at_most(self, tokens: int) -> PromptTokensDetails:
        """Returns the cached tokens, each count at most `tokens`; nothing else."""

        def bounded(count: int | None) -> int | None:
            return None if count is None else min(count, tokens)

        return PromptTokensDetails(
            cached_tokens=bounded(self.cached_tokens),
            host_cached_tokens=bounded(self.host_cached_tokens),
            disk_cached_tokens=bounded(self.disk_cached_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTokensDetails:
    """Breakdown of the completion tokens; None: not reported."""

    reasoning_tokens: U32 | None = None
    accepted_prediction_tokens: U32 | None = None
    rejected_prediction_tokens: U32 | None = None
    audio_tokens: U32 | None = None


@dataclass(frozen=True, slots=True)
class CompletionUsage:
    """Token counts of one request."""

    prompt_tokens: U32
    completion_tokens: U32
    total_tokens: U32
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


def sum_prompt_details(
    parts: Sequence[PromptTokensDetails | None],
) -> PromptTokensDetails | None:
    """Returns the sums of counts that all parts report; None without cached tokens."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None

    def total(name: str) -> int | None:
        counts = [getattr(part, name) for part in known]
        return None if None in counts else sum(counts)

    names = ("cached_tokens", "host_cached_tokens", "disk_cached_tokens")
    details = PromptTokensDetails(**{name: total(name) for name in names})
    return None if details.cached_tokens is None else details


def sum_completion_details(
    parts: Iterable[CompletionTokensDetails | None],
) -> CompletionTokensDetails | None:
    """Returns the sums of the counts that parts report; None without any."""
    known = [part for part in parts if part is not None]
    if not known:
        return None

    def total(name: str) -> int | None:
        counts = [getattr(part, name) for part in known]
        reported = [count for count in counts if count is not None]
        return sum(reported) if reported else None

    names = [one.name for one in fields(CompletionTokensDetails)]
    return CompletionTokensDetails(**{name: total(name) for name in names})


def usage(prompt: int, completion: int) -> CompletionUsage:
    """Returns the counts and their sum without details, each limited to 2^32-1."""
    top = 2**32 - 1
    return CompletionUsage(min(prompt, top), min(completion, top), min(prompt + completion, top))


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """Output of prefill for decode; disaggregated_params: any JSON, not interpreted."""

    disaggregated_params: JsonValue
    prompt_tokens_details: PromptTokensDetails | None = None
