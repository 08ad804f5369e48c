"""Compares the protos with those of each supported version; part of `make lint`.

usage: python -m tools.versions                  exit status 1 if one cannot read or call these
       python -m tools.versions add COMMIT NAME  add a version: its descriptor set and its entry

Fields keep their numbers and types, calls their names and types; names of fields may change
(`breaking` of protos/buf.yaml).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tools.versions.supported import FOLDER, LIST, Version, supported_versions

ROOT = Path(__file__).resolve().parents[2]


def check(protos: Path, versions: list[Version]) -> bool:
    """Prints each change of `protos` that a version cannot read; returns whether there is none."""
    is_compatible = True
    for version in versions:
        done = _buf("breaking", str(protos), "--against", str(version.descriptors))
        if done.returncode:
            is_compatible = False
            print(
                f"protos: not compatible with version {version.name}:\n{done.stdout}{done.stderr}"
            )
    if is_compatible:
        names = ", ".join(version.name for version in versions)
        print(f"protos: compatible with {names}")
    return is_compatible


def add(commit: str, name: str) -> None:
    """Writes the descriptor set of a commit, and its entry in the list."""
    full = _output("git", "-C", str(ROOT), "rev-parse", "--verify", f"{commit}^{{commit}}").strip()
    with tempfile.TemporaryDirectory(prefix="kvmesh-protos-") as folder:
        archive = Path(folder) / "protos.tar"
        _output("git", "-C", str(ROOT), "archive", f"--output={archive}", full, "protos")
        _output("tar", "-xf", str(archive), "-C", folder)
        target = FOLDER / f"{name}.binpb"
        done = _buf("build", f"{folder}/protos", "--exclude-source-info", "-o", str(target))
        if done.returncode:
            sys.exit(done.stderr)
    if name not in [version.name for version in supported_versions()]:
        with LIST.open("a") as file:
            file.write(f'\n[[versions]]\nname = "{name}"\ncommit = "{full}"\n')


def _buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "buf"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _output(*command: str) -> str:
    """Returns the output of a command. Exits with its error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit status."""
    match arguments:
        case []:
            return 0 if check(ROOT / "protos", supported_versions()) else 1
        case ["add", commit, name]:
            add(commit, name)
            return 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
