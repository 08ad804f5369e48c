"""Checks of members: whether they answer and serve, and whether a role is missing (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from meshctl.doctor.facts import Facts, MemberFacts
from meshctl.doctor.findings import Finding, Subject, member_subject
from meshctl.doctor.rules import finding

SERVING = "serving"
# Of a member that was asked nothing, since the settings of doctor are invalid.
UNKNOWN = "unknown"
# In a reason of a frontend about a canary, which is a finding of its own.
CANARY_REASON = "its canary fails"
# States of a member that does not answer.
_SILENT = ("deadline_exceeded", "unavailable", "cancelled")
# States of a member that refuses doctor.
_REFUSALS = ("unauthenticated", "permission_denied")
# In gRPC's text on a call without TLS to a port that has it: the port closes the connection.
_CLOSED = "Socket closed"
# Of /proc: stopped by a signal, and by a debugger.
_STOPPED = ("T", "t")


def check_roles(facts: Facts) -> Iterator[Finding]:
    workers = facts.of("worker")
    routers, frontends = facts.of("router"), facts.of("frontend")
    mesh = Subject("mesh", facts.namespace)
    if (routers or frontends) and not workers:
        text = f"{len(routers)} routers and {len(frontends)} frontends have no worker"
        yield finding("role_missing", mesh, text, role="a worker")
    if (workers or frontends) and not routers:
        text = f"{len(frontends)} frontends and {len(workers)} workers have no router"
        yield finding("role_missing", mesh, text, role="a router")
    for model in sorted({member.instance.model for member in workers}):
        roles = {member.instance.role for member in workers if member.instance.model == model}
        if "prefill" in roles and not roles & {"decode", "aggregated"}:
            yield finding(
                "role_missing",
                Subject("model", model),
                "it has prefill workers and no decode worker",
                role="a decode worker",
            )


def check_members(facts: Facts) -> Iterator[Finding]:
    for member in facts.members:
        yield from _member_problems(member, facts)


def _member_problems(member: MemberFacts, facts: Facts) -> Iterator[Finding]:
    instance, process = member.instance, member.process
    subject = member_subject(instance)
    detail = f": {member.detail}" if member.detail else ""
    if process is not None and process.state in _STOPPED:
        text = f"process {process.pid} is in state {process.state} (stopped)"
        yield finding("member_stopped", subject, text, pid=process.pid)
    elif member.health in _REFUSALS:
        has_token = "with the mesh token of doctor" if facts.has_token else "without a mesh token"
        text = f"{member.health}, {has_token}{detail}"
        yield finding("member_refuses", subject, text, name=subject.name)
    elif member.health == "unavailable" and not facts.has_tls and _CLOSED in member.detail:
        text = f"it closes connections without TLS, and doctor has no certificate{detail}"
        yield finding("member_refuses", subject, text, name=subject.name)
    elif member.health in _SILENT:
        limit = f" within {facts.limits.answer_s:g} s"
        is_late = member.health == "deadline_exceeded"
        text = f"{instance.address} did not answer{limit}" if is_late else f"no answer{detail}"
        yield finding("member_silent", subject, text, address=instance.address)
    elif member.missing_peers and not member.is_routable:
        text = f"it waits for {'; '.join(member.missing_peers)}"
        yield finding("member_not_routable", subject, text)
    elif member.health not in (SERVING, UNKNOWN) and not member.engine_failure:
        text = f"its health is {member.health}{detail}"
        yield finding("member_not_serving", subject, text, name=subject.name)
    if member.given_up_peers:
        text = f"it does not wait any more for {'; '.join(member.given_up_peers)}"
        yield finding("peer_given_up", subject, text)
    if member.engine_failure:
        yield finding("engine_failing", subject, member.engine_failure, name=subject.name)


def check_frontends(facts: Facts) -> Iterator[Finding]:
    for member in facts.of("frontend"):
        frontend = member.frontend
        if frontend is None:
            continue
        subject = member_subject(member.instance)
        if frontend.error and member.health == SERVING:
            address = member.instance.http_address
            text = f"GET /ready of {address}: {frontend.error}"
            yield finding("member_silent", subject, text, address=address)
        elif not frontend.error and not frontend.is_ready:
            text = "; ".join(frontend.reasons) or "it gives no reason"
            yield finding("frontend_not_ready", subject, text)
        for model, reason in frontend.failing_models.items():
            text = f"a test request of {subject.name} fails at {reason}"
            yield finding("model_not_served", Subject("model", model), text)
        for reason in frontend.degraded:
            if CANARY_REASON not in reason:
                yield finding("frontend_degraded", subject, reason)
