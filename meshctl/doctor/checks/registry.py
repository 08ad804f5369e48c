"""Checks of the registry: whether it can be used, its entries, the cards of models (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from meshctl.doctor.facts import Facts
from meshctl.doctor.findings import Finding, Subject, member_subject
from meshctl.doctor.rules import finding

CHECKSUM_CHARS = 12
NAMES_MAX = 5


def check_registry(facts: Facts) -> Iterator[Finding]:
    registry = facts.registry
    if registry is None:
        return
    subject = Subject("registry", registry.place)
    if registry.error:
        name = "consul_unreachable" if registry.kind == "consul" else "registry_unreadable"
        yield finding(name, subject, registry.error)
    if registry.refused:
        yield finding("consul_refuses", subject, registry.refused)
    if not (facts.members or registry.foreign or registry.error or registry.refused):
        text = f"there is none in namespace {facts.namespace!r}"
        yield finding("no_members", subject, text)
    for folder in facts.folders:
        if folder.use == "registry" and folder.write_error:
            text = f"a file cannot be written in {folder.path}: {folder.write_error}"
            yield finding("registry_read_only", subject, text, path=folder.path)


def check_entries(facts: Facts) -> Iterator[Finding]:
    registry = facts.registry
    if registry is None:
        return
    for instance in registry.foreign:
        text = "its entry is not signed with the mesh token of doctor, or no longer valid"
        name = instance.stable_name or instance.address
        yield finding("entry_not_of_mesh", member_subject(instance), text, name=name)
    for instance in registry.superseded:
        text = f"a newer instance than {instance.id} at {instance.address} has its name"
        subject = member_subject(instance)
        yield finding("name_shared", subject, text, address=instance.address)
    subject = Subject("registry", registry.place)
    for path in registry.orphans[:NAMES_MAX]:
        text = f"the owner of {path} has ended{_more(len(registry.orphans))}"
        yield finding("entry_orphaned", subject, text, path=path)
    for path in registry.unreadable[:NAMES_MAX]:
        text = f"{path} is no entry{_more(len(registry.unreadable))}"
        yield finding("entry_unreadable", subject, text, path=path)


def check_cards(facts: Facts) -> Iterator[Finding]:
    if facts.registry is None:
        return
    users: dict[str, list[str]] = {}
    models: dict[str, str] = {}
    for member in facts.of("worker"):
        instance = member.instance
        if instance.card_checksum:
            users.setdefault(instance.card_checksum, []).append(
                instance.stable_name or instance.address
            )
            models[instance.card_checksum] = instance.model
    for checksum, error in facts.registry.card_errors.items():
        model = models.get(checksum, "")
        names = ", ".join(users.get(checksum, ())[:NAMES_MAX])
        text = f"card {checksum[:CHECKSUM_CHARS]}, which {names} names: {error}"
        yield finding("card_missing", Subject("model", model), text, model=model)


def _more(count: int) -> str:
    return f" ({count} in all)" if count > 1 else ""
