"""Each finding of doctor, from the facts that cause it, and none for a healthy mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.registry.instances import BUILD_META_KEY, HASH_KEY_META_KEY, Instance, Service
from meshctl.doctor.checks import find_problems
from meshctl.doctor.facts import (
    CertificateFacts,
    Facts,
    FileFacts,
    FolderFacts,
    FrontendFacts,
    HostFacts,
    IndexerFacts,
    MemberFacts,
    PortFacts,
    ProcessFacts,
    RankState,
    RegistryFacts,
    ServiceFacts,
    SupervisorFacts,
    VerifiedRank,
)
from meshctl.doctor.findings import Severity
from meshctl.doctor.report import exit_status, to_json, to_lines
from meshctl.doctor.rules import RULES

NOW_S = 1_800_000_000.0
DAY_S = 86_400.0
CARD = "c" * 64
BUILD = "0.1.0 compiled"
FILE = Path("/etc/kvmesh/file")
OTHER = ProcessFacts(7, "python -m http.server")


def instance(number: int, service: Service, **fields: Any) -> Instance:
    address = f"127.0.0.1:{9000 + number}"
    fields = {"meta": {HASH_KEY_META_KEY: "", BUILD_META_KEY: BUILD}, **fields}
    return Instance(number, "default", service, f"{service}-{number}", address, **fields)


def worker_instance(number: int = 4, **fields: Any) -> Instance:
    given = {"model": "m", "card_checksum": CARD, "kv_index": "events", **fields}
    return instance(number, "worker", **given)


FRONTEND = MemberFacts(
    instance(1, "frontend", http_address="127.0.0.1:8000"),
    clock_ahead_s=0.01,
    clock_error_s=0.01,
    frontend=FrontendFacts(is_ready=True),
    process=ProcessFacts(11, "python -m frontend_svc", descriptors=40, descriptor_limit=1024),
)
EXACT = RankState(4, 0, "exact", partition=(16, 1, 0))
ROUTER = MemberFacts(instance(2, "router"), ranks=(EXACT,))
INDEXER = MemberFacts(
    instance(3, "indexer"), indexer=IndexerFacts((EXACT,), 1 << 20, 1 << 30, (VerifiedRank(4, 0),))
)
WORKER = MemberFacts(worker_instance())
HEALTHY = Facts(
    now_s=NOW_S,
    host=HostFacts("CPython 3.11.7", BUILD, 8, 1 << 20),
    registry=RegistryFacts("/run"),
    members=(FRONTEND, ROUTER, INDEXER, WORKER),
    folders=(FolderFacts(Path("/run"), "registry", free_mb=1e5),),
    secret_files=(FileFacts(FILE, "--api-keys", 0o600),),
    ports=(PortFacts(8000, "KVMESH_FRONTEND_HTTP_PORT", "in use", OTHER, is_of_mesh=True),),
    certificates=(CertificateFacts("a.pem", "a", NOW_S - 1, NOW_S + 15 * DAY_S),),
)
NOTES = {name for name, rule in RULES.items() if rule.severity is Severity.NOTE}


def with_member(member: MemberFacts, **changes: Any) -> Facts:
    """The healthy mesh with a change of one member."""
    members = tuple(replace(m, **changes) if m is member else m for m in HEALTHY.members)
    return replace(HEALTHY, members=members)


def without(service: Service, facts: Facts = HEALTHY) -> Facts:
    members = tuple(m for m in facts.members if m.instance.service != service)
    return replace(facts, members=members)


def with_registry(**changes: Any) -> Facts:
    return replace(HEALTHY, registry=replace(HEALTHY.registry or RegistryFacts(""), **changes))


def with_indexer(**changes: Any) -> Facts:
    assert INDEXER.indexer is not None
    return with_member(INDEXER, indexer=replace(INDEXER.indexer, **changes))


def with_certificate(starts_s: float = 0.0, ends_s: float = 0.0, error: str = "") -> Facts:
    certificate = CertificateFacts("a.pem", "a", NOW_S + starts_s, NOW_S + ends_s, error)
    return replace(HEALTHY, certificates=(certificate,))


def with_folder(**changes: Any) -> Facts:
    return replace(HEALTHY, folders=(replace(HEALTHY.folders[0], **changes),))


def with_service(state: str) -> Facts:
    service = ServiceFacts("worker-0", state, 3, "no memory")
    return replace(HEALTHY, supervisor=SupervisorFacts((service,)))


def with_descriptor_limit(limit: int) -> Facts:
    return replace(HEALTHY, host=replace(HEALTHY.host, descriptor_limit=limit))


def with_port(error: str, holder: ProcessFacts | None) -> Facts:
    port = PortFacts(8000, "KVMESH_FRONTEND_HTTP_PORT", error, holder)
    return replace(HEALTHY, ports=(port,))


def with_file(mode: int | None, error: str = "") -> Facts:
    return replace(HEALTHY, secret_files=(FileFacts(FILE, "--api-keys", mode, error),))


def with_rank(state: str, reason: str) -> Facts:
    return with_member(ROUTER, ranks=(RankState(4, 0, state, reason),))


def two_workers(partition: tuple[int, int, int]) -> Facts:
    """The mesh with one more worker, whose rank has this partition in the index."""
    ranks = (EXACT, RankState(5, 0, "exact", partition=partition))
    facts = with_indexer(ranks=ranks)
    return replace(facts, members=(*facts.members, MemberFacts(worker_instance(5))))


# Name of the finding, facts, and what the text of the finding or of the remedy contains.
CASES: list[tuple[str, Facts, str]] = [
    ("setting_invalid", replace(HEALTHY, setting_problems=("KVMESH_X: no such variable",)), "no s"),
    ("secret_missing", with_file(None), "no such file"),
    ("secret_missing", with_file(0o600, "invalid API keys: tenants"), "invalid API keys"),
    ("secret_readable", with_file(0o644), "chmod 600 /etc/kvmesh/file"),
    ("registry_unreadable", with_registry(error="cannot read /run"), "KVMESH_REGISTRY_PATH"),
    ("registry_read_only", with_folder(write_error="Read-only file system"), "Read-only"),
    (
        "consul_unreachable",
        with_registry(kind="consul", error="cannot reach Consul"),
        "KVMESH_CONSUL_URL",
    ),
    ("consul_refuses", with_registry(kind="consul", refused="denied"), "consul_policy.hcl"),
    ("entry_not_of_mesh", with_registry(foreign=(worker_instance(9),)), "KVMESH_MESH_TOKEN"),
    ("name_shared", with_registry(superseded=(worker_instance(9),)), "(127.0.0.1:9009)"),
    ("entry_orphaned", with_registry(orphans=("/run/a.json", "/run/b.json")), "2 in all"),
    ("entry_unreadable", with_registry(unreadable=("/run/x",)), "/run/x"),
    ("card_missing", with_registry(card_errors={CARD: "there is no model card"}), "worker-4"),
    ("no_members", replace(HEALTHY, members=()), "'default'"),
    (
        "supervisor_silent",
        replace(HEALTHY, supervisor=SupervisorFacts(error="it did not answer within 2 s")),
        "within 2 s",
    ),
    ("service_failing", with_service("waiting"), "waiting after 3 failures: no memory"),
    ("service_failing", with_service("failed"), "meshctl logs worker-0"),
    ("service_stopped", with_service("stopped"), "meshctl start worker-0"),
    ("member_missing", replace(HEALTHY, expected=("worker-4", "worker-5")), "start worker-5"),
    ("role_missing", replace(HEALTHY, required=("indexer", "decode")), "the role decode"),
    ("role_missing", without("worker"), "start a worker"),
    ("role_missing", without("router"), "start a router"),
    (
        "role_missing",
        with_member(WORKER, instance=worker_instance(role="prefill")),
        "start a decode worker",
    ),
    (
        "member_stopped",
        with_member(
            FRONTEND, health="deadline_exceeded", process=replace(OTHER, pid=11, state="T")
        ),
        "kill -CONT 11",
    ),
    ("member_silent", with_member(FRONTEND, health="deadline_exceeded"), "within 2 s"),
    ("member_silent", with_member(ROUTER, health="unavailable", detail="refused"), "refused"),
    (
        "member_silent",
        with_member(FRONTEND, frontend=FrontendFacts(error="no response within 2 s")),
        "GET /ready of 127.0.0.1:8000",
    ),
    (
        "member_refuses",
        with_member(ROUTER, health="unauthenticated", detail="the caller's mesh token is wrong"),
        "without a mesh token",
    ),
    (
        "member_refuses",
        with_member(ROUTER, health="unavailable", detail="Socket closed"),
        "connections without TLS",
    ),
    ("member_not_serving", with_member(ROUTER, health="not_serving"), "not_serving"),
    (
        "member_not_routable",
        with_member(
            WORKER,
            health="not_serving",
            is_routable=False,
            missing_peers=("router router-2: not in the fleet",),
        ),
        "router router-2: not in the fleet",
    ),
    (
        "peer_given_up",
        with_member(WORKER, is_routable=True, given_up_peers=("frontend 5: no response",)),
        "frontend 5",
    ),
    ("engine_failing", with_member(WORKER, engine_failure="CUDA error"), "CUDA error"),
    (
        "frontend_not_ready",
        with_member(FRONTEND, frontend=FrontendFacts(reasons=("no model is served",))),
        "no model is served",
    ),
    (
        "model_not_served",
        with_member(
            FRONTEND,
            frontend=FrontendFacts(
                is_ready=True,
                degraded=("model m: its canary fails at stage token: lost",),
                failing_models={"m": "stage token: lost"},
            ),
        ),
        "frontend-1 fails at stage token: lost",
    ),
    (
        "frontend_degraded",
        with_member(FRONTEND, frontend=FrontendFacts(is_ready=True, degraded=("no router",))),
        "no router",
    ),
    ("clock_too_far", with_member(WORKER, clock_ahead_s=300.0), "300.0 s ahead"),
    ("clock_differs", with_member(WORKER, clock_ahead_s=-5.0), "5.0 s behind"),
    (
        "indexer_lost",
        without("indexer", with_rank("stale", "indexer lost: refused")),
        "indexer lost: refused",
    ),
    ("indexer_lost", without("indexer", with_rank("none", "not in the index")), "no"),
    (
        "indexer_missing",
        without("indexer", with_rank("none", "no indexer was reached yet")),
        "KVMESH_WORKER_KV_EVENTS=off",
    ),
    ("index_not_followed", with_rank("gapped", "batches are missing"), "batches are missing"),
    ("index_not_followed", with_rank("none", "no indexer was reached yet"), "no indexer"),
    ("index_source_missing", with_indexer(ranks=()), "worker worker-4"),
    (
        "index_source_inexact",
        with_indexer(ranks=(replace(EXACT, state="gapped", reason="batches are missing"),)),
        "batches are missing",
    ),
    (
        "index_degraded",
        with_indexer(ranks=(replace(EXACT, state="degraded", reason="events were lost"),)),
        "events were lost",
    ),
    ("index_drift", with_indexer(verified=(VerifiedRank(4, 0, extra=3),)), "3 blocks only in"),
    ("index_unverified", with_indexer(verified=(VerifiedRank(4, 0, error="late"),)), "late"),
    ("index_full", with_indexer(used_bytes=1023 << 20), "1023/1024 MB"),
    (
        "hashes_differ",
        with_member(WORKER, instance=worker_instance(meta={HASH_KEY_META_KEY: "a1b2c3"})),
        "a1b2c3 of worker-4",
    ),
    ("hashes_differ", two_workers((32, 1, 0)), "(32, 1, 0) of worker-5"),
    ("port_taken", with_port("in use", OTHER), "process 7 (python -m http.server)"),
    ("port_taken", with_port("Address already in use", None), "KVMESH_FRONTEND_HTTP_PORT"),
    ("port_unusable", with_port("Permission denied", None), "Permission denied"),
    ("certificate_unusable", with_certificate(error="it is no PEM"), "no PEM"),
    ("certificate_expired", with_certificate(ends_s=-2 * DAY_S), "expired 2.0 days ago"),
    ("certificate_expired", with_certificate(DAY_S, 20 * DAY_S), "valid from"),
    ("certificate_ends_soon", with_certificate(-DAY_S, 13 * DAY_S), "in 13.0 days"),
    ("disk_full", with_folder(free_mb=3.0), "3 MB are free, the limit is 512 MB"),
    ("descriptors_too_few", with_descriptor_limit(1000), "ulimit -Hn is 1000"),
    ("descriptors_few", with_descriptor_limit(4096), "should have 32768"),
    (
        "descriptors_used",
        with_member(FRONTEND, process=replace(OTHER, descriptors=900, descriptor_limit=1000)),
        "900/1000",
    ),
    (
        "versions_differ",
        with_member(ROUTER, instance=instance(2, "router", meta={BUILD_META_KEY: "0.2.0 source"})),
        "replace router-2 by",
    ),
    (
        "versions_differ",
        with_member(ROUTER, instance=instance(2, "router", meta={})),
        "an earlier version: router-2",
    ),
    (
        "not_compiled",
        replace(HEALTHY, host=replace(HEALTHY.host, build="0.1.0 source")),
        "pip install .",
    ),
    ("python", HEALTHY, "CPython 3.11.7"),
    ("cores", HEALTHY, "8 cores"),
]


def names(facts: Facts) -> set[str]:
    return {finding.name for finding in find_problems(facts)}


def test_a_healthy_mesh_has_notes_only() -> None:
    assert {finding.severity for finding in find_problems(HEALTHY)} == {Severity.NOTE}


@pytest.mark.parametrize(("name", "facts", "part"), CASES)
def test_facts_cause_the_finding_with_its_text(name: str, facts: Facts, part: str) -> None:
    found = [finding for finding in find_problems(facts) if finding.name == name]
    assert found, names(facts)
    assert part in f"{found[0].found} {found[0].remedy}", found


@pytest.mark.parametrize(("name", "facts", "part"), CASES)
def test_a_cause_has_no_other_error(name: str, facts: Facts, part: str) -> None:
    errors = {f.name for f in find_problems(facts) if f.severity is Severity.ERROR}
    assert errors <= {name}


def test_each_rule_has_a_case() -> None:
    assert {name for name, _, _ in CASES} == RULES.keys()


def test_a_delayed_answer_is_no_difference_of_clocks() -> None:
    assert "clock_differs" not in names(with_member(WORKER, clock_ahead_s=2.5, clock_error_s=1.0))


def test_a_router_that_uses_no_index_by_its_settings_is_no_problem() -> None:
    assert names(with_rank("none", "no index: kv_events is off")) == NOTES & names(HEALTHY)


def test_a_service_of_a_running_supervisor_is_reported_once() -> None:
    facts = replace(with_service("failed"), expected=("worker-0",))
    assert "member_missing" not in names(facts)


def test_the_exit_status_counts_errors_only() -> None:
    assert exit_status(find_problems(HEALTHY)) == 0
    assert exit_status(find_problems(with_file(0o644))) == 0
    assert exit_status(find_problems(with_file(None))) == 1


def test_findings_are_listed_by_subject_with_remedies_and_totals() -> None:
    facts = with_member(WORKER, engine_failure="CUDA error", clock_ahead_s=-5.0)
    lines = to_lines(facts, find_problems(facts))
    at = lines.index("worker worker-4 (id 4)")
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == ["error", "->", "warning", "->"]
    assert lines[-1] == "4 members: 1 error, 1 warning, 2 notes"


def test_json_has_ids_as_text_and_totals() -> None:
    facts = with_member(WORKER, engine_failure="CUDA error")
    shown = to_json(facts, find_problems(facts))
    assert shown["findings"][0] == {
        "name": "engine_failing",
        "severity": "error",
        "subject": {"kind": "worker", "name": "worker-4", "id": "4"},
        "found": "CUDA error",
        "remedy": RULES["engine_failing"].remedy.format(name="worker-4"),
    }
    assert (shown["members"], shown["errors"], shown["warnings"]) == (4, 1, 0)


def documented() -> list[list[str]]:
    """The rows of the table in docs/operate/doctor.md."""
    page = (Path(__file__).parents[4] / "docs/operate/doctor.md").read_text()
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line[:3] == "| `"]


def test_the_documentation_has_the_table_of_findings() -> None:
    assert documented() == [
        [f"`{rule.name}`", rule.severity.value, rule.problem, rule.documented_remedy]
        for rule in RULES.values()
    ]
