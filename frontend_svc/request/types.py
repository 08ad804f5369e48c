"""Values of one request's life: its plan and its outcome (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from common.errors import MeshError
from common.request.placement import Decision
from common.request.preprocessed import (
    CompletionUsage,
    FinishReason,
    PreprocessedRequest,
)
from frontend_svc.models.engine_options import EngineTraits

Pooling: TypeAlias = Literal["", "embedding", "score"]


@dataclass(frozen=True, slots=True)
class PassThroughPayload:
    """A client's body, sent to the worker unchanged: of a chat request or of a completion."""

    json: bytes
    is_chat: bool


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What is fixed for a request's whole life."""

    request_id: str
    request: PreprocessedRequest

    deadline: float
    """Seconds, on the clock of the machine's `now` arguments."""

    migratable: bool = True
    """Whether a started response may continue on another worker; the rules of `continuation.py` may
    still forbid it."""

    engine_traits: Callable[[int], EngineTraits] | None = None
    """Returns what decides whether a worker of the model can continue a started response at
    present. None: all workers have one engine, which counts no output of another worker."""

    attempts_max: int = 4
    """Attempts that may fail; those whose worker left as planned do not count."""

    accept_timeout_s: float = 3.0
    """How long a worker may take to accept the request before another attempt starts."""

    pair_accept_timeout_s: float = 1.0
    """As `accept_timeout_s`, for a silent worker of a prefill and decode pair."""

    traceparent: str = ""

    trace_id: str = ""
    """32 hex digits; empty if the trace is not sampled."""

    tenant: str = ""
    priority: int | None = None

    body: PassThroughPayload | None = None
    """Sent in place of `request`; the response then consists of chunks, and token counts are
    unknown."""

    pooling: Pooling = ""
    """What is computed of the prompt, which is then not continued: its vector, or its score. The
    response is one chunk with it, which a retry sends again. "": the prompt is continued."""

    is_query_only: bool = False
    """Whether the outcome is the placement; it is not booked, and no worker receives the request.
    """


class Success(NamedTuple):
    """What a successful request proves about its model; of two, the greater proves more."""

    has_tokens: bool
    """Whether a worker has sent tokens, or chunks of a response to a pass-through body."""

    is_pair: bool
    """Whether a prefill and a decode worker have served it."""


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """How a request ended."""

    finish_reason: FinishReason | None

    error: MeshError | None
    """Why it failed; None on success."""

    usage: CompletionUsage
    """As reported to the client."""

    attempts: int

    worker_ids: tuple[int, ...]
    """The workers that received it, in order."""

    placed: Decision | None

    migrations: int = 0
    """Attempts that continued a started response."""
