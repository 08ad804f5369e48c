"""The number of values in a body, counted before it is parsed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from frontend_svc.openai.body.body_size import (
    COMMAS_MAX,
    CONTAINERS_MAX,
    STRINGS_MAX,
    check_size,
    count_values,
)

texts = st.text(st.sampled_from('ab\\"{[,\u00e9'), max_size=8)
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(texts, children, max_size=4),
)


# Any: JSON.
def counted(value: object) -> tuple[int, int, int]:
    """Containers, strings and commas of a value."""
    match value:
        case str():
            return 0, 1, 0
        case dict():
            children = [*value, *value.values()]
        case list():
            children = value
        case _:
            return 0, 0, 0
    found = list(map(counted, children))
    commas = max(0, len(value) - 1)
    return (
        1 + sum(one[0] for one in found),
        sum(one[1] for one in found),
        commas + sum(one[2] for one in found),
    )


@given(values, st.booleans())
def test_values_are_counted_and_characters_of_strings_are_not(value: object, escape: bool) -> None:
    body = json.dumps(value, ensure_ascii=escape).encode()
    assert count_values(body) == counted(value)


@pytest.mark.parametrize(
    ("name", "limit", "item"),
    [
        ("objects and lists", CONTAINERS_MAX, b"[]"),
        ("strings", STRINGS_MAX, b'""'),
        ("commas between values", COMMAS_MAX + 1, b"1"),
    ],
)
def test_a_body_with_more_values_than_the_limit_is_refused(
    name: str, limit: int, item: bytes
) -> None:
    others = 1 if item == b"[]" else 0

    def body(count: int) -> bytes:
        return b"[" + b",".join([item] * (count - others)) + b"]"

    check_size(body(limit))
    with pytest.raises(InvalidRequest, match=f"[0-9]+ {name}, and [0-9]+ are allowed"):
        check_size(body(limit + 1))


def test_text_may_have_any_number_of_brackets_quotes_and_commas() -> None:
    check_size(json.dumps({"prompt": '{["\\,' * 2_000_000}).encode())


def test_too_many_strings_are_named_whatever_they_contain() -> None:
    body = json.dumps(["[" for _ in range(STRINGS_MAX + 1)]).encode()
    with pytest.raises(InvalidRequest, match=f"{STRINGS_MAX + 1} strings"):
        check_size(body)
