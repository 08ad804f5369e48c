"""What `meshctl restart`, `drain`, `start`, `scale` and `down` share: a request to the `meshctl up`
of a folder.

Exit status: 0 if it was done; 1 if it failed, with the reason; 2 if no `meshctl up` answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from meshctl.commands.ray_mesh import requests_of_ray
from meshctl.process.control import NoMesh, request

EXIT_FAILED = 1
EXIT_NO_MESH = 2
# Of an answer while the user waits for the completion of a name.
COMPLETION_TIMEOUT_S = 2.0

log_dir_flag = click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    default=Path(".run/logs"),
    show_default=True,
    help="Folder of the logs of `meshctl up`, which has its control socket.",
)


def complete_names(ctx: click.Context, _param: click.Parameter, start: str) -> list[str]:
    """Returns the names of the members of a running `meshctl up`."""
    try:
        answers = list(
            request(ctx.params["log_dir"], {"command": "status"}, timeout_s=COMPLETION_TIMEOUT_S)
        )
    except NoMesh:
        return []
    names = [member["name"] for answer in answers for member in answer.get("done", ())]
    return sorted(name for name in names if name.startswith(start))


# Any: JSON.
def _answers(log_dir: Path, line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the answers of the `meshctl up` of a folder, or of its mesh on Ray. Raises NoMesh."""
    try:
        yield from request(log_dir, line)
    except NoMesh:
        from_ray = requests_of_ray(log_dir, line)
        if from_ray is None:
            raise
        yield from from_ray


# Any: JSON.
def run_operation(log_dir: Path, line: dict[str, Any], *, as_json: bool) -> int:
    """Sends a request and prints its progress; returns the exit status.

    as_json: the last line on standard output is the result as JSON, and progress goes to standard
    error.
    """
    progress = sys.stderr if as_json else sys.stdout
    result: dict[str, Any] = {}
    try:
        for answer in _answers(log_dir, line):
            if "state" in answer:
                text = f"{answer['name']:<12}  {answer['state']:<8}  {answer['detail']}"
                progress.write(f"{text.rstrip()}\n")
                progress.flush()
            elif "error" in answer:
                result = {"error": answer["error"]}
            elif "done" in answer:
                result = answer["done"]
    except NoMesh as error:
        sys.stderr.write(f"meshctl: {error}\n")
        return EXIT_NO_MESH
    if as_json:
        sys.stdout.write(f"{json.dumps(result)}\n")
    if problem := result.get("error") or _describe_failure(result):
        sys.stderr.write(f"meshctl: {problem}\n")
        return EXIT_FAILED
    return 0


def _describe_failure(result: dict[str, Any]) -> str:
    failed = result.get("failed")
    if not failed:
        return ""
    count = len(result["replaced"])
    return f"stopped at {failed['name']} after {count} replaced members: {failed['reason']}"
