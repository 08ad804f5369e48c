"""The command lines of `record` and `replay`: what they call themselves, whose flags they show."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from indexer_svc.tools import playback as replay
from indexer_svc.tools import record

COMMANDS = [("record", record.main), ("replay", replay.main)]


def run(
    main: Callable[[], None], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> str | int | None:
    """The exit status."""
    monkeypatch.setattr(sys, "argv", ["x", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(("name", "main"), COMMANDS)
def test_help_begins_with_the_commands_name_and_its_own_flags(
    name: str,
    main: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(main, ["--help"], monkeypatch) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {name} ")
    flags = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    own = {
        "record": ["--indexer", "--out", "--max-mb", "--seconds"],
        "replay": ["--recording", "--indexer", "--speed", "--hold-s"],
    }
    assert flags[:4] == own[name]
    assert "KVMESH_INDEXER" not in text, "variables of the room are the indexer's"


@pytest.mark.parametrize(("name", "main"), COMMANDS)
def test_a_wrong_flag_is_the_commands_and_variables_of_the_indexer_are_not(
    name: str,
    main: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVMESH_INDEXER_BUDGET_MB", "12")
    assert run(main, ["--no-such"], monkeypatch) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"{name}: the configuration cannot be used:\n")
    assert "--no-such: no such flag" in complaint
    assert "required and not given" in complaint
    assert "KVMESH_INDEXER" not in complaint
