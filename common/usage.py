"""The tokens that clients used, and their exchange between frontends and readers (pure).

A frontend sums the requests that end in each hour by tenant, key, model and adapter, and serves the
sums as pages of buckets, in the form of OpenAI's usage API. Readers, such as `meshctl usage`, join
the pages of all frontends. What counts is defined in `frontend_svc/usage/accounting.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, get_args

import orjson

from common.errors import InvalidRequest

USAGE_PATH: Final = "/v1/internal/usage"
HOUR_S: Final = 3600
DAY_S: Final = 24 * HOUR_S

Dimension: TypeAlias = Literal["tenant", "key", "model", "adapter"]
DIMENSIONS: Final[tuple[Dimension, ...]] = get_args(Dimension)

# Any: JSON.
Json = Any


class UsageKey(NamedTuple):
    """What used the tokens. A field is also "" if the counts are not grouped by it."""

    tenant: str = ""
    """"": the frontend has no API keys; so for the key."""

    key: str = ""
    """The id of the API key."""

    model: str = ""
    """The model itself, also of an adapter."""

    adapter: str = ""
    """"": none."""

    def only(self, by: Iterable[Dimension]) -> UsageKey:
        """Returns the key with these fields; the others are ""."""
        return UsageKey(**{name: getattr(self, name) for name in by})


@dataclass(slots=True)
class UsageCounts:
    """Sums over ended requests. Only the owner of a sum adds to it in place."""

    requests: int = 0
    """Those for which a placement was requested; a refused body is none."""

    failed_requests: int = 0
    """Of `requests`: those that ended with an error, or whose client disconnected."""

    prompt_tokens: int = 0

    cached_tokens: int = 0
    """Of `prompt_tokens`: those that were in the KV cache."""

    output_tokens: int = 0

    def __add__(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts(
            self.requests + other.requests,
            self.failed_requests + other.failed_requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )

    def __iadd__(self, other: UsageCounts) -> Self:
        self.requests += other.requests
        self.failed_requests += other.failed_requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        return self

    @property
    def tokens(self) -> int:
        """Tokens of prompts and output."""
        return self.prompt_tokens + self.output_tokens


COUNTS: Final = tuple(field.name for field in fields(UsageCounts))
# Names of the counts in a page, in the order of `COUNTS`: OpenAI's, if it has them.
_PAGE_NAMES: Final = (
    *("num_model_requests", "num_failed_requests"),
    *("input_tokens", "input_cached_tokens", "output_tokens"),
)


@dataclass(frozen=True, slots=True)
class UsageBucket:
    """The counts of one period, in Unix seconds. end_s: exclusive."""

    start_s: int
    end_s: int
    results: Mapping[UsageKey, UsageCounts]


@dataclass(frozen=True, slots=True)
class UsagePage:
    """What one frontend reports."""

    source: str
    """Id of the records. Frontends with the same records report the same."""

    buckets: tuple[UsageBucket, ...]
    """In order of time; also those without requests."""

    next_start_s: int | None
    """Start of the next page; None: this is the last one."""

    def to_json(self, by: Sequence[Dimension]) -> bytes:
        """Returns the page for clients.

        - by: by what its counts are grouped.
        """

        def result(key: UsageKey, counts: UsageCounts) -> dict[str, Json]:
            found: dict[str, Json] = {"object": "usage.result"}
            found |= {name: getattr(key, name) if name in by else None for name in DIMENSIONS}
            return found | dict(zip(_PAGE_NAMES, astuple(counts), strict=True))

        next_page = None if self.next_start_s is None else str(self.next_start_s)
        return orjson.dumps(
            {
                "object": "page",
                "source": self.source,
                "data": [
                    {
                        "object": "bucket",
                        "start_time": bucket.start_s,
                        "end_time": bucket.end_s,
                        "results": [result(*item) for item in bucket.results.items()],
                    }
                    for bucket in self.buckets
                ],
                "has_more": next_page is not None,
                "next_page": next_page,
            }
        )

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Reads the response of a frontend. Raises InvalidRequest."""
        try:
            page = orjson.loads(raw)
            next_page = page["next_page"]
            return cls(
                str(page["source"]),
                tuple(map(_read_bucket, page["data"])),
                None if next_page is None else int(next_page),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(f"not a page of usage: {error!r}") from None


def _read_bucket(bucket: Json) -> UsageBucket:
    results = {
        UsageKey(*(str(result[name] or "") for name in DIMENSIONS)): UsageCounts(
            *(int(result[name]) for name in _PAGE_NAMES)
        )
        for result in bucket["results"]
    }
    return UsageBucket(int(bucket["start_time"]), int(bucket["end_time"]), results)


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Which counts to read. The start is rounded down to a bucket, the end up."""

    start_s: int
    end_s: int

    width_s: int = DAY_S
    """Of a bucket: HOUR_S or DAY_S. Days are those of UTC."""

    by: tuple[Dimension, ...] = ()
    """By what counts are grouped."""

    limit: int | None = None
    """Most buckets of a page; None: that of the frontend."""

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        """The query of the request to a frontend."""
        return (
            ("start_time", str(self.start_s)),
            ("end_time", str(self.end_s)),
            ("bucket_width", "1h" if self.width_s == HOUR_S else "1d"),
            *(("group_by", name) for name in self.by),
            *(() if self.limit is None else (("limit", str(self.limit)),)),
        )


def join(pages: Iterable[UsagePage]) -> list[UsageBucket]:
    """Returns the sums of all sources, in order of time. Of pages with the same source and start,
    the first one counts."""
    seen: set[tuple[str, int]] = set()
    sums: dict[tuple[int, int], dict[UsageKey, UsageCounts]] = {}
    for page in pages:
        for bucket in page.buckets:
            if (page.source, bucket.start_s) in seen:
                continue
            seen.add((page.source, bucket.start_s))
            counts = sums.setdefault((bucket.start_s, bucket.end_s), {})
            for key, value in bucket.results.items():
                counts[key] = counts.get(key, UsageCounts()) + value
    return [UsageBucket(*period, counts) for period, counts in sorted(sums.items())]


def total(
    buckets: Iterable[UsageBucket], by: Sequence[Dimension] = DIMENSIONS
) -> dict[UsageKey, UsageCounts]:
    """Returns the sums of all buckets.

    - by: by what they are grouped; the buckets must be, too.
    """
    sums: dict[UsageKey, UsageCounts] = {}
    for bucket in buckets:
        for key, counts in bucket.results.items():
            group = key.only(by)
            sums[group] = sums.get(group, UsageCounts()) + counts
    return sums
