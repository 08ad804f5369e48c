"""Checks of certificates (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from meshctl.doctor.facts import Facts
from meshctl.doctor.findings import Finding, Subject
from meshctl.doctor.rules import finding

DAY_S: Final = 86_400.0


def check_certificates(facts: Facts) -> Iterator[Finding]:
    for certificate in facts.certificates:
        subject = Subject("certificate", certificate.place)
        if certificate.error:
            yield finding("certificate_unusable", subject, certificate.error)
            continue
        name, place = certificate.name, certificate.place
        left_s = certificate.ends_s - facts.now_s
        if left_s <= 0:
            text = f"{name} expired {-left_s / DAY_S:.1f} days ago, {_date(certificate.ends_s)}"
            yield finding("certificate_expired", subject, text, place=place)
        elif certificate.starts_s > facts.now_s:
            text = f"{name} is valid from {_date(certificate.starts_s)}"
            yield finding("certificate_expired", subject, text, place=place)
        elif left_s < facts.limits.certificate_days * DAY_S:
            text = (
                f"{name} expires in {left_s / DAY_S:.1f} days, {_date(certificate.ends_s)};"
                f" the limit is {facts.limits.certificate_days:g} days"
            )
            yield finding("certificate_ends_soon", subject, text, place=place)


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
