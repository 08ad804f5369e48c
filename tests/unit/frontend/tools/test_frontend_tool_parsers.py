"""Tool call parsers: published forms of each model, at every split of the text."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc.tools.deltas import CallArguments, CallStart, Content, Delta
from frontend_svc.tools.formats import FORMATS
from frontend_svc.tools.parser import ToolCallParser
from tests.unit.frontend.tools.outputs import CASES, TYPES

# Forms whose blocks have an end marker and JSON arguments.
CUT_FORMATS = [name for name, form in FORMATS.items() if form.tag and form.end]


def parse(name: str, pieces: Sequence[str], *, is_single: bool = False) -> list[Delta]:
    parser = ToolCallParser(FORMATS[name], TYPES, is_single=is_single)
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()


def fold(deltas: Sequence[Delta]) -> tuple[str, list[list[Any]]]:
    """Content and calls of a response; checks the order of its deltas."""
    content, calls = "", list[list[Any]]()
    for delta in deltas:
        match delta:
            case Content(text):
                assert text, "no delta is empty"
                content += text
            case CallStart(index, name, id_):
                assert index == len(calls)
                calls.append([name, "", id_])
            case CallArguments(index, text):
                assert index == len(calls) - 1
                assert text, "no delta is empty"
                calls[index][1] += text
    return content, calls


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_published_form_gives_its_content_and_calls_at_every_split(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    whole = fold(parse(name, [text]))
    assert whole[0] == content
    assert [(call[0], json.loads(call[1])) for call in whole[1]] == calls
    for size in (1, 2, 3, 7, 16):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert fold(parse(name, pieces)) == whole
    for split in range(len(text)):
        assert fold(parse(name, [text[:split], text[split:]])) == whole


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_the_deltas_do_not_depend_on_the_split(data: st.DataObject) -> None:
    name, text, *_ = data.draw(st.sampled_from(CASES))
    noise = data.draw(
        st.sampled_from(["", " ", "x", "<", "[", "{", "}", "]", "\n", '"', "</tool_call>"])
    )
    position = data.draw(st.integers(0, len(text)))
    text = text[:position] + noise + text[position:]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    is_single = data.draw(st.booleans())
    assert fold(parse(name, pieces, is_single=is_single)) == (
        fold(parse(name, [text], is_single=is_single))
    )


@pytest.mark.parametrize("name", sorted({name for name, *_ in CASES}))
def test_a_single_call_ends_the_response(name: str) -> None:
    text = next(text for one, text, _, calls in CASES if one == name and calls)
    parser = ToolCallParser(FORMATS[name], TYPES, is_single=True)
    # A pythonic block is the whole response.
    more = "" if name == "pythonic" else " More text. " + text
    assert len(fold(parser.feed(text + more) + parser.finish())[1]) == 1
    assert parser.is_done
    assert parser.feed(text) == parser.finish() == []


@pytest.mark.parametrize("name", CUT_FORMATS)
def test_a_marker_that_the_token_limit_cuts_after_a_call_is_no_content(name: str) -> None:
    begin, end = FORMATS[name].tag("f")  # type: ignore[misc]
    call, more = f"{begin}{{}}", f"{end}\n{FORMATS[name].begin}"
    for cut in range(len(more)):
        content, calls = fold(parse(name, [call + more[:cut]]))
        assert (content, [call[:2] for call in calls]) == ("", [["f", "{}"]]), more[:cut]
    text = f"{call}{end} and <text"
    assert fold(parse(name, [text]))[0].endswith(" and <text")


def test_arguments_are_sent_as_they_arrive() -> None:
    parser = ToolCallParser(FORMATS["hermes"], TYPES)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {') == [
        CallStart(0, "f"),
        CallArguments(0, "{"),
    ]
    assert parser.feed('"a": ') == [CallArguments(0, '"a": ')]


def test_the_tags_of_a_constraint_are_read_by_the_parser_of_their_model() -> None:
    for name, call_format in FORMATS.items():
        if call_format.tag is not None:
            begin, end = call_format.tag("get_weather")
            content, ((called, arguments, _),) = fold(parse(name, [f'{begin}{{"city":"P"}}{end}']))
            assert (content, called, json.loads(arguments)) == ("", "get_weather", {"city": "P"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>" + "</tool_call" * 2000),
        ("mistral", "[TOOL_CALLS]" + "[ " * 10_000),
        ("mistral", "[TOOL_CALLS]" + "a" * 20_000),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>" + "```" * 7000),
        ("kimi_k2", "<|tool_calls_section_begin|>" + "<|tool_call_begin|>functions.a" * 700),
        ("pythonic", "[" * 20_000),
    ],
)
def test_a_long_block_without_a_call_is_content_and_costs_linear_time(name: str, text: str) -> None:
    started_at = time.process_time()
    assert fold(parse(name, [text[i : i + 4] for i in range(0, len(text), 4)])) == (text, [])
    assert time.process_time() - started_at < 3, "about 0.2 s; with quadratic time 7 s"


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=x>NaN</parameter>\n</function>\n</tool_call>",
            {"x": "NaN"},
        ),
        (
            "glm45",
            "<tool_call>f\n<arg_key>x</arg_key><arg_value>1e999</arg_value></tool_call>",
            {"x": "1e999"},
        ),
    ],
)
def test_a_number_without_a_json_form_is_passed_as_text(
    name: str, text: str, arguments: dict[str, str]
) -> None:
    _, ((_, found, _),) = fold(parse(name, [text]))
    assert json.loads(found) == arguments


@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": {"x": NaN}, "name": "f"}',
        '{"name": "a\\q", "arguments": {"x": 1}}',
        '{"name": "a\nb", "arguments": {"x": 1}}',
    ],
)
def test_a_call_that_is_no_json_is_content(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    assert fold(parse("hermes", [text])) == (text, [])


def test_the_ids_of_a_response_are_different() -> None:
    begin, end = FORMATS["kimi_k2"].tag("f")  # type: ignore[misc]
    _, calls = fold(parse("kimi_k2", [f"{begin}{{}}{end}" * 2]))
    assert [call[2] for call in calls] == ["functions.f:0", None], "None: the response makes one"
