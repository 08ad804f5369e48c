"""`meshctl logs`: how many lines are printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from meshctl.commands.logs import command


@pytest.mark.parametrize(("lines", "printed"), [(0, ""), (2, "bc"), (3, "abc"), (5, "abc")])
def test_the_last_lines_are_printed_also_if_there_are_fewer(
    lines: int, printed: str, tmp_path: Path
) -> None:
    (tmp_path / "worker-0.log").write_text("a\nb\nc\n")
    flags = ["--log-dir", str(tmp_path), "--lines", str(lines)]
    result = CliRunner().invoke(command, flags, obj={})
    assert result.exit_code == 0, result.output
    assert [line.split()[-1] for line in result.stdout.splitlines()] == list(printed)
