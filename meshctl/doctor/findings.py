"""Findings of doctor: what is wrong, with what, and what to do (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from common.registry.instances import Instance

_PART = re.compile(r"\{(\w+)\}")


class Severity(StrEnum):
    """error: requests fail, or will; warning: a part is impaired, or will be; note: for
    information."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a finding is about. id: of an instance, which is new at each start."""

    kind: str
    name: str = ""
    id: str = ""

    def __str__(self) -> str:
        label = f"{self.kind} {self.name}".strip()
        return f"{label} (id {self.id})" if self.id else label


@dataclass(frozen=True, slots=True)
class Finding:
    """name: of its rule. found: with the number and the limit. remedy: what to do."""

    name: str
    severity: Severity
    subject: Subject
    found: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of finding."""

    name: str
    severity: Severity
    problem: str
    """For the documentation."""

    remedy: str
    """With `{parts}`, which a finding replaces."""

    @property
    def documented_remedy(self) -> str:
        """The remedy with its parts in capitals."""
        return _PART.sub(lambda part: part[1].upper(), self.remedy)


def member_subject(instance: Instance) -> Subject:
    """Returns an instance as a subject. Without a stable name, its address names it."""
    return Subject(instance.service, instance.stable_name or instance.address, str(instance.id))
