"""Source trees that a benchmark compares."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.measure import ROOT


@contextlib.contextmanager
def commit_tree(commit: str, *, compiled: bool = False) -> Iterator[Path]:
    """Yields a temporary folder with the files of a commit.

    compiled: compiles its modules as `make compiled` does, with the commit's own tools/compile.py.
    """
    with tempfile.TemporaryDirectory(prefix="kvmesh-tree-") as folder:
        # An archive of a subfolder, such as build/compiled, would be a part of the tree.
        repository = _output("git", "-C", str(ROOT), "rev-parse", "--show-toplevel").strip()
        archive = Path(folder) / "tree.tar"
        _output("git", "-C", repository, "archive", f"--output={archive}", commit)
        _output("tar", "-xf", str(archive), "-C", folder)
        archive.unlink()
        if compiled:
            _output(sys.executable, "tools/compile.py", folder, cwd=folder)
        yield Path(folder)


def is_compiled(tree: Path) -> bool:
    """Returns whether a tree has compiled modules."""
    return any(tree.glob("*__mypyc.*"))


def environment(tree: Path) -> dict[str, str]:
    """Returns the variables of a process that runs the modules of a tree."""
    return {**os.environ, "PYTHONPATH": f"{tree}/protos:{tree}"}


def _output(*command: str, cwd: str | None = None) -> str:
    """Returns the output of a command. Raises RuntimeError with its end if it fails."""
    env = None if cwd is None else environment(Path(cwd))
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)
    if done.returncode:
        end = "\n".join([done.stdout, done.stderr])[-2000:].strip()
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}: {end}")
    return done.stdout
