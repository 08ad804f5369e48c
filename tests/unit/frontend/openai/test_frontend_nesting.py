"""The depth of JSON bodies."""

from __future__ import annotations

import orjson
import pytest

from common.errors import InvalidRequest
from frontend_svc.openai.body.parsing import LEVELS_MAX, parse_json_object


def nested(levels: int) -> bytes:
    return b'{"a": ' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_a_body_nested_to_the_limit_can_be_a_part_of_other_json() -> None:
    value = parse_json_object(nested(LEVELS_MAX))
    assert orjson.loads(orjson.dumps([[[value]]])) == [[[value]]]


def test_a_body_with_many_flat_lists_is_accepted() -> None:
    assert len(parse_json_object(b'{"a": [' + b"[]," * 1000 + b"[]]}")["a"]) == 1001


@pytest.mark.parametrize("levels", [LEVELS_MAX + 1, 300, 1000])
def test_a_body_nested_more_deeply_is_refused(levels: int) -> None:
    with pytest.raises(InvalidRequest, match=f"more than {LEVELS_MAX} levels") as raised:
        parse_json_object(nested(levels))
    assert raised.value.reason == "INVALID_JSON"
