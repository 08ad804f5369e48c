"""`meshctl export systemd DIR`: writes the units that run a mesh without `meshctl up`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from meshctl.commands.mesh_options import (
    UP_FLAGS,
    MeshFileCommand,
    read_specs,
    report_problems,
)
from meshctl.mesh_file.document import MeshFileError
from meshctl.options import UpOptions
from meshctl.services import ServiceSpec
from meshctl.systemd_units import Host, build_units
from meshctl.usage import Group

EXIT_FAILED = 1
EXIT_NOTHING_DONE = 2
command = Group("export", help="Writes a mesh for another supervisor.")


@command.command("systemd", cls=MeshFileCommand, config=UpOptions, flags=UP_FLAGS)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--user", default="", help="User of the services. Unset: that of systemd.")
@click.pass_obj
def systemd(environ: Mapping[str, str], options: UpOptions, folder: Path, user: str) -> int:
    """Writes the units that run a mesh without `meshctl up`, with the same flags or mesh file.

    DIR receives a unit and a file of variables for each member, a socket for each frontend, and a
    target.
    """
    try:
        specs = read_specs(options, environ)
    except MeshFileError as error:
        report_problems(error)
        return EXIT_NOTHING_DONE
    return export_systemd(options, specs, environ, folder, user=user)


def export_systemd(
    options: UpOptions,
    specs: Sequence[ServiceSpec],
    environ: Mapping[str, str],
    folder: Path,
    *,
    user: str,
) -> int:
    """Writes the units into a folder and prints what to do with them; returns the exit status."""
    host = Host(
        python=sys.executable,
        folder=Path.cwd(),
        env_folder=folder.resolve(),
        user=user,
        http_host=options.http_host,
        environ=environ,
    )
    files = build_units(specs, host)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            # Variables may be secrets.
            mode = 0o600 if name.endswith(".env") else 0o644
            fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with open(fd, "w") as file:
                file.write(text)
    except OSError as error:
        sys.stderr.write(f"meshctl: {folder} cannot be written: {error.strerror}\n")
        return EXIT_FAILED
    units = [name for name in files if not name.endswith(".env")]
    sys.stdout.write(
        f"{len(units)} units and {len(files) - len(units)} files of variables in {folder}\n"
        f"install  systemctl link {folder.resolve()}/*.service {folder.resolve()}/*.socket"
        f" {folder.resolve()}/*.target\n"
        f"start    systemctl enable --now {host.prefix}.target\n"
    )
    return 0
