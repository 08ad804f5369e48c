"""Pages of usage: their form, and their sum over frontends."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.usage import (
    DIMENSIONS,
    UsageBucket,
    UsageCounts,
    UsageKey,
    UsagePage,
    join,
    total,
)

KEY = UsageKey("acme", "key_1", "m", "french")
COUNTS = UsageCounts(2, 1, 30, 20, 9)

_NAMES = st.sampled_from(["", "a", "b"])
_KEYS = st.builds(UsageKey, _NAMES, _NAMES, _NAMES, _NAMES)
_COUNTS = st.builds(UsageCounts, *[st.integers(0, 1000)] * 5)
_RESULTS = st.dictionaries(_KEYS, _COUNTS, max_size=2)


def bucket(start_s: int, **results: UsageCounts) -> UsageBucket:
    return UsageBucket(start_s, start_s + 10, {UsageKey(name): c for name, c in results.items()})


def test_a_page_has_the_form_of_openai() -> None:
    page = UsagePage("s", (UsageBucket(0, 3600, {KEY: COUNTS}),), 3600)
    assert json.loads(page.to_json(("tenant", "model"))) == {
        "object": "page",
        "source": "s",
        "data": [
            {
                "object": "bucket",
                "start_time": 0,
                "end_time": 3600,
                "results": [
                    {
                        "object": "usage.result",
                        "tenant": "acme",
                        "key": None,
                        "model": "m",
                        "adapter": None,
                        "num_model_requests": 2,
                        "num_failed_requests": 1,
                        "input_tokens": 30,
                        "input_cached_tokens": 20,
                        "output_tokens": 9,
                    }
                ],
            }
        ],
        "has_more": True,
        "next_page": "3600",
    }


@given(st.lists(_RESULTS, max_size=2), st.none() | st.integers(0, 10**9))
def test_a_page_is_read_as_it_was_written(
    results: list[dict[UsageKey, UsageCounts]], next_start_s: int | None
) -> None:
    buckets = tuple(UsageBucket(n * 10, n * 10 + 10, one) for n, one in enumerate(results))
    page = UsagePage("s", buckets, next_start_s)
    assert UsagePage.from_json(page.to_json(DIMENSIONS)) == page


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"source": "s", "data": [{}], "next_page": 1}']
)
def test_another_response_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a page of usage"):
        UsagePage.from_json(raw)


def test_sources_are_added_and_a_source_counts_once() -> None:
    first = UsagePage("one", (bucket(0, a=COUNTS), bucket(10, a=COUNTS)), None)
    again = UsagePage("one", (bucket(0, a=COUNTS),), None)
    other = UsagePage("two", (bucket(0, a=COUNTS, b=COUNTS),), None)
    assert join([first, again, other]) == [
        bucket(0, a=COUNTS + COUNTS, b=COUNTS),
        bucket(10, a=COUNTS),
    ]


@given(st.lists(_RESULTS, min_size=1, max_size=3), st.sets(st.sampled_from(DIMENSIONS)))
def test_groups_add_up_to_the_total(
    results: list[dict[UsageKey, UsageCounts]], by: set[str]
) -> None:
    buckets = [UsageBucket(n, n + 1, one) for n, one in enumerate(results)]
    groups = total(buckets, [name for name in DIMENSIONS if name in by])
    whole = total(buckets, ()).get(UsageKey(), UsageCounts())
    assert sum(groups.values(), UsageCounts()) == whole
