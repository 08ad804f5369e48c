"""The versions that work together with this one."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
LIST: Final = FOLDER / "supported.toml"


@dataclass(frozen=True, slots=True)
class Version:
    """A version whose processes work in one mesh with those of this tree."""

    name: str
    commit: str
    """All 40 digits."""

    @property
    def descriptors(self) -> Path:
        """Its descriptor set: the messages and services of its protos."""
        return FOLDER / f"{self.name}.binpb"


def supported_versions() -> list[Version]:
    """Returns the versions of the list, oldest first."""
    return [Version(**entry) for entry in tomllib.loads(LIST.read_text())["versions"]]
