"""Collects the facts of doctor: all remote questions at once, each with a time limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import Conflict, MeshError
from common.registry.instances import HEALTH_META_KEY, METRICS_META_KEY, Instance
from common.rpc import channel as rpc
from common.runtime.config import PREFIX, ServiceConfig
from meshctl.doctor.collect.certificates import read_certificates, read_presented
from meshctl.doctor.collect.frontends import read_frontend
from meshctl.doctor.collect.host import is_local, read_folder, read_host, read_secret_file
from meshctl.doctor.collect.members import has_settled_index, read_member
from meshctl.doctor.collect.processes import find_listeners, read_process
from meshctl.doctor.collect.registry import read_registry
from meshctl.doctor.collect.settings import (
    Planned,
    Settings,
    fixed_ports,
    of_config,
    of_environment,
    of_process,
    record_folders,
    secret_files,
)
from meshctl.doctor.collect.supervisor import read_supervisor
from meshctl.doctor.facts import (
    CertificateFacts,
    Facts,
    FolderFacts,
    Limits,
    MemberFacts,
    PortFacts,
    ProcessFacts,
    RegistryFacts,
)

DEFAULT_HTTP_PORT = 8000
INDEX_SETTLES_S = 1.0


async def collect(
    config: ServiceConfig,
    environ: Mapping[str, str],
    limits: Limits,
    log_dir: Path,
    planned: Planned,
) -> Facts:
    """Returns the facts. It takes a few times `limits.answer_s` at most.

    planned: of the mesh file and the environment.
    """
    problems = list(planned.problems)
    registry: RegistryFacts | None = None
    instances: tuple[Instance, ...] = ()
    security = rpc.PLAINTEXT
    try:
        security = rpc.security_from_config(config)
        registry, instances = await read_registry(config, limits.answer_s)
    except MeshError as error:
        problems.append(f"{PREFIX}{(error.field or '').upper()}: {error.message}")
    supervisor, processes, answers = await asyncio.gather(
        read_supervisor(log_dir, limits.answer_s),
        asyncio.to_thread(_find_processes, instances),
        asyncio.gather(*(_read_member(i, security, limits.answer_s) for i in instances)),
    )
    if unsettled := [member for member in answers if not has_settled_index(member)]:
        # A member that has just started, or left, changes the index for a moment.
        await asyncio.sleep(INDEX_SETTLES_S)
        again = await asyncio.gather(
            *(_read_member(m.instance, security, limits.answer_s) for m in unsettled)
        )
        newest = {member.instance.id: member for member in again}
        answers = [newest.get(member.instance.id, member) for member in answers]
    members = [replace(m, process=processes.get(m.instance.id)) for m in answers]
    not_started = [*planned.settings, *of_environment(environ)]
    sources = [of_config(config), *not_started, *map(of_process, processes.values())]
    presented = await _read_presented(config, members, limits.answer_s)
    return Facts(
        now_s=time.time(),
        limits=limits,
        namespace=config.namespace,
        has_token=config.mesh_token is not None,
        has_tls=config.tls_ca_path is not None,
        setting_problems=tuple(problems),
        expected=planned.expected,
        required=planned.required,
        supervisor=supervisor,
        host=read_host(),
        registry=registry,
        members=tuple(members),
        folders=_read_folders(config, sources, log_dir),
        secret_files=tuple(
            read_secret_file(path, setting, has_keys=has_keys)
            for path, setting, has_keys in secret_files(sources)
        ),
        ports=await asyncio.to_thread(_read_ports, not_started, members, has_mesh=bool(members)),
        certificates=(*read_certificates(sources), *presented),
    )


async def _read_member(instance: Instance, security: rpc.Security, limit_s: float) -> MemberFacts:
    if not instance.http_address:
        return await read_member(instance, security, limit_s)
    member, frontend = await asyncio.gather(
        read_member(instance, security, limit_s), read_frontend(instance, limit_s)
    )
    return replace(member, frontend=frontend)


def _find_processes(instances: Iterable[Instance]) -> dict[int, ProcessFacts]:
    """Returns the processes of members of this host, by instance id."""
    ports = {}
    hosts: dict[str, bool] = {}
    for instance in instances:
        host, _, port = instance.address.rpartition(":")
        if host not in hosts:
            hosts[host] = is_local(host)
        if hosts[host]:
            ports[int(port)] = instance.id
    found = {}
    for listened, pid in find_listeners(ports).items():
        if (process := read_process(pid)) is not None:
            found[ports[listened]] = process
    return found


async def _read_presented(
    config: ServiceConfig, members: Sequence[MemberFacts], limit_s: float
) -> list[CertificateFacts]:
    """Returns the certificates of members whose files cannot be read here."""
    if config.tls_cert_path is None or config.tls_key_path is None:
        return []
    own = (config.tls_cert_path, config.tls_key_path)
    remote = [member.instance.address for member in members if member.process is None]
    found = await asyncio.gather(*(read_presented(address, own, limit_s) for address in remote))
    return [certificate for certificate in found if certificate is not None]


def _read_folders(
    config: ServiceConfig, sources: Iterable[Settings], log_dir: Path
) -> tuple[FolderFacts, ...]:
    uses = {folder.absolute(): "records" for folder in record_folders(sources)}
    uses[log_dir.absolute()] = "logs"
    if config.registry == "file":
        uses[config.registry_path.absolute()] = "registry"
    return tuple(read_folder(path, use) for path, use in uses.items())


def _read_ports(
    not_started: Iterable[Settings], members: Sequence[MemberFacts], *, has_mesh: bool
) -> tuple[PortFacts, ...]:
    ports = list(fixed_ports(not_started))
    if not has_mesh and not any("http_port" in setting.lower() for _, _, setting in ports):
        ports.append((DEFAULT_HTTP_PORT, "127.0.0.1", "--http-port"))
    listeners = find_listeners(port for port, _, _ in ports)
    pids = {member.process.pid for member in members if member.process}
    advertised = {port for member in members for port in _advertised_ports(member.instance)}
    found = []
    for port, host, setting in ports:
        pid = listeners.get(port)
        holder = None if pid is None else read_process(pid)
        is_of_mesh = port in advertised or pid in pids
        error = ""
        try:
            rpc.check_bindable(host, port, setting)
        except Conflict as conflict:
            error = str(conflict.__cause__ or conflict.message)
        if error:
            found.append(PortFacts(port, setting, error, holder, is_of_mesh))
    return tuple(found)


def _advertised_ports(instance: Instance) -> list[int]:
    """Returns the ports that a member advertises, if it is on this host."""
    addresses = [instance.address, instance.http_address, instance.stream_address]
    addresses.append(instance.meta.get(HEALTH_META_KEY, ""))
    addresses.append(urlsplit(instance.meta.get(METRICS_META_KEY, "")).netloc)
    if instance.bootstrap_port is not None:
        addresses.append(f"{instance.bootstrap_host}:{instance.bootstrap_port}")
    pairs = [address.rpartition(":") for address in addresses if address]
    return [int(port) for host, _, port in pairs if port.isdecimal() and is_local(host)]
