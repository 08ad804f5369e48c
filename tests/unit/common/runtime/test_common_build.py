"""Which form of the modules runs."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
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


@pytest.mark.parametrize("installed", ["0.3.0", "0.3.0+compiled"])
def test_members_advertise_the_version_without_its_local_part(
    installed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda distribution_name: installed)
    assert build.build_id() == f"0.3.0 {build.build_name()}"


def test_a_tree_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_not_found(distribution_name: str) -> str:
        raise metadata.PackageNotFoundError(distribution_name)

    monkeypatch.setattr(metadata, "version", raise_not_found)
    assert build.build_id() == f"uninstalled {build.build_name()}"
