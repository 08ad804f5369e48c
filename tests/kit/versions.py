"""The sources of supported versions, to run their services beside those of this tree."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.trees import commit_tree
from tests.kit.processes import MODEL, ROOT
from tools.versions.supported import Version, supported_versions


class MissingCommit(Exception):
    """The repository lacks the commit of a supported version; the text has the git command."""


def newest_version() -> Version:
    """Returns the version before this one."""
    return supported_versions()[-1]


def model_flags(tree: Path) -> list[str]:
    """Returns flags with which sim workers of this version and of a tree serve one model: the card
    of a model names its files, and those of the built-in model may differ between versions."""
    folder = tree / "worker_svc/engines/sim/model"
    return [f"--model-path={folder}", f"--model-name={MODEL}", "--tool-call-parser=hermes"]


@contextmanager
def old_version_tree(version: Version | None = None, *, root: Path = ROOT) -> Iterator[Path]:
    """Yields a temporary folder with the files of a supported version, by default of the newest
    one: `python -m router_svc` with `FOLDER/protos:FOLDER` as PYTHONPATH is its router.

    root: a folder of the repository. Raises MissingCommit.
    """
    version = version or newest_version()
    found = subprocess.run(
        ["git", "-C", str(root), "cat-file", "-e", f"{version.commit}^{{commit}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise MissingCommit(
            f"{root} has no commit {version.commit} of the supported version {version.name}; run "
            f"`git fetch --unshallow`, or `git fetch origin {version.commit}`"
        )
    with commit_tree(version.commit) as tree:
        yield tree
