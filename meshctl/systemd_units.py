"""The units of systemd that run the services of a mesh (pure)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.runtime.config import PREFIX
from common.service.lifecycle import EXIT_CONFIG
from meshctl.services import ServiceSpec, process_count

# Seconds of systemd beyond the time in which a service ends by itself.
STOP_MARGIN_S = 5.0
# The first descriptor that systemd passes.
FIRST_FD = 3
DESCRIPTORS_MAX = 32_768


@dataclass(frozen=True, slots=True)
class Host:
    """Where the units run."""

    python: str
    """Path of the interpreter."""
    folder: Path
    """Of relative paths."""
    env_folder: Path
    """Of the files of variables."""
    user: str
    """"": that of systemd."""
    http_host: str
    """Address of the frontends."""
    environ: Mapping[str, str]
    """Of meshctl; units have its KVMESH_* variables and PYTHONPATH."""
    prefix: str = "kvmesh"


def build_units(specs: Sequence[ServiceSpec], host: Host) -> dict[str, str]:
    """Returns the files by name: a service and a file of variables a member, a socket a frontend,
    and a target."""
    files: dict[str, str] = {}
    for spec in specs:
        name = f"{host.prefix}-{spec.name}"
        has_socket = bool(spec.http_port) and process_count(spec, host.environ) == 1
        if has_socket:
            files[f"{name}.socket"] = _socket_unit(spec, host)
        files[f"{name}.service"] = _service_unit(spec, specs, host, has_socket=has_socket)
        files[f"{name}.env"] = _variables(spec, host)
    wants = " ".join(f"{host.prefix}-{spec.name}.service" for spec in specs)
    files[f"{host.prefix}.target"] = (
        f"[Unit]\nDescription=KVMesh\nWants={wants}\n\n[Install]\nWantedBy=multi-user.target\n"
    )
    return files


def _service_unit(
    spec: ServiceSpec, specs: Sequence[ServiceSpec], host: Host, *, has_socket: bool
) -> str:
    # Units stop in the reverse order: services that send work before those that receive it.
    later = [s for s in specs if s.drain_rank > spec.drain_rank]
    after = ["network-online.target", *(f"{host.prefix}-{s.name}.service" for s in later)]
    name = f"{host.prefix}-{spec.name}"
    command = [host.python, "-m", spec.module, *spec.args]
    unit = [
        f"Description=KVMesh {spec.name} ({spec.role})",
        f"PartOf={host.prefix}.target",
        "Wants=network-online.target",
    ]
    if has_socket:
        command += ["--http-fd", str(FIRST_FD)]
        unit.append(f"Requires={name}.socket")
        after.append(f"{name}.socket")
    unit += [f"After={' '.join(after)}", "StartLimitIntervalSec=0"]
    service = [
        "Type=exec",
        *([f"User={host.user}"] if host.user else []),
        f"WorkingDirectory={_escape(str(host.folder))}",
        f"EnvironmentFile={_escape(str(host.env_folder / f'{name}.env'))}",
        f"ExecStart={' '.join(map(_quote, command))}",
        "Restart=always",
        "RestartSec=1",
        "# Another start with the same settings would fail, too.",
        f"RestartPreventExitStatus={EXIT_CONFIG}",
        "KillSignal=SIGTERM",
        "KillMode=mixed",
        f"TimeoutStopSec={math.ceil(spec.drain_s + STOP_MARGIN_S)}",
        f"LimitNOFILE={DESCRIPTORS_MAX}",
        "NoNewPrivileges=yes",
    ]
    install = [f"WantedBy={host.prefix}.target"]
    return _sections({"Unit": unit, "Service": service, "Install": install})


def _socket_unit(spec: ServiceSpec, host: Host) -> str:
    address = f"[{host.http_host}]" if ":" in host.http_host else host.http_host
    return _sections(
        {
            "Unit": [
                f"Description=KVMesh HTTP port of {spec.name}",
                f"PartOf={host.prefix}.target",
            ],
            "Socket": [f"ListenStream={address}:{spec.http_port}", "Backlog=4096"],
            "Install": ["WantedBy=sockets.target"],
        }
    )


def _variables(spec: ServiceSpec, host: Host) -> str:
    inherited = {
        name: value
        for name, value in host.environ.items()
        if name.startswith(PREFIX) or name == "PYTHONPATH"
    }
    values = spec.with_environ(inherited)
    return "".join(f"{name}={_quote_value(value)}\n" for name, value in sorted(values.items()))


def _sections(sections: Mapping[str, Sequence[str]]) -> str:
    texts = ["\n".join([f"[{name}]", *lines]) + "\n" for name, lines in sections.items()]
    return "\n".join(texts)


def _escape(text: str) -> str:
    return text.replace("%", "%%")


def _quote(word: str) -> str:
    """Returns a word of ExecStart."""
    text = _escape(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    is_plain = text and not set(text) & set(" \t\n'\";")
    return text if is_plain and "\\" not in text else f'"{text}"'


def _quote_value(value: str) -> str:
    """Returns a value of an environment file."""
    escaped = (
        value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    )
    return f'"{escaped}"'
