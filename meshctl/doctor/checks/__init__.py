"""The checks of doctor: facts in, findings out (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshctl.doctor.checks.certificates import check_certificates
from meshctl.doctor.checks.clocks import check_clocks
from meshctl.doctor.checks.host import (
    check_builds,
    check_descriptors,
    check_disk,
    check_host,
    check_ports,
)
from meshctl.doctor.checks.index import check_hashes, check_indexers, check_replicas, check_verified
from meshctl.doctor.checks.members import check_frontends, check_members, check_roles
from meshctl.doctor.checks.registry import check_cards, check_entries, check_registry
from meshctl.doctor.checks.services import check_expected, check_services
from meshctl.doctor.checks.settings import check_secret_files, check_settings
from meshctl.doctor.facts import Facts
from meshctl.doctor.findings import Finding, Severity

CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_settings,
    check_secret_files,
    check_registry,
    check_entries,
    check_cards,
    check_services,
    check_expected,
    check_roles,
    check_members,
    check_frontends,
    check_clocks,
    check_replicas,
    check_indexers,
    check_verified,
    check_hashes,
    check_ports,
    check_certificates,
    check_disk,
    check_descriptors,
    check_builds,
    check_host,
)

_ORDER = list(Severity)


def find_problems(facts: Facts) -> list[Finding]:
    """Returns the findings of all checks, the most severe first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))
