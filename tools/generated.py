"""Files of the repository that a tool generates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_or_check(root: Path, files: Mapping[Path, str], *, is_check: bool) -> int:
    """Writes files that are not current, or only names them; returns the exit status.

    root: paths are shown relative to it.
    """
    changed = []
    for path, content in files.items():
        if not path.exists() or path.read_text() != content:
            changed.append(str(path.relative_to(root)))
            if not is_check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
    for name in changed:
        print(f"{name}: {'not current' if is_check else 'written'}")
    return 1 if is_check and changed else 0
