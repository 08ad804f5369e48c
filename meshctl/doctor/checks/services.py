"""Checks of the services that a `meshctl up` keeps running, or that a mesh file names (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from common.registry.instances import role_of
from meshctl.doctor.facts import Facts
from meshctl.doctor.findings import Finding, Subject
from meshctl.doctor.rules import finding

# States of a service that has failed, and of one that was stopped on request.
_FAILED = ("waiting", "failed")
_STOPPED = "stopped"


def check_services(facts: Facts) -> Iterator[Finding]:
    if facts.supervisor.error:
        yield finding("supervisor_silent", Subject("supervisor"), facts.supervisor.error)
    for service in facts.supervisor.services:
        subject = Subject("service", service.name)
        if service.state in _FAILED:
            reason = f": {service.error}" if service.error else ""
            text = f"it is {service.state} after {service.failures} failures{reason}"
            yield finding("service_failing", subject, text, name=service.name)
        elif service.state == _STOPPED:
            text = "an operator stopped it, or the mesh stops"
            yield finding("service_stopped", subject, text, name=service.name)


def check_expected(facts: Facts) -> Iterator[Finding]:
    """Compares the registered members with those of the mesh file."""
    present = {member.instance.stable_name for member in facts.members}
    known = {service.name for service in facts.supervisor.services}
    for name in facts.expected:
        # A mesh that is not started has another finding, and so has a service of `meshctl up`.
        if facts.members and name not in present and name not in known:
            text = "the mesh file names it, and it is not registered"
            yield finding("member_missing", Subject("service", name), text, name=name)
    roles = {role_of(member.instance) for member in facts.members}
    for role in facts.required if facts.members else ():
        if role not in roles:
            text = f"the mesh file requires the role {role}, and no member has it"
            mesh = Subject("mesh", facts.namespace)
            yield finding("role_missing", mesh, text, role=f"a member of the role {role}")
