"""`meshctl doctor`: finds what is wrong with a mesh and this host, and what to do.

Exit status: 0 if no error was found; 1 if one was; 2 if doctor could not run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click
import structlog
from pydantic import NonNegativeFloat, PositiveFloat

from common.runtime.config import ServiceConfig, flag_name
from common.runtime.mesh_auth import CALL_VALID_S
from meshctl.commands.doctor_plan import read_environment, read_mesh
from meshctl.commands.mesh_options import split_mesh_file
from meshctl.doctor.checks import find_problems
from meshctl.doctor.collect import collect
from meshctl.doctor.collect.host import read_host
from meshctl.doctor.facts import Facts, Limits
from meshctl.doctor.report import exit_status, to_json, to_lines
from meshctl.mesh_file.document import MeshFileError
from meshctl.mesh_file.load import LoadedMesh, read_mesh_file
from meshctl.options import REGISTRY_FLAGS, MeshCommand, MeshConfig, json_flag
from meshctl.usage import UnusableSettings

# In the context of a command line: the mesh file, and its problems.
_LOADED, _PROBLEMS = f"{__name__}.loaded", f"{__name__}.problems"


class DoctorConfig(MeshConfig):
    """Settings of `meshctl doctor`."""

    file: Path | None = None
    """Mesh file (`-f FILE` too), which is checked with its services. Unset: none."""
    answer_s: PositiveFloat = 2.0
    """Seconds for each question to a member or the registry."""
    disk_free_mb: NonNegativeFloat = 512.0
    """Least free space in MB of the folders of registry, logs and records."""
    certificate_days: NonNegativeFloat = 14.0
    """Days before the end of a certificate from which on it is a finding."""
    log_dir: Path = Path(".run/logs")
    """Folder of the logs of `meshctl up`."""


class _DoctorCommand(MeshCommand[DoctorConfig]):
    """The mesh file gives registry and folder of logs. Unusable settings are findings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags, path = split_mesh_file(args)
        if path is not None and not ctx.resilient_parsing:
            try:
                loaded = read_mesh_file(path, ctx.obj)
            except MeshFileError as error:
                ctx.meta[_PROBLEMS] = error.problems
            else:
                ctx.meta[_LOADED] = loaded
                own = tuple(map(flag_name, DoctorConfig.model_fields))
                flags += [f for f in loaded.option_flags(flags) if f.partition("=")[0] in own]
                ctx.obj = loaded.with_shared_settings(ctx.obj)
        return super().parse_args(ctx, flags)

    def invoke(self, ctx: click.Context) -> object:
        try:
            if problems := ctx.meta.get(_PROBLEMS):
                raise UnusableSettings(problems, ctx)
            return super().invoke(ctx)
        except UnusableSettings as error:
            facts = Facts(time.time(), setting_problems=tuple(error.problems), host=read_host())
            return report(facts, as_json=ctx.params["as_json"])


@click.command(
    "doctor",
    cls=_DoctorCommand,
    config=DoctorConfig,
    flags=(DoctorConfig.model_fields.keys() - ServiceConfig.model_fields.keys()).union(
        REGISTRY_FLAGS
    ),
)
@json_flag
@click.pass_context
def command(ctx: click.Context, config: DoctorConfig, as_json: bool) -> int:
    """Checks settings, registry, members, clocks, index, ports, certificates and disk.

    Each finding states what to do. It changes nothing. The exit status is 1 if an error was found.
    """
    return doctor(config, ctx.obj, ctx.meta.get(_LOADED), as_json=as_json)


def doctor(
    config: DoctorConfig,
    environ: Mapping[str, str],
    loaded: LoadedMesh | None = None,
    *,
    as_json: bool,
) -> int:
    """Prints the findings; returns the exit status. loaded: the mesh file; None: none."""
    planned = read_environment(environ) if loaded is None else read_mesh(loaded, environ)
    limits = Limits(
        answer_s=config.answer_s,
        disk_free_mb=config.disk_free_mb,
        certificate_days=config.certificate_days,
        call_valid_s=CALL_VALID_S,
    )
    with _without_logs():
        facts = asyncio.run(collect(config, environ, limits, config.log_dir, planned))
    return report(facts, as_json=as_json)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Drops log lines of the registry: the findings say the same."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def report(facts: Facts, *, as_json: bool) -> int:
    """Prints what the facts show; returns the exit status."""
    findings = find_problems(facts)
    text = json.dumps(to_json(facts, findings)) if as_json else "\n".join(to_lines(facts, findings))
    sys.stdout.write(f"{text}\n")
    return exit_status(findings)
