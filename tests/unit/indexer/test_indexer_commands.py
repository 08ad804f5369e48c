"""Command lines of `record` and `playback`: their names and flags."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from indexer_svc.tools import playback, record

COMMANDS = [("record", record.main), ("playback", playback.main)]


def run(
    main: Callable[[], None], flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> str | int | None:
    """Run a command; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["x", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(("name", "main"), COMMANDS)
def test_help_starts_with_the_name_and_the_flags_of_the_command(
    name: str,
    main: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(main, ["--help"], monkeypatch) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: {name} ")
    flags = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    own = {
        "record": ["--indexer", "--out", "--max-mb", "--seconds"],
        "playback": ["--recording", "--indexer", "--speed", "--hold-s", "--to-json"],
    }
    assert flags[: len(own[name])] == own[name]
    assert "KVMESH_INDEXER" not in text, "they configure the indexer, not its tools"


@pytest.mark.parametrize(("name", "main"), COMMANDS)
def test_a_command_reports_an_unknown_flag_and_ignores_variables_of_the_indexer(
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


def test_playback_to_json_excludes_an_indexer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--recording", "events", "--indexer", "127.0.0.1:1", "--to-json"]
    assert run(playback.main, flags, monkeypatch) == 2
    assert "--to-json: nothing is played; leave out --indexer" in capsys.readouterr().err


def test_playback_plays_a_recording_of_an_earlier_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events"
    path.write_bytes(b'{"kvmesh_kv_events":1}\n{"t":0,"is":"end"}\n')
    monkeypatch.setattr(sys, "argv", ["x", "--recording", str(path)])
    playback.main()
    totals = json.loads(capsys.readouterr().out)
    assert (totals["messages"], totals["has_ended"]) == (1, True)
