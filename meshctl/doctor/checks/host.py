"""Checks of this host: ports, disk, file descriptors, Python (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from common.registry.instances import BUILD_META_KEY
from meshctl.doctor.facts import Facts
from meshctl.doctor.findings import Finding, Subject, member_subject
from meshctl.doctor.rules import finding

# A frontend does not start below it.
DESCRIPTORS_MIN: Final = 1024
DESCRIPTORS_WANTED: Final = 32_768
# Share of its limit above which a process has few descriptors left.
DESCRIPTORS_SHARE_MAX: Final = 0.8
# At the end of a build.
SOURCE: Final = "source"
HOST: Final = Subject("host")


def check_ports(facts: Facts) -> Iterator[Finding]:
    for port in facts.ports:
        if port.is_of_mesh or not (port.error or port.holder):
            continue
        subject = Subject("port", str(port.port))
        if port.holder is not None:
            text = f"process {port.holder.pid} ({port.holder.command}) listens on it"
            yield finding("port_taken", subject, text, setting=port.setting)
        elif "in use" in port.error:
            yield finding("port_taken", subject, port.error, setting=port.setting)
        else:
            yield finding("port_unusable", subject, port.error, setting=port.setting)


def check_disk(facts: Facts) -> Iterator[Finding]:
    limit_mb = facts.limits.disk_free_mb
    for folder in facts.folders:
        if folder.free_mb is not None and folder.free_mb < limit_mb:
            text = f"{folder.use}: {folder.free_mb:.0f} MB are free, the limit is {limit_mb:.0f} MB"
            yield finding("disk_full", Subject("disk", str(folder.path)), text, path=folder.path)


def check_descriptors(facts: Facts) -> Iterator[Finding]:
    limit = facts.host.descriptor_limit
    if limit < DESCRIPTORS_WANTED:
        is_too_low = limit < DESCRIPTORS_MIN
        least = DESCRIPTORS_MIN if is_too_low else DESCRIPTORS_WANTED
        name = "descriptors_too_few" if is_too_low else "descriptors_few"
        verb = "needs" if is_too_low else "should have"
        text = f"ulimit -Hn is {limit}; a frontend {verb} {least}"
        yield finding(name, HOST, text, wanted=DESCRIPTORS_WANTED)
    for member in facts.members:
        process = member.process
        if process is None or not process.descriptors or not process.descriptor_limit:
            continue
        if process.descriptors > DESCRIPTORS_SHARE_MAX * process.descriptor_limit:
            subject = member_subject(member.instance)
            text = f"{process.descriptors}/{process.descriptor_limit} file descriptors are open"
            yield finding("descriptors_used", subject, text, name=subject.name)


def check_builds(facts: Facts) -> Iterator[Finding]:
    builds: dict[str, list[str]] = {}
    for member in facts.members:
        build = member.instance.meta.get(BUILD_META_KEY, "an earlier version")
        builds.setdefault(build, []).append(member_subject(member.instance).name)
    if len(builds) > 1:
        groups = sorted(builds.items(), key=lambda item: len(item[1]))
        text = "; ".join(f"{build}: {', '.join(sorted(names))}" for build, names in groups)
        names = ", ".join(sorted(groups[0][1]))
        yield finding("versions_differ", Subject("mesh", facts.namespace), text, names=names)
    from_source = sum(len(names) for build, names in builds.items() if build.endswith(SOURCE))
    if from_source or facts.host.build.endswith(SOURCE):
        text = (
            f"{from_source}/{len(facts.members)} members run from source; this installation:"
            f" {facts.host.build}"
        )
        yield finding("not_compiled", HOST, text)


def check_host(facts: Facts) -> Iterator[Finding]:
    yield finding("python", HOST, facts.host.python)
    yield finding(
        "cores", HOST, f"{facts.host.cores} cores, ulimit -Hn {facts.host.descriptor_limit}"
    )
