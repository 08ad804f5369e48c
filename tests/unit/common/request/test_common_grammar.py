"""Constraints of guided decoding: what compiles, what is refused, and with which message."""

from __future__ import annotations

from typing import Any

import pytest

from common.request.grammar import ConstraintError, check_constraint
from common.request.preprocessed import GuidedDecoding

TAG = {"begin": "<t>", "content": {"type": "json_schema", "json_schema": True}, "end": "</t>"}
TAGS = {"type": "triggered_tags", "triggers": ["<t>"], "tags": [TAG]}


def tagged(form: dict[str, Any]) -> GuidedDecoding:
    return GuidedDecoding(structural_tag={"type": "structural_tag", "format": form})


@pytest.mark.parametrize(
    "guided",
    [
        GuidedDecoding(json={}),
        GuidedDecoding(json={"type": "object", "properties": {"é": {"type": "string"}}}),
        GuidedDecoding(json={"type": "array"}, whitespace_pattern="[ ]?"),
        GuidedDecoding(regex="[a-z]+\\d{3}"),
        GuidedDecoding(choice=("a", 'b "c"\n', "é\\")),
        GuidedDecoding(grammar='root ::= ("a" | b)+\nb ::= [0-9]*'),
        tagged(TAGS),
        tagged(TAGS | {"at_least_one": True, "stop_after_first": True}),
        tagged({"type": "or", "elements": [TAGS, TAG["content"]]}),
    ],
)
def test_a_valid_constraint_compiles(guided: GuidedDecoding) -> None:
    check_constraint(guided)


@pytest.mark.parametrize(
    ("guided", "words"),
    [
        (GuidedDecoding(json={"type": "x"}), "Invalid type"),
        (GuidedDecoding(json={"not": {}}), '"not"'),
        (GuidedDecoding(json={"not": {}, "x-guidance": {"lenient": True}}), '"not"'),
        (GuidedDecoding(json={"$ref": "#/$defs/a"}), "does not exist"),
        (GuidedDecoding(json={"$ref": "http://example.com/a.json"}), "not"),
        (GuidedDecoding(json={"enum": ["x" * 300_000]}), "/262144 bytes"),
        (GuidedDecoding(json={"const": "\ud800"}), "hex escape"),
        (GuidedDecoding(json=True), "object"),
        (GuidedDecoding(regex="("), "unclosed group"),
        (GuidedDecoding(regex="(?=a)b"), "look-around"),
        (GuidedDecoding(choice=("\ud800",)), "surrogates"),
        (GuidedDecoding(grammar="root ::= ("), "Expected"),
        (GuidedDecoding(grammar=""), "root"),
        (tagged({"type": "sequence", "elements": []}), "sequence"),
        (GuidedDecoding(structural_tag={}), "format"),
    ],
)
def test_an_unusable_constraint_is_refused_with_its_cause(
    guided: GuidedDecoding, words: str
) -> None:
    with pytest.raises(ConstraintError, match=words):
        check_constraint(guided)


def test_a_schema_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(ConstraintError, match="deep"):
        check_constraint(GuidedDecoding(json=schema))
    while schema:  # without a recursive destructor
        schema = schema["properties"]["a"]
