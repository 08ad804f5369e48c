"""The files that the checks read, and how a check reports."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICES = (
    "common",
    "epp_svc",
    "frontend_svc",
    "router_svc",
    "indexer_svc",
    "worker_svc",
    "batch_svc",
    "console_svc",
    "meshctl",
)
# Folders of code that is not a test.
PRODUCT = (*SERVICES, "replay", "tools", "bench", "deploy")


def git(*arguments: str, root: Path = ROOT) -> str:
    """Returns the output of a git command. Raises CalledProcessError."""
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def tracked_files(*patterns: str) -> list[str]:
    """Returns the tracked files that match the patterns, without generated code."""
    return [name for name in git("ls-files", *patterns).splitlines() if "_pb2" not in name]


def modules(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Yields path and syntax tree of each tracked Python file of the folders."""
    for path in tracked_files(*(f"{folder}/*.py" for folder in folders)):
        yield path, ast.parse((ROOT / path).read_text("utf-8"))


def report(subject: str, wrong: Collection[str], verdict: str) -> bool:
    """Prints the findings, or the verdict if there are none. Returns whether there are none."""
    print("\n".join(wrong) or f"{subject}: {verdict}")
    return not wrong


def stale(subject: str, exceptions: Collection[str], used: Collection[str]) -> list[str]:
    """Returns a finding for each exception that is no longer needed."""
    return [
        f"{subject}: remove the exception {name!r}" for name in sorted(set(exceptions) - set(used))
    ]
