from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import worker_svc
from frontend_svc.prompts.prompt import (
    ChatTemplate,
    MessageShape,
    TemplateError,
    normalise_messages,
)

NOW = datetime(2025, 3, 9, 12, tzinfo=UTC)
SIM_CONFIG = Path(worker_svc.__file__).parent / "engines/sim/model" / "tokenizer_config.json"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]

STRINGS_ONLY = "{% for m in messages %}[{{ m.role + ':' + m.content }}]{% endfor %}"
PRINTS_ANYTHING = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
BOTH = (
    "{% for m in messages %}[{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}]{% endfor %}"
)
PARTS_ONLY = (
    "{% for m in messages %}[{% for p in m.content %}<{{ p['text'] }}>{% endfor %}]{% endfor %}"
)


def template(source: str, bos: str | None = "<s>", eos: str | None = "</s>") -> ChatTemplate:
    return ChatTemplate(source, bos_token=bos, eos_token=eos)


def render(source: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    # Any: the keyword arguments of ChatTemplate.render.
    return template(source).render(HELLO if messages is None else messages, now=NOW, **arguments)


def sim_template() -> ChatTemplate:
    config = json.loads(SIM_CONFIG.read_text("utf-8"))
    return ChatTemplate(config["chat_template"], bos_token=None, eos_token=config["eos_token"])


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_the_sim_template_renders_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]

    assert sim_template().render(messages, now=NOW) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_sim_template_renders_tool_calls() -> None:
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call('{"a": "é"}')]}]

    prompt = sim_template().render(messages, now=NOW)

    assert '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call><|im_end|>' in prompt


def test_blocks_render_no_blank_lines_and_loops_can_break() -> None:
    condition = "  {% if loop.index > 1 %}\n    {% break %}\n  {% endif %}\n"
    source = "{% for m in messages %}\n" + condition + "x\n{% endfor %}\n"

    assert render(source, HELLO * 3) == "x\n"


def test_tojson_escapes_neither_html_nor_other_scripts() -> None:
    assert render("{{ messages | tojson }}", [{"role": "u", "content": "<é&'"}]) == (
        '[{"role": "u", "content": "<é&\'"}]'
    )
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}") == (
        '{\n "a": [\n  2\n ],\n "b": 1\n}'
    )


def test_the_time_is_an_argument() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "09 Mar 2025"
    assert render("{% macro today() %}{{ strftime_now('%Y') }}{% endmacro %}{{ today() }}") == (
        "2025"
    )


def test_special_tokens_are_variables_and_undefined_if_missing() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}") == "<s>|</s>"
    assert template("[{{ bos_token }}]", bos=None).render(HELLO, now=NOW) == "[]"


def test_generation_blocks_render_as_their_body() -> None:
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_without_tools_the_variable_is_none() -> None:
    source = "{{ 'none' if tools is none else tools | length }}"

    assert render(source) == "none"


def test_template_kwargs_are_variables() -> None:
    source = "{{ enable_thinking }}"

    assert render(source, template_kwargs={"enable_thinking": False}) == "False"
    assert render(source) == ""


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_kwargs_cannot_replace_an_argument(name: str) -> None:
    with pytest.raises(TemplateError, match=name):
        render("", template_kwargs={name: []})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{{ missing.field }}", "missing value: 'missing' is undefined"),
        ("{{ messages[7].role }}", "missing value"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "chat template"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% include 'other' %}", "chat template"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ strftime_now(1) }}", "TypeError"),
    ],
)
def test_every_failure_in_a_template_is_a_template_error_with_its_cause(
    source: str, reason: str
) -> None:
    with pytest.raises(TemplateError, match=reason):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ open", "{% nonsense %}", "{% for x in y %}"])
def test_a_template_with_bad_syntax_is_refused_with_its_line(source: str) -> None:
    with pytest.raises(TemplateError, match="line 2"):
        template("first line\n" + source)


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (STRINGS_ONLY, MessageShape()),
        (PRINTS_ANYTHING, MessageShape()),
        ("{{ messages | tojson }}", MessageShape()),
        (BOTH, MessageShape(part_content=True)),
        (PARTS_ONLY, MessageShape(text_content=False, part_content=True)),
        ("{{ raise_exception('no') }}", MessageShape()),
    ],
)
def test_probes_detect_the_message_format_of_a_template(source: str, shape: MessageShape) -> None:
    assert template(source).shape == shape


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (STRINGS_ONLY, "[user:one\ntwo][user:three]"),
        (PRINTS_ANYTHING, "[user:one\ntwo][user:three]"),
        (BOTH, "[<one><two>][three]"),
        (PARTS_ONLY, "[<one><two>][<three>]"),
    ],
)
def test_content_is_converted_to_the_format_of_the_template(source: str, prompt: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    first: dict[str, Any] = {"role": "user", "content": parts}

    assert render(source, [first, {"role": "user", "content": "three"}]) == prompt


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "tool_calls": [call("{")]}, r"function\.arguments: not JSON"),
        ({"role": "assistant", "tool_calls": [call("[" * 99_999)]}, r"arguments: not JSON"),
        ({"role": "assistant", "tool_calls": [call("[1]")]}, r"not a JSON object"),
    ],
)
def test_arguments_that_are_no_json_object_are_refused_with_the_field(
    message: dict[str, Any], field: str
) -> None:
    with pytest.raises(TemplateError, match=field):
        normalise_messages([message])


def test_null_keys_are_omitted_and_null_content_is_empty() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": "a"}

    assert normalise_messages([message]) == [{"role": "assistant", "content": "", "name": "a"}]


@pytest.mark.parametrize(
    ("given", "passed"),
    [("null", {}), ('{"city": "Köln"}', {"city": "Köln"}), ("", {})],
)
def test_tool_call_arguments_become_an_object(given: Any, passed: dict[str, Any]) -> None:
    message = {"role": "assistant", "tool_calls": [call(given)]}

    normal = normalise_messages([message])

    assert normal[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": passed}
    assert message["tool_calls"] == [call(given)], "the caller's messages are unchanged"


def test_tool_call_arguments_stay_text_for_a_template_that_concatenates_them() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    message = {"role": "assistant", "content": None, "tool_calls": [call('{"city":"Köln"}')]}

    assert template(source).shape.text_arguments
    assert render(source, [*HELLO, message]) == 'f{"city": "Köln"}'


def test_text_that_is_not_valid_unicode_is_refused() -> None:
    message = {"role": "assistant", "tool_calls": [call('{"a": "\\ud800"}')]}

    with pytest.raises(TemplateError, match="surrogates not allowed"):
        sim_template().render([message], now=NOW)


def test_messages_are_data_and_never_templates() -> None:
    assert render(STRINGS_ONLY, [{"role": "user", "content": "{{ 1 + 1 }}"}]) == (
        "[user:{{ 1 + 1 }}]"
    )
