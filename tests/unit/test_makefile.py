"""What the Makefile does before, between and after other work: set-up and clean."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A Python that creates environments of copies of itself, and notes what it does.
STUB = """\
#!/bin/sh
case "$*" in
  --version) echo Python {version} ;;
  *purelib*) mkdir -p "${{0%/*}}/../site"; echo "${{0%/*}}/../site" ;;
  -c*) exec {python} -c "import sys; sys.version_info = {numbers}; exec(sys.argv[1])" "$2" ;;
  "-m venv "*) sleep 0.2; echo venv >> {log}; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  "-m pip install "*) sleep 0.2; echo install >> {log} ;;
esac
"""
pytestmark = pytest.mark.slow


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with the Makefile and what its set-up reads."""
    folder = tmp_path / "tree"
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    ignored = shutil.ignore_patterns("*.py", "*.pyi", "__pycache__")
    shutil.copytree(ROOT / "protos", folder / "protos", ignore=ignored)
    for name in ("Makefile", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    return folder


def stub_python(folder: Path, version: str) -> Path:
    path = folder.parent / f"python{version}"
    numbers = tuple(map(int, version.split(".")))
    log = folder.parent / "log"
    path.write_text(STUB.format(version=version, numbers=numbers, python=sys.executable, log=log))
    path.chmod(0o755)
    return path


def make(tree: Path, *arguments: str) -> subprocess.Popen[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PY"))}
    return subprocess.Popen(
        ["make", "-s", *arguments],
        cwd=tree,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def steps(tree: Path) -> list[str]:
    """What the stub has done."""
    log = tree.parent / "log"
    return log.read_text().split() if log.exists() else []


def test_two_set_ups_at_once_create_the_environment_and_install_once(tree: Path) -> None:
    python = stub_python(tree, "3.11.7")
    runs = [make(tree, "setup", f"PY={python}") for _ in range(2)]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    assert steps(tree) == ["venv", "install"]
    assert sorted(output.count("installing") for output in outputs) == [0, 1]
    again = make(tree, "setup", f"PY={python}")
    assert again.communicate(timeout=60)[0] == ""
    assert len(steps(tree)) == 2


@pytest.mark.parametrize("version", ["3.9.18", "3.10.13", "3.14.0"])
@pytest.mark.parametrize("variable", ["PY", "PYTHON"])
def test_an_unsupported_python_is_refused_before_an_environment_exists(
    tree: Path, version: str, variable: str
) -> None:
    run = make(tree, "run", f"{variable}={stub_python(tree, version)}")
    output, _ = run.communicate(timeout=60)
    assert run.returncode
    first, *rest = output.splitlines()
    assert "KVMesh needs Python 3.11, 3.12 or 3.13" in first
    assert f"Python {version}" in first
    assert "make PY=python3.11 run" in first
    assert all(line.startswith("make: ***") for line in rest)
    assert not (tree / ".venv").exists()


def test_a_python_that_does_not_exist_is_named(tree: Path) -> None:
    output, _ = make(tree, "setup", "PY=python-of-nowhere").communicate(timeout=60)
    assert "python-of-nowhere is not found" in output.splitlines()[0]


def test_clean_removes_everything_that_git_ignores(tree: Path) -> None:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(tree), *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout

    git("init", "-q")
    git("add", ".")
    kept = git("ls-files")
    for pattern in (tree / ".gitignore").read_text().split():
        name = pattern.rstrip("/").replace("*", "example")
        for folder in ("", "deep/er") if "/" not in name else ("",):
            if not (folder and name.startswith((".venv", ".tools", ".run"))):
                path = tree / folder / name / "file"
                path.parent.mkdir(parents=True)
                path.touch()
    assert git("status", "--porcelain", "--ignored").count("!! ") > 12
    run = make(tree, "clean")
    assert run.communicate(timeout=60)[0] == ""
    assert "!! " not in git("status", "--porcelain", "--ignored")
    assert git("ls-files") == kept
    assert (tree / "requirements/dev.txt").exists()
