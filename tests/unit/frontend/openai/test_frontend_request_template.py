"""Defaults of a model apply to the fields that a request leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from common.errors import InvalidRequest
from common.runtime.config import ConfigError, read_config
from frontend_svc.config import FrontendConfig
from frontend_svc.openai.body.parsing import parse_completion, top_level_or_nvext
from frontend_svc.openai.body.request_template import parse_templates, with_defaults
from frontend_svc.openai.body.schema import CompletionRequest

DEFAULTS: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125}
OWN: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(orjson.dumps({"model": "m", "prompt": "a", **fields}))


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_applies_to_a_field_that_is_left_out(name: str) -> None:
    template = parse_templates(orjson.dumps({"model": "m", name: DEFAULTS[name]}))["m"]
    assert getattr(with_defaults(completion(), template), name) == DEFAULTS[name]
    assert getattr(with_defaults(completion(**{name: None}), template), name) == DEFAULTS[name]
    own = with_defaults(completion(**{name: OWN[name]}), template)
    assert getattr(own, name) == OWN[name]
    assert with_defaults(completion(), None) == completion()


@pytest.mark.parametrize("name", ["top_k", "min_p"])
def test_a_field_of_nvext_is_not_left_out(name: str) -> None:
    template = parse_templates(orjson.dumps({"model": "m", name: DEFAULTS[name]}))["m"]
    request = with_defaults(completion(nvext={name: OWN[name]}), template)
    assert top_level_or_nvext(request, name) == OWN[name]


def test_a_file_has_one_template_or_a_list() -> None:
    one = {"model": "a", "max_completion_tokens": 5}
    assert set(parse_templates(orjson.dumps(one))) == {"a"}
    assert set(parse_templates(orjson.dumps([one, {"model": "b"}]))) == {"a", "b"}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"{", None),
        (b"1", "body"),
        (b"[1]", "[0]"),
        (b"{}", "[0].model"),
        (b'[{"model": "a"}, {"model": "b", "temperature": 3}]', "[1].temperature"),
        (b'{"model": "a", "max_completion_tokens": 0}', "[0].max_completion_tokens"),
        (b'{"model": "a", "stop": "x"}', "[0].stop"),
        (b'[{"model": "a"}, {"model": "a"}]', "model"),
    ],
)
def test_the_frontend_does_not_start_with_an_invalid_file(
    tmp_path: Path, content: bytes, field: str | None
) -> None:
    with pytest.raises(InvalidRequest) as invalid:
        parse_templates(content)
    assert invalid.value.field == field
    file = tmp_path / "template.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_config(FrontendConfig, "FRONTEND", {}, [f"--request-template={file}"])
    (problem,) = refused.value.problems
    assert problem.startswith("--request-template:")
    assert (field or "JSON") in problem


def test_the_frontend_does_not_start_without_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config(FrontendConfig, "FRONTEND", {}, [f"--request-template={tmp_path / 'absent'}"])
