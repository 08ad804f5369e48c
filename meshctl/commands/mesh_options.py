"""What `meshctl up` and `meshctl export` share: flags, and a mesh file with the same values."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import click

from common.runtime.config import PREFIX, ServiceConfig
from meshctl.mesh_file.document import MeshFileError
from meshctl.mesh_file.load import LoadedMesh, read_mesh_file
from meshctl.mesh_file.schema import Adapter
from meshctl.options import REGISTRY_FLAGS, MeshCommand, UpOptions
from meshctl.process.settings_check import check_settings
from meshctl.services import NO_COUNTS, ServiceSpec, build_service_specs, group_counts

_WITHOUT_FLAG = ServiceConfig.model_fields.keys() | {"then", "http_host"}
UP_FLAGS = (UpOptions.model_fields.keys() - _WITHOUT_FLAG).union(REGISTRY_FLAGS, ["drain_s"])
# In the context of a command line: the mesh file.
_LOADED = f"{__name__}.loaded"


class MeshFileCommand(MeshCommand[UpOptions]):
    """A command with the flags of `meshctl up`, some of whose values may be in a mesh file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags, path = split_mesh_file(args)
        if path is not None and not ctx.resilient_parsing:
            try:
                loaded = read_mesh_file(path, ctx.obj)
            except MeshFileError as error:
                report_problems(error)
                ctx.exit(2)
            flags = [*loaded.option_flags(flags), *flags]
            ctx.meta[_LOADED] = loaded
        return super().parse_args(ctx, flags)

    def read(self, ctx: click.Context, environ: Mapping[str, str]) -> tuple[UpOptions, list[str]]:
        """Returns the options with the settings of the file, which the environment of the services
        does not receive: the file may be another at their next start."""
        loaded: LoadedMesh | None = ctx.meta.get(_LOADED)
        own = environ if loaded is None else loaded.with_shared_settings(environ)
        options, warnings = super().read(ctx, own)
        # It is a setting of the frontends.
        http_host = own.get(f"{PREFIX}FRONTEND_HTTP_HOST", "127.0.0.1")
        return options.model_copy(update={"http_host": http_host}), warnings


def split_mesh_file(args: Sequence[str]) -> tuple[list[str], Path | None]:
    """Returns a command line with `--file` in place of `-f`, and the path that it gives."""
    flags = [_long_form(word) for word in args]
    paths = [word.partition("=")[2] for word in flags if word.startswith("--file=")]
    paths += [path for word, path in pairwise(flags) if word == "--file"]
    return flags, Path(paths[0]) if paths else None


def _long_form(word: str) -> str:
    """Returns `-f`, `-fFILE` or `-f=FILE` with `--file`; another word as it is."""
    if word == "-f":
        return "--file"
    return f"--file={word[2:].removeprefix('=')}" if word.startswith("-f") else word


def report_problems(error: MeshFileError) -> None:
    """Prints the problems of a mesh file, each with its place."""
    sys.stderr.write("".join(f"{problem}\n" for problem in error.problems))


def read_specs(
    options: UpOptions,
    environ: Mapping[str, str],
    counts: Mapping[str, int] = NO_COUNTS,
    *,
    is_restart: bool = False,
) -> list[ServiceSpec]:
    """Returns the services of the options and of the mesh file. Raises MeshFileError.

    - counts: see `build_service_specs`.
    - is_restart: the services on disk may be of another version than this process.
    """
    if options.file is None:
        specs = build_service_specs(options, counts=counts)
        return check_settings(specs, environ) if is_restart else specs
    loaded = read_mesh_file(options.file, environ)
    if problems := find_cluster_keys(loaded):
        raise MeshFileError(problems)
    return check_settings(build_service_specs(options, loaded.mesh, counts), environ, loaded)


def read_counts(
    options: UpOptions, environ: Mapping[str, str], counts: Mapping[str, int] = NO_COUNTS
) -> dict[str, int]:
    """Returns the number of members of each group. Raises MeshFileError.

    counts: see `build_service_specs`.
    """
    if options.file is None:
        return group_counts(options, counts=counts)
    return group_counts(options, read_mesh_file(options.file, environ).mesh, counts)


def read_adapters(options: UpOptions, environ: Mapping[str, str]) -> tuple[Adapter, ...]:
    """Returns the adapters of the mesh file. Raises MeshFileError."""
    if options.file is None:
        return ()
    return read_mesh_file(options.file, environ).mesh.adapters


def find_cluster_keys(loaded: LoadedMesh) -> list[str]:
    """Returns a problem for each key that only a mesh on a cluster obeys."""
    return [
        loaded.document.problem(("workers", i, key), "needs --on ray")
        for i, group in enumerate(loaded.mesh.workers)
        for key, is_used in (
            ("scaling", group.scaling == "recommended"),
            ("transfer_per_node", group.transfer_per_node),
        )
        if is_used
    ]
