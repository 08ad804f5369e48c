"""`meshctl logs`: which lines are printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from meshctl.commands.logs import _Log, command


@pytest.mark.parametrize(("lines", "printed"), [(0, ""), (2, "bc"), (3, "abc"), (5, "abc")])
def test_the_last_lines_are_printed_also_if_there_are_fewer(
    lines: int, printed: str, tmp_path: Path
) -> None:
    (tmp_path / "worker-0.log").write_text("a\nb\nc\n")
    flags = ["--log-dir", str(tmp_path), "--lines", str(lines)]
    result = CliRunner().invoke(command, flags, obj={})
    assert result.exit_code == 0, result.output
    assert [line.split()[-1] for line in result.stdout.splitlines()] == list(printed)


def test_lines_are_read_once_when_a_failed_restart_gives_the_log_back(tmp_path: Path) -> None:
    path, kept, failed = (tmp_path / f"a.log{suffix}" for suffix in ("", ".1", ".failed"))
    log = _Log(path)

    def new() -> list[str]:
        return [str(line.fields["event"]) for line in log.read()]

    path.write_text("old\n")
    assert new() == ["old"]
    path.rename(kept)
    path.write_text("new\n")
    assert new() == ["new"]
    with kept.open("a") as out:
        out.write("old goes on\n")
    path.rename(failed)
    kept.rename(path)
    failed.rename(kept)
    assert new() == ["old goes on"]
    log.close()
