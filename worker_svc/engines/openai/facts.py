"""What an adapter has learned of a server. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from worker_svc.engines.contract import (
    CompletionUsage,
    LLMEngineOutput,
    PreprocessedRequest,
)
from worker_svc.engines.openai.config import ServerApi
from worker_svc.engines.sglang.sampling import EngineProperties
from worker_svc.kv_events.external_events import DuplicatePolicy


@dataclass(frozen=True, slots=True)
class KvAddresses:
    """Where rank 0 publishes KV events and serves replays, tcp://HOST:PORT; a rank r has the ports
    above by r. replay None: none are kept."""

    events: str
    replay: str | None = None


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server as its own responses describe it. None: it does not state it."""

    api: ServerApi
    model: str
    """Its name of the model, the `model` of a body."""

    version: str = ""
    model_path: Path | None = None
    """Folder with tokenizer.json, on this host."""

    properties: EngineProperties = field(default_factory=EngineProperties)
    context_length: int | None = None
    page_size: int | None = None
    total_kv_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_addresses: KvAddresses | None = None
    kv_off_reason: str = ""
    """Why it has no KV events although it may reuse prefixes."""

    no_index_reason: str = ""
    """Why its prefixes are of no use to a router at all."""

    has_priorities: bool = False
    has_min_tokens: bool = True
    is_incremental: bool = False
    """SGLang: whether chunks hold only what is new."""

    has_load: bool = False
    """Whether it reports its load."""

    is_llama_server: bool = False
    embedding_size: int | None = None
    shorter_embeddings: bool = False
    """Whether the first coordinates of its vectors are vectors of their own."""

    @property
    def has_token_ids(self) -> bool:
        """Whether it gets token ids."""
        return self.api != "text" or bool(self.properties.pooling)


def duplicate_policy(facts: ServerFacts) -> DuplicatePolicy:
    """Returns what a second report of a page means. vLLM keeps the same page twice if two requests
    compute it at once, and reports each of them when it is stored and when it is evicted."""
    return DuplicatePolicy.COUNTED if facts.api == "vllm" else DuplicatePolicy.IDEMPOTENT


class TokenStream(Protocol):
    """One request to a server."""

    is_streamed: bool
    """Whether the response is a stream of events; else it is one JSON object."""

    path: str
    # Any: JSON.
    body: Mapping[str, Any]
    """What is posted."""

    rid: str
    """The server's id of the request, "" without one."""

    def convert(self, data: bytes) -> LLMEngineOutput | None:
        """Returns the new part of an event, None without one. Raises MeshError if it reports a
        failure."""

    def end(self) -> LLMEngineOutput | None:
        """Returns the terminal output if it follows only from the end of the stream."""

    def usage(self) -> CompletionUsage:
        """Returns the counts so far."""


class TokenApi(Protocol):
    """Translates requests for one kind of server."""

    def supported_fields(self) -> frozenset[str]:
        """Returns the fields that every request may have."""

    def open(self, request: PreprocessedRequest, priority: int | None, rid: str) -> TokenStream:
        """Returns the call. Raises Unsupported, InvalidRequest and PromptTooLong."""
