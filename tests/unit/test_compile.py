"""The rewriting of dataclasses before they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import signature
from typing import Any

import pytest

from tools.compile import with_annotations, with_native_init

SOURCE = '''
from __future__ import annotations
from dataclasses import dataclass, field

@dataclass(slots=True, eq=False)
class Page:
    """A page."""

    key: int
    name: str = "none"  # of the page
    children: list[int] = field(default_factory=list)
    hidden: tuple[int, ...] = field(default=(1,), compare=False)

    def __post_init__(self) -> None:
        if self.key < 0:
            raise ValueError("key")

    def twice(self) -> int:
        return 2 * self.key

@dataclass(kw_only=True)
class Settings:
    limit: int = 3
    pages: dict[int, Page] = field(default_factory=lambda: {1: Page(1)})

@dataclass(frozen=True)
class Frozen:
    key: int

@dataclass(slots=True)
class Child(Settings):
    more: int = 0
'''


def load(source: str) -> dict[str, Any]:
    module: dict[str, Any] = {"__name__": __name__}
    exec(source, module)
    return module


def values(one: Any) -> list[object]:
    return [getattr(one, field.name) for field in fields(one)]


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m["Page"](1),
        lambda m: m["Page"](1, "a", [2], (3,)),
        lambda m: m["Page"](key=4, hidden=()),
        lambda m: m["Settings"](limit=5, pages={}),
        lambda m: m["Frozen"](6),
        lambda m: m["Child"](limit=7, more=8),
    ],
)
def test_a_rewritten_dataclass_has_the_same_fields(make: Callable[[Any], Any]) -> None:
    one, other = (make(load(text)) for text in (SOURCE, with_native_init(SOURCE)))
    assert repr(values(one)) == repr(values(other))


def test_a_rewritten_dataclass_has_the_same_parameters_and_makes_each_default_anew() -> None:
    module = load(with_native_init(SOURCE))
    page, other = module["Page"](1), module["Page"](1)
    assert page.children is not other.children
    assert page.twice() == 2
    assert module["Settings"]().pages[1].key == 1
    with pytest.raises(ValueError, match="key"):
        module["Page"](-1)
    with pytest.raises(TypeError):
        module["Settings"](3)
    for name in ("Page", "Settings"):
        assert list(signature(module[name]).parameters) == [
            one.name for one in fields(module[name])
        ]
    assert all(
        one.default is not MISSING for one in fields(module["Settings"]) if one.name == "limit"
    )


def test_only_plain_dataclasses_are_rewritten() -> None:
    rewritten = with_native_init(SOURCE)
    assert rewritten.count("def __init__") == 2
    assert rewritten.count("init=False") == 2
    assert with_native_init("class Plain:\n    key: int\n") == "class Plain:\n    key: int\n"


def test_annotations_are_set_as_text_for_derived_codecs() -> None:
    module = load(with_annotations(SOURCE))
    expected = {"key": "int", "name": "str", "children": "list[int]", "hidden": "tuple[int, ...]"}
    assert module["Page"].__annotations__ == expected
    assert module["Frozen"].__annotations__ == {"key": "int"}
