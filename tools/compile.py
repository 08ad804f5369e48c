"""Compiles the modules with the most work for each decision, KV event and frame with mypyc.

`python tools/compile.py FOLDER` builds an extension module beside each of these files of a copy of
the tree; Python imports it in place of the file. It needs a C compiler and the development
dependencies. Compile copies only: in the source tree an edited file would have no effect.
"""

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from mypyc.build import mypycify
from setuptools import Distribution
from setuptools.command.build_ext import build_ext

# A group is one shared library; calls between modules of a group are calls of C functions.
GROUPS = {
    "common": (
        "common/kv/index_feed.py",
        "common/kv/prefix_index.py",
        "common/request/token_stream/*.py",
        "common/wire/preprocessed.py",
        "common/wire/token_stream.py",
    ),
    "router": ("router_svc/core/*.py",),
    "worker": (
        "worker_svc/kv_events/changes.py",
        "worker_svc/kv_events/event_log.py",
        "worker_svc/kv_events/external_events.py",
        "worker_svc/kv_events/normalizer.py",
        "worker_svc/kv_events/orphans.py",
        "worker_svc/kv_events/page_tree.py",
        "worker_svc/engines/sim/block_manager.py",
        "worker_svc/engines/sim/scheduler.py",
        "worker_svc/engines/sim/step_loop.py",
        "worker_svc/engines/sim/stream.py",
    ),
    "frontend": (
        "frontend_svc/core/choice.py",
        "frontend_svc/core/openai/completion_format.py",
        "frontend_svc/core/openai/sse.py",
        "frontend_svc/core/request/output_blocks.py",
        "frontend_svc/core/text/detokenizer.py",
        "frontend_svc/core/text/output_text.py",
        "frontend_svc/core/text/stop_strings.py",
    ),
}
# Compiled classes cannot extend abstract classes of the standard library, nor be extended: users
# extend selectors, and the simulation observes a router.
INTERPRETED = {f"router_svc/core/{name}.py" for name in ("candidate_costs", "router", "selectors")}


def sources(patterns: tuple[str, ...]) -> list[str]:
    """Returns the files of a group in the working folder."""
    found = {str(path) for pattern in patterns for path in Path().glob(pattern)}
    return sorted(name for name in found - INTERPRETED if not name.endswith("__init__.py"))


def main() -> None:
    os.chdir(sys.argv[1])
    if Path(".git").exists():
        sys.exit("compile a copy of the tree, not the tree itself: make compiled")
    groups: list[tuple[list[str], str | None]] = [
        (sources(patterns), name) for name, patterns in GROUPS.items()
    ]
    extensions = mypycify(
        [path for paths, _ in groups for path in paths],
        separate=groups,
        opt_level="2",
        debug_level="0",
    )
    with TemporaryDirectory() as objects:
        command = build_ext(Distribution({"ext_modules": extensions}))
        command.inplace, command.parallel, command.build_temp = True, os.cpu_count(), objects
        command.ensure_finalized()
        command.run()
    shutil.rmtree("build")  # the C sources


if __name__ == "__main__":
    main()
