"""Configured aliases: how a file is read, and which model serves a request."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from common.errors import InvalidRequest
from frontend_svc.models.alias_file import AliasFile
from frontend_svc.models.variants import Aliases, VariantChoice, choose, parse_aliases


def alias(**weights: float) -> dict[str, Any]:
    return {"variants": [{"model": name, "weight": weight} for name, weight in weights.items()]}


def parse(**aliases: Any) -> Aliases:
    return parse_aliases(json.dumps(aliases).encode())


def serves_all(name: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ('{"a": {\n"variants": ]}}', None, "line 2"),
        ("[]", "aliases", "valid dictionary"),
        ('{"a": {}}', "a.variants", "required"),
        ('{"a": {"variants": []}}', "a.variants", "at least 1 item"),
        ('{"a": {"variants": [{"model": "b", "weight": -1}]}}', "a.variants[0].weight", "equal to"),
        ('{"a": {"variants": [{"model": "b", "weight": 0}]}}', "a.variants", "weight 0"),
        ('{"a": {"variants": [{"model": "b"}, {"model": "b"}]}}', "a.variants", "same model"),
        ('{"a": {"variants": [{"model": "b"}], "sticky": "user"}}', "a.sticky", "session"),
        ('{"a": {"variants": [{"model": "b"}], "fall": []}}', "a.fall", "not permitted"),
        ('{"a": {"variants": [{"model": "b c"}]}}', "a.variants[0].model", "pattern"),
        (
            '{"a": {"variants": [{"model": "b"}]}, "b": {"variants": [{"model": "c"}]}}',
            "a.variants[0].model",
            "is an alias of this file",
        ),
        (
            '{"a": {"variants": [{"model": "c"}], "fallback": ["b"]}, '
            '"b": {"variants": [{"model": "c"}]}}',
            "a.fallback[0]",
            "is an alias of this file",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_line_or_field(
    text: str, field: str | None, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_aliases(text.encode())
    assert caught.value.field == field
    assert words in caught.value.message


def test_an_alias_may_have_the_name_of_its_own_model() -> None:
    found = parse(a={"variants": [{"model": "a"}], "fallback": ["b"]})
    chosen = choose("a", found["a"], b"", lambda name: name == "b", Random(0))
    assert (chosen, chosen.is_fallback) == (VariantChoice("a", "a", "b"), True)


@pytest.mark.parametrize("is_keyed", [True, False])
def test_variants_get_requests_by_weight(is_keyed: bool) -> None:
    found = parse(a=alias(b=90, c=10, d=0))
    rng, count = Random(1), 20_000
    drawn = Counter(
        choose("a", found["a"], str(n).encode() if is_keyed else b"", serves_all, rng).model
        for n in range(count)
    )
    assert drawn["d"] == 0
    assert drawn["c"] / count == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / count))


def test_a_key_has_one_variant_and_a_changed_weight_moves_no_more_than_it_must() -> None:
    before, after = parse(a=alias(b=90, c=10)), parse(a=alias(b=80, c=20))
    keys = [str(number).encode() for number in range(5000)]

    def variants(aliases: Aliases, seed: int) -> list[str]:
        rng = Random(seed)
        return [choose("a", aliases["a"], one, serves_all, rng).model for one in keys]

    first = variants(before, 1)
    assert first == variants(before, 2), "no randomness"
    moved = [(old, new) for old, new in zip(first, variants(after, 3), strict=True) if old != new]
    assert {old for old, _ in moved} == {"b"}
    assert len(moved) / len(keys) == pytest.approx(0.1, abs=0.02)


def test_only_a_configured_fall_back_replaces_a_variant_without_a_worker() -> None:
    found = parse(a=alias(b=1), c={**alias(b=1), "fallback": ["d", "e"]})

    def serves(*names: str) -> Any:
        return lambda name: name in names

    rng = Random(0)
    assert choose("a", found["a"], b"", serves("d"), rng) == VariantChoice("a", "b", "b")
    assert choose("c", found["c"], b"", serves("e"), rng) == VariantChoice("c", "b", "e")
    assert choose("c", found["c"], b"", serves("d", "e"), rng).model == "d"
    assert choose("c", found["c"], b"", serves("b", "d"), rng) == VariantChoice("c", "b", "b")
    assert choose("c", found["c"], b"", serves(), rng) == VariantChoice("c", "b", "b")


def test_a_changed_file_is_used_and_an_invalid_one_changes_nothing(tmp_path: Path) -> None:
    path, used = tmp_path / "aliases.json", list[Aliases]()
    path.write_text(json.dumps({"a": alias(b=1)}))
    aliases = AliasFile(str(path), used.append)
    assert list(used[-1]) == ["a"]
    for text in ("{", json.dumps({"a": alias(b=1)}), json.dumps({"x": alias(b=2)})):
        path.write_text(text)
        asyncio.run(aliases.reload())
    path.unlink()
    asyncio.run(aliases.reload())
    assert [list(one) for one in used] == [["a"], ["x"]]
