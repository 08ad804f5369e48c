"""The file of API keys: tenants, their keys, and what these permit (pure).

A key is a random text of 256 bits; the file has its SHA-256 only. A slow hash protects secrets that
can be guessed, which these cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from hashlib import sha256
from typing import Annotated

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    ValidationError,
)

from common.errors import InvalidRequest


class Permission(StrEnum):
    """What a key permits.

    INFER: generation, stored responses, files and batches, token counts and tokenizing. EMBEDDINGS:
    `/v1/embeddings`, `/v1/rerank`, `/v1/score`. ADMIN: metrics and `/health`. ROUTING: hints that
    choose a worker or a place in the queue. EXPLAIN: where a request runs, and what was cached.
    """

    INFER = "infer"
    EMBEDDINGS = "embeddings"
    ADMIN = "admin"
    ROUTING = "routing"
    EXPLAIN = "explain"


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Scopes = Annotated[frozenset[Permission], Field(min_length=1), PlainSerializer(sorted)]


class _Part(BaseModel):
    # The content of the file is no secret of a client, but no text for logs either.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ApiKey(_Part):
    """A key. id: for logs and operators, unique in the file. sha256: of the key, as 64 hex digits.
    expires: None: never."""

    id: Name
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    scopes: Scopes
    created: AwareDatetime
    expires: AwareDatetime | None = None


class Limits(_Part):
    """The most that a tenant may use at all frontends together; None: no limit. tokens_per_min: of
    prompts and output. weight: share of the capacity of busy workers, relative to other tenants.
    """

    requests_per_s: Annotated[float, Field(gt=0, le=1e6)] | None = None
    tokens_per_min: Annotated[int, Field(gt=0, le=10**12)] | None = None
    concurrency: Annotated[int, Field(gt=0, le=10**6)] | None = None
    weight: Annotated[float, Field(ge=0.01, le=100)] = 1.0

    @property
    def is_unlimited(self) -> bool:
        return self.requests_per_s is self.tokens_per_min is self.concurrency is None


NO_LIMITS = Limits()


class Tenant(_Part):
    """A client of the mesh. It shares no KV, sessions and stored responses with others."""

    keys: tuple[ApiKey, ...] = ()
    limits: Limits = NO_LIMITS


class KeyDocument(_Part):
    """The content of the file: tenants by name."""

    tenants: dict[Name, Tenant] = {}

    def entries(self) -> Iterator[tuple[str, ApiKey]]:
        """Yields all keys, with the names of their tenants."""
        for tenant, content in self.tenants.items():
            for key in content.keys:
                yield tenant, key


def hash_of(key: bytes) -> str:
    """Returns how the file writes a key."""
    return sha256(key).hexdigest()


def parse_keys(raw: bytes) -> KeyDocument:
    """Returns the content of a file. Raises InvalidRequest, which names the invalid part."""
    try:
        document = KeyDocument.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"invalid API keys: {field}: {first['msg']}", field) from None
    keys = [key for _, key in document.entries()]
    for name in ("id", "sha256"):
        if len({getattr(key, name) for key in keys}) < len(keys):
            raise InvalidRequest(f"invalid API keys: two keys have the same {name}", name)
    return document
