"""Commits: a short subject, and a body that states problem, solution and validation.

A subject has at most SUBJECT_MAX characters. The body follows an empty line and has at least
BODY_MIN sentences or lines; trailers such as Signed-off-by do not count. The rule holds for the
commits after FIRST, except merges. Without that commit (an archive, a shallow clone) the check
passes.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tools.style.sources import ROOT, git, report

FIRST = "39bdc27"
SUBJECT_MAX = 60
BODY_MIN = 3
_TRAILER = re.compile(r"[A-Z][A-Za-z]*(-[A-Za-z]+)+: ")
_SENTENCE_END = re.compile(r"[.!?:;](?=\s|$)")


def message_problems(message: str) -> Iterator[str]:
    """Yields what is wrong with a commit message."""
    subject, _, rest = message.strip().partition("\n")
    if len(subject) > SUBJECT_MAX:
        yield f"the subject has {len(subject)} characters; limit {SUBJECT_MAX}"
    if rest and not rest.startswith("\n"):
        yield "no empty line after the subject"
    lines = [line for line in rest.splitlines() if line.strip() and not _TRAILER.match(line)]
    if max(len(lines), len(_SENTENCE_END.findall("\n".join(lines)))) < BODY_MIN:
        yield "the body does not state problem, solution and validation"


def commits_since(first: str, root: Path = ROOT) -> list[tuple[str, str]] | None:
    """Returns id and message of each commit after `first`; None if the history lacks it."""
    try:
        git("merge-base", "--is-ancestor", first, "HEAD", root=root)
        log = git("log", "-z", "--no-merges", "--format=%h%n%B", f"{first}..HEAD", root=root)
    except (OSError, subprocess.CalledProcessError):
        return None
    return [
        (commit, message)
        for commit, _, message in (entry.partition("\n") for entry in log.split("\0") if entry)
    ]


def check_commits(root: Path = ROOT) -> bool:
    """Returns whether the message of each commit keeps the rules."""
    commits = commits_since(FIRST, root)
    if commits is None:
        return report("commits", (), f"not checked, the history does not reach {FIRST}")
    wrong = [
        f"commit {commit}: {problem}"
        for commit, message in commits
        for problem in message_problems(message)
    ]
    return report("commits", wrong, f"{len(commits)} messages checked")
