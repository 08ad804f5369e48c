"""Which form of the modules runs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path

import pytest

from common.runtime import build

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _without_memory() -> Iterator[None]:
    build.is_compiled.cache_clear()
    yield
    build.is_compiled.cache_clear()


def test_the_form_is_that_of_the_modules_beside_this_test() -> None:
    has_extensions = any((ROOT / "common/kv").glob(f"prefix_index*{EXTENSION_SUFFIXES[-1]}"))
    assert build.build_name() == ("compiled" if has_extensions else "source")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (f"/site/common/kv/prefix_index{EXTENSION_SUFFIXES[0]}", "compiled"),
        ("/site/common/kv/prefix_index.py", "source"),
        (None, "source"),
    ],
)
def test_an_extension_module_is_the_compiled_form(
    file: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModuleSpec("common.kv.prefix_index", None, origin=file)
    monkeypatch.setattr(build, "find_spec", lambda _: spec)
    assert build.build_name() == name
