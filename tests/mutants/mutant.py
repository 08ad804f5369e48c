"""A defect of one line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A defect: in the file `path`, `old`, which occurs there exactly once, becomes `new`.

    rows: of each, at least one test must fail.
    """

    path: str
    old: str
    new: str
    rows: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.path}: {' '.join(self.new.split()) or 'removed'}"


def mutant(rows: str, path: str, old: str, new: str) -> Mutant:
    """Returns a mutant. rows: separated by spaces."""
    return Mutant(path, old, new, tuple(rows.split()))
