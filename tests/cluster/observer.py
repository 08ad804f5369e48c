"""Prints what the controller of a mesh on Ray reports: one JSON line for each line on stdin.

Runs in the environment of Ray: `python -m tests.cluster.observer ADDRESS`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray

from common.errors import MeshError
from meshctl.cluster.on_ray import RayMesh, connect

MESH = "default"


# Any: JSON.
def answer(mesh: RayMesh, command: str) -> Any:
    """Returns the answer to a command; None if Ray has none."""
    match command:
        case "nodes":
            return [
                {"id": n["NodeID"], "address": n["NodeManagerAddress"], "is_alive": n["Alive"]}
                for n in ray.nodes()
            ]
    try:
        return mesh.call(command)
    except MeshError as error:
        return {"error": error.message}


def main(address: str) -> None:
    """Answers until the end of the input."""
    # Ray prints what its nodes report to standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    connect(address)
    mesh = RayMesh(MESH)
    for line in sys.stdin:
        answers.write(json.dumps(answer(mesh, line.strip())) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
