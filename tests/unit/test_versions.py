"""The supported versions, and the comparison of the protos with them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools.versions.__main__ import ROOT, check
from tools.versions.supported import supported_versions

ROUTER = "kvmesh/router/v1/router.proto"
pytestmark = pytest.mark.slow


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    """A copy of the protos."""
    ignored = shutil.ignore_patterns("*.py", "*.pyi", "__pycache__")
    return shutil.copytree(ROOT / "protos", tmp_path / "protos", ignore=ignored)


def changed(protos: Path, pattern: str, replacement: str) -> None:
    path = protos / ROUTER
    text, count = re.subn(pattern, replacement, path.read_text(), count=1)
    assert count == 1
    path.write_text(text)


def test_each_supported_version_has_a_descriptor_set_and_a_full_commit() -> None:
    versions = supported_versions()
    assert versions
    for version in versions:
        assert re.fullmatch("[0-9a-f]{40}", version.commit)
        assert version.descriptors.stat().st_size < 200_000
        assert version.name in (ROOT / "docs/operate/versions.md").read_text()


def test_the_protos_are_compatible_with_each_supported_version(protos: Path) -> None:
    assert check(protos, supported_versions())


@pytest.mark.parametrize(
    ("pattern", "replacement", "why"),
    [
        ("uint64 total_tokens = 2;", "string total_tokens = 2;", "total_tokens"),
        (r"(string model) = 1;", r"\1 = 1001;", "1"),
        (r"  rpc Route\(", "  rpc Place(", "Route"),
        (r"rpc Route\(RouteRequest\)", "rpc Route(Query)", "RouteRequest"),
        (r"service RouterService", "service OtherService", "RouterService"),
    ],
)
def test_a_change_that_an_earlier_version_cannot_read_is_found(
    protos: Path, pattern: str, replacement: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(protos, pattern, replacement)
    assert not check(protos, supported_versions())
    assert why in capsys.readouterr().out


def test_a_new_field_and_a_new_name_of_a_field_are_compatible(protos: Path) -> None:
    changed(protos, r"message Query \{", "message Query {\n  // New.\n  string added = 1000;\n")
    changed(protos, r"excluded_worker_ids = 9", "workers_to_avoid = 9")
    assert check(protos, supported_versions())
