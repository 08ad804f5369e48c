"""The version of uvicorn, on whose internal parts edge/server.py relies."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("name", ["runtime", "dev", "compile"])
def test_uvicorn_is_pinned_to_the_version_that_is_installed_and_tested(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"uvicorn=={version('uvicorn')}" in project["dependencies"]
    requirements = (ROOT / f"requirements/{name}.txt").read_text()
    assert re.findall(r"(?m)^uvicorn==(\S+)", requirements) == [version("uvicorn")]
