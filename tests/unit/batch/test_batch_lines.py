"""The lines of an input file: what is refused, by line, and the order in which lines are sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
import pytest

from batch_svc.core.limits import ERRORS_MAX
from batch_svc.core.lines import Line, LineError, LineReader, prefix_of

CHAT = "/v1/chat/completions"


# Any: JSON.
def line(custom_id: str = "a", text: str = "Hi", **changes: Any) -> dict[str, Any]:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes


def content(*lines: dict[str, Any]) -> bytes:
    return b"\n".join(orjson.dumps(one) for one in lines)


def read(
    parts: Iterable[bytes], lines_max: int, endpoint: str = CHAT
) -> tuple[list[Line], list[LineError]]:
    """Returns the valid lines of a file, and the errors."""
    reader = LineReader(endpoint, lines_max)
    lines = [one for part in parts for one in reader.feed(part)]
    return lines + reader.end(), reader.errors


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_lines_keep_their_number_also_beside_empty_ones_and_split_parts(size: int) -> None:
    raw = content(line("a"), line("b"), line("c")).replace(b"\n", b"\n\n")
    for ended in (raw, raw + b"\n"):
        parts = [ended[i : i + size] for i in range(0, len(ended), size)]
        lines, errors = read(parts, 10)
        assert not errors
        assert [(one.number, one.custom_id) for one in lines] == [(1, "a"), (3, "b"), (5, "c")]


BODY = line()["body"]


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({"custom_id": 7}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "a\0"}, "invalid_custom_id", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/completions"}, "mismatched_endpoint", "url"),
        ({"body": []}, "invalid_body", "body"),
        ({"body": {}}, "missing_model", "body.model"),
        ({"body": BODY | {"stream": True}}, "unsupported_parameter", "body.stream"),
        ({"body": BODY | {"background": True}}, "unsupported_parameter", "body.background"),
        ({"body": BODY | {"conversation": "c"}}, "unsupported_parameter", "body.conversation"),
        ({"body": BODY | {"priority": 1}}, "unsupported_parameter", "body.priority"),
        (
            {"body": BODY | {"nvext": {"agent_hints": {"priority": 1}}}},
            "unsupported_parameter",
            "body.nvext.agent_hints",
        ),
        ({"more": 1}, "unknown_parameter", "more"),
    ],
)
def test_an_invalid_line_is_named_with_its_field(
    changes: dict[str, Any], code: str, param: str
) -> None:
    lines, (error,) = read([content(line("b"), line(**changes))], 10)
    assert [one.custom_id for one in lines] == ["b"]
    assert (error.line, error.code, error.param) == (2, code, param)


def test_a_line_that_is_nested_too_deeply_is_named() -> None:
    deep = b'{"model": "sim", "x": ' + b"[" * 300 + b"]" * 300 + b"}"
    raw = content(line(body={})).replace(b"{}", deep)
    lines, (error,) = read([raw], 10)
    assert not lines
    assert (error.line, error.code, error.param) == (1, "invalid_body", "body")


def test_a_file_is_refused_for_no_lines_too_many_and_equal_ids() -> None:
    assert read([b"\n \n"], 10)[1][0].code == "empty_file"
    assert read([content(line("a"), line("b"))], 1)[1][0].code == "too_many_lines"
    assert read([content(line(), line())], 9)[1][0].code == "duplicate_custom_id"
    assert read([b"{\n"], 9)[1][0].code == "invalid_json_line"
    assert len(read([b"{\n" * 100], 999)[1]) == ERRORS_MAX


def test_lines_with_a_common_beginning_are_sent_one_after_the_other() -> None:
    common = [f"{name} " * 400 for name in ("one", "two", "three")]
    lines, _ = read([content(*(line(str(n), common[n % 3] + str(n)) for n in range(9)))], 99)
    order = [number for _, number in sorted((one.prefix, one.number) for one in lines)]
    groups = [number % 3 for number in order]
    assert len([n for n in range(1, 9) if groups[n] != groups[n - 1]]) == 2
    assert sorted(order) == list(range(1, 10))


def test_the_prefix_of_a_prompt_is_that_of_longer_ones() -> None:
    short, long = (prefix_of({"model": "sim", "prompt": "x" * n}) for n in (2_000, 4_000))
    assert long.startswith(short[:-8])
    assert len(prefix_of({"model": "sim", "prompt": "x" * 10**6})) == 64 * 8
