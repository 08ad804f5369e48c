"""Runs schemathesis over /openapi.json of a mesh; its exit status is that of schemathesis.

    python -m tests.fuzz.openapi --st FILE [ARGUMENTS OF SCHEMATHESIS...]

FILE: the program `st` of the environment of `make test-clients`. Compaction and the files of a
tokenizer are left out: they are always a 501.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kit.processes import Mesh

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
CONFIG = Path(__file__).with_name("schemathesis.toml")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--st", type=Path, required=True)
    arguments, more = parser.parse_known_args()
    command = [str(arguments.st.absolute()), "--config-file", str(CONFIG), "run"]
    command += ["--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing"]
    command += ["--exclude-path-regex", "/(compact|tokenizer_info)$", "--max-examples", "30"]
    command += ["--generation-deterministic", "--request-timeout", "20", "--warnings", "off", *more]
    flags = ["--speedup=1000", "--serve=chat,completions,embedding,score"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Mesh(Path(folder), workers=1, batches=1, worker_flags=flags) as mesh,
    ):
        done = subprocess.run([*command, f"{mesh.url}/openapi.json"], cwd=folder, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
