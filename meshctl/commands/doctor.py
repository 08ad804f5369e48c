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

from common.runtime.config import ServiceConfig
from common.runtime.mesh_auth import CALL_VALID_S
from meshctl.doctor.checks import find_problems
from meshctl.doctor.collect import collect
from meshctl.doctor.collect.host import read_host
from meshctl.doctor.facts import Facts, Limits
from meshctl.doctor.report import exit_status, to_json, to_lines
from meshctl.options import REGISTRY_FLAGS, MeshCommand, MeshConfig, json_flag
from meshctl.usage import UnusableSettings


class DoctorConfig(MeshConfig):
    """Settings of `meshctl doctor`."""

    answer_s: PositiveFloat = 2.0
    """Seconds for each question to a member or the registry."""
    disk_free_mb: NonNegativeFloat = 512.0
    """Least free space in MB of the folders of registry, logs and records."""
    certificate_days: NonNegativeFloat = 14.0
    """Days before the end of a certificate from which on it is a finding."""
    log_dir: Path = Path(".run/logs")
    """Folder of the logs of `meshctl up`."""


class _DoctorCommand(MeshCommand[DoctorConfig]):
    """Unusable settings are findings."""

    def invoke(self, ctx: click.Context) -> object:
        try:
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
@click.pass_obj
def command(environ: Mapping[str, str], config: DoctorConfig, as_json: bool) -> int:
    """Checks settings, registry, members, clocks, index, ports, certificates and disk.

    Each finding states what to do. It changes nothing. The exit status is 1 if an error was found.
    """
    return doctor(config, environ, as_json=as_json)


def doctor(config: DoctorConfig, environ: Mapping[str, str], *, as_json: bool) -> int:
    """Prints the findings; returns the exit status."""
    limits = Limits(
        answer_s=config.answer_s,
        disk_free_mb=config.disk_free_mb,
        certificate_days=config.certificate_days,
        call_valid_s=CALL_VALID_S,
    )
    with _without_logs():
        facts = asyncio.run(collect(config, environ, limits, config.log_dir))
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
