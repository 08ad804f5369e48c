"""The build of the package: its form, its requirements, and a wheel of the sources.

`make wheel-test` builds compiled wheels, installs them and runs them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools import build_backend

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def stub_compiler(folder: Path, script: str) -> str:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_working_compiler_gives_compiled_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", stub_compiler(tmp_path, "exit 0"))
    assert build_backend.chosen_form(None) == ("compiled", "")
    assert "mypy==" in " ".join(build_backend.get_requires_for_build_wheel())


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "there is no C compiler '/no/compiler'"),
        ("echo 'try.c:1: fatal error: Python.h: none' >&2; exit 1", "Python.h: none"),
    ],
)
def test_without_compiler_or_headers_the_source_is_installed_and_the_reason_given(
    script: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = "/no/compiler" if script is None else stub_compiler(tmp_path, script)
    monkeypatch.setenv("CC", compiler)
    form, why = build_backend.chosen_form({})
    assert form == "source"
    assert reason in why
    assert build_backend.get_requires_for_build_wheel() == []


def test_a_setting_leaves_the_compilation_out() -> None:
    assert build_backend.chosen_form({"build": "source"})[0] == "source"
    with pytest.raises(ValueError, match="use compiled or source"):
        build_backend.chosen_form({"build": "fast"})


def test_every_requirement_of_the_build_has_an_exact_version() -> None:
    pinned = build_backend.compile_requirements()
    listed = re.findall(r"^[\w.-]+==", (ROOT / "requirements/compile.txt").read_text(), re.M)
    assert len(pinned) == len(listed) > 40
    assert PROJECT["build-system"]["requires"][0] in pinned
    assert not [line for line in pinned if "--hash" in line or line.endswith("\\")]


def test_the_build_has_the_types_of_all_packages_that_compiled_modules_reach() -> None:
    """Without one, mypy refuses to compile, also in the images. Only tests use the others."""
    extras = PROJECT["project"]["optional-dependencies"]
    types = {line for line in extras["dev"] if line.startswith("types-")}
    assert types - {"types-jsonschema", "types-pyyaml"} <= set(extras["compile"])


@pytest.mark.slow
def test_a_wheel_of_the_sources_is_whole_and_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, 'tools'); import build_backend as backend;"
        "backend.build_wheel(sys.argv[1], {'build': 'source'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no compiled modules, because build=source was given: a router serves" in done.stdout
    (wheel,) = tmp_path.iterdir()
    assert wheel.name == "kvmesh-0.1.0+source-py3-none-any.whl"
    assert not [*ROOT.glob("*.egg-info"), *ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*")]
    with ZipFile(wheel) as file:
        names = set(file.namelist())
    folders = {"common", "frontend_svc", "indexer_svc", "kvmesh", "meshctl", "replay"}
    folders |= {"batch_svc", "console_svc", "epp_svc", "router_svc", "worker_svc"}
    folders.add("kvmesh-0.1.0+source.dist-info")
    assert {name.split("/")[0] for name in names} == folders
    assert "worker_svc/engines/sim/model/tokenizer.json" in names
    assert "console_svc/assets/console.css" in names
    listed = subprocess.run(
        ["git", "ls-files", *sorted(folders), "protos/kvmesh"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    modules = {name.removeprefix("protos/") for name in listed if name.endswith(".py")}
    assert modules <= names
