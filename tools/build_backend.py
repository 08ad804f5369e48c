"""Builds the package for `pip install .` and wheels (PEP 517): setuptools' backend and one step.

Where a C compiler and the headers of Python are found, a wheel contains compiled modules
(`tools/compile.py`), else the source. The version of the package says which: `0.1.0+compiled`,
`0.1.0+source`; `pip -v` shows the reason. `--config-settings=build=source` leaves the step out.
Editable installations run from source.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from setuptools import Distribution, build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
)
from setuptools.command.build_py import build_py

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT: Final = Path(__file__).resolve().parents[1]
COMPILED: Final = "compiled"
SOURCE: Final = "source"
LOSS: Final = (
    "a router serves 0.7 times as many decisions, and a mesh 0.85 times as many tokens, as with "
    "compiled modules; install a C compiler and the headers of Python (Debian: gcc, python3-dev)"
)
# Any: what setuptools declares.
Settings = Mapping[str, Any] | None


@dataclass(slots=True)
class _Build:
    """What `setup.py` reads: the arguments of the running build."""

    arguments: dict[str, Any] = field(default_factory=dict)


RUNNING: Final = _Build()


def missing_compiler() -> str:
    """Returns why no extension module can be built here; an empty text if one can."""
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.c")
        source.write_text("#include <Python.h>\n")
        command += [f"-I{sysconfig.get_path('include')}", "-c", str(source)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
        except OSError:
            return f"there is no C compiler {command[0]!r}"
    if done.returncode == 0:
        return ""
    error = next((line for line in done.stderr.splitlines() if "error" in line), "no reason")
    return f"{command[0]} compiles no module of Python: {error}"


def chosen_form(settings: Settings) -> tuple[str, str]:
    """Returns the form of the build, and why it has no compiled modules. Raises ValueError."""
    wanted = (settings or {}).get("build", COMPILED)
    if wanted not in (COMPILED, SOURCE):
        raise ValueError(f"--config-settings build={wanted!r}: use {COMPILED} or {SOURCE}")
    reason = "build=source was given" if wanted == SOURCE else missing_compiler()
    return (SOURCE if reason else COMPILED), reason


def compile_requirements() -> list[str]:
    """Returns the packages that the compilation needs, with their exact versions."""
    text = (ROOT / "requirements/compile.txt").read_text()
    return re.findall(r"^([\w.-]+==[^\\\n]*[^\\\s])", text, re.MULTILINE)


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Returns the packages that a wheel needs beside those of pyproject.toml."""
    form, _ = chosen_form(config_settings)
    return compile_requirements() if form == COMPILED else []


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Writes the metadata of the wheel; returns the name of their folder."""
    form, _ = chosen_form(config_settings)
    with _arguments(form):
        return str(build_meta.prepare_metadata_for_build_wheel(metadata_directory))


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds the wheel; returns its name."""
    form, reason = chosen_form(config_settings)
    if form == COMPILED:
        print("kvmesh: building compiled modules (about a minute)", flush=True)
    else:
        print(f"kvmesh: no compiled modules, because {reason}: {LOSS}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvmesh-build-") as folder:
        # Beside the sources, files of an earlier build would get into the wheel.
        options = {"build": {"build_base": folder}, "egg_info": {"egg_base": folder}}
        with _arguments(form, options):
            return str(build_meta.build_wheel(wheel_directory, None, metadata_directory))


@contextmanager
def _arguments(form: str, options: dict[str, dict[str, str]] | None = None) -> Iterator[None]:
    """Sets the arguments for `setup.py` until the block ends."""
    options = options or {}
    options.setdefault("egg_info", {})["tag_build"] = f"+{form}"
    RUNNING.arguments = {"options": options}
    if form == COMPILED:
        RUNNING.arguments |= {"cmdclass": {"build_py": CompiledBuild}, "distclass": PlatformPackage}
    try:
        yield
    finally:
        RUNNING.arguments = {}


class PlatformPackage(Distribution):  # type: ignore[misc]  # setuptools has no types here
    """A package for one platform and version of Python."""

    def has_ext_modules(self) -> bool:
        return True


class CompiledBuild(build_py):  # type: ignore[misc]
    """Copies the modules, and compiles those of `tools/compile.py` in the copy."""

    def run(self) -> None:
        super().run()
        # mypy reads its settings from the working folder.
        settings = Path(self.build_lib, "pyproject.toml")
        shutil.copy(ROOT / "pyproject.toml", settings)
        subprocess.run([sys.executable, str(ROOT / "tools/compile.py"), self.build_lib], check=True)
        settings.unlink()
        shutil.rmtree(Path(self.build_lib, ".mypy_cache"), ignore_errors=True)
