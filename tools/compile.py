"""Compiles the modules with the most work for each decision, KV event and frame with mypyc.

`python tools/compile.py FOLDER` builds an extension module beside each of these files of a copy of
the tree; Python imports it in place of the file. It needs a C compiler and the development
dependencies. Compile copies only: in the source tree an edited file would have no effect.
"""

import ast
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
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
        "common/request/placement.py",
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
        "worker_svc/kv_events/page_tree.py",
        "worker_svc/kv_events/parentless_pages.py",
        "worker_svc/engines/sim/block_manager.py",
        "worker_svc/engines/sim/scheduler.py",
        "worker_svc/engines/sim/step_loop.py",
        "worker_svc/engines/sim/stream.py",
    ),
    "frontend": (
        "frontend_svc/text/choice.py",
        "frontend_svc/openai/output/completion_format.py",
        "frontend_svc/openai/output/sse.py",
        "frontend_svc/request/leg.py",
        "frontend_svc/request/machine.py",
        "frontend_svc/request/output_blocks.py",
        "frontend_svc/text/detokenizer.py",
        "frontend_svc/text/output_text.py",
        "frontend_svc/text/stop_strings.py",
        "frontend_svc/edge/connection.py",
        "frontend_svc/endpoints/request_usage.py",
        "frontend_svc/recent_requests/record.py",
        "frontend_svc/usage/accounting.py",
        "frontend_svc/generation/streaming.py",
        "frontend_svc/request/handle.py",
        "frontend_svc/request/buffer.py",
    ),
}

# Modules with annotations from which codecs are derived.
WIRE_DECLARATIONS = ("common/request/placement.py", "frontend_svc/recent_requests/record.py")


def with_annotations(source: str) -> str:
    """Returns a module that sets the annotations of its classes as text. mypyc keeps neither type
    parameters nor metadata of annotations, so that no codec could be derived from them."""
    assignments = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            texts = {ast.unparse(part.target): ast.unparse(part.annotation) for part in fields}
            assignments.append(f'setattr({node.name}, "__annotations__", {texts})')
    return "\n".join([source, *assignments, ""])


def with_native_init(source: str) -> str:
    """Returns a module that has the `__init__` of its dataclasses in its source. mypyc does not
    compile one that `dataclass` generates, so that an object takes six times as long to make.
    Dataclasses that are frozen or extend other classes keep theirs."""
    lines = source.splitlines()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in reversed(classes):  # so that the numbers of earlier lines hold
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if node.bases or len(decorators) != 1 or not decorators[0].startswith("dataclass("):
            continue
        if "frozen=True" in decorators[0]:
            continue
        fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
        at = fields[-1].end_lineno
        lines[at:at] = _init_of(node, fields, is_kw_only="kw_only=True" in decorators[0])
        at = node.decorator_list[0].lineno - 1
        lines[at] = lines[at].replace("dataclass(", "dataclass(init=False, ")
    return "\n".join([*lines, ""])


def _init_of(
    node: ast.ClassDef, fields: Sequence[ast.AnnAssign], *, is_kw_only: bool
) -> Iterator[str]:
    parameters = ["self", "*"] if is_kw_only else ["self"]
    assignments = []
    for field in fields:
        name, annotation = ast.unparse(field.target), ast.unparse(field.annotation)
        value, default = name, field.value and ast.unparse(field.value)
        if isinstance(field.value, ast.Call) and default and default.startswith("field("):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in field.value.keywords}
            default = options.get("default")
            if (factory := options.get("default_factory")) is not None:
                annotation, default = f"{annotation} | None", "None"
                value = f"({factory})() if {name} is None else {name}"
        parameters.append(f"{name}: {annotation}" + (f" = {default}" if default else ""))
        assignments.append(f"        self.{name} = {value}")
    yield f"    def __init__({', '.join(parameters)}) -> None:"
    yield from assignments
    if any(
        isinstance(statement, ast.FunctionDef) and statement.name == "__post_init__"
        for statement in node.body
    ):
        yield "        self.__post_init__()"


def sources(patterns: tuple[str, ...]) -> list[str]:
    """Returns the files of a group in the working folder."""
    found = {str(path) for pattern in patterns for path in Path().glob(pattern)}
    return sorted(name for name in found if not name.endswith("__init__.py"))


def main() -> None:
    os.chdir(sys.argv[1])
    if Path(".git").exists():
        sys.exit("compile a copy of the tree, not the tree itself: make compiled")
    groups: list[tuple[list[str], str | None]] = [
        (sources(patterns), name) for name, patterns in GROUPS.items()
    ]
    for paths, _ in groups:
        for path in map(Path, paths):
            source = with_native_init(path.read_text())
            is_declaration = str(path) in WIRE_DECLARATIONS
            path.write_text(with_annotations(source) if is_declaration else source)
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
