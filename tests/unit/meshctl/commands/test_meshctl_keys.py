"""The command line of `meshctl keys`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshctl.cli import run_command


def run(*words: str, **environ: str) -> int:
    return run_command(["keys", *words], environ)


def test_the_file_is_a_flag_or_a_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.json"
    assert run("--api-keys", str(path), "create", "acme") == 0
    text = capsys.readouterr().out.strip()
    assert text.startswith("kvmesh_")
    assert run("list", KVMESH_FRONTEND_API_KEYS=str(path)) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "acme"
    assert run("list") == 2
    assert "meshctl keys: --api-keys: required and not given" in capsys.readouterr().err


def test_keys_for_programs_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"--api-keys={tmp_path / 'keys.json'}"
    assert run(file, "create", "acme", "--days", "1", "--json") == 0
    created = json.loads(capsys.readouterr().out)
    assert created.pop("key").startswith("kvmesh_")
    assert (created["tenant"], created["scopes"]) == ("acme", ["embeddings", "infer"])
    assert run(file, "list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [created]
    assert run(file, "rotate", created["id"], "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] != created["id"]


def test_limits_are_shown_and_only_removed_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"--api-keys={tmp_path / 'keys.json'}"
    assert run(file, "create", "acme") == 0
    capsys.readouterr()
    assert run(file, "limits", "acme", "--requests-per-s=2.5", "--weight=3") == 0
    in_force = capsys.readouterr().out
    assert [line.split() for line in in_force.splitlines()] == [
        ["requests_per_s", "2.5"],
        ["tokens_per_min", "none"],
        ["concurrency", "none"],
        ["weight", "3"],
    ]
    assert run(file, "limits", "acme") == 0
    assert capsys.readouterr().out == in_force
    assert run(file, "limits", "acme", "--none", "--weight=2") == 2
    assert "--none removes all limits" in capsys.readouterr().err
    assert run(file, "limits", "acme", "--none", "--json") == 0
    limits = json.loads(capsys.readouterr().out)
    assert limits == {
        "requests_per_s": None,
        "tokens_per_min": None,
        "concurrency": None,
        "weight": 1.0,
    }
    assert run(file, "limits", "other") == 1
    assert "no tenant has the name 'other'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "meshctl keys: a command is required: create, list, limits, revoke, rotate"),
        (["lst"], "meshctl keys: 'lst': no such command; did you mean list?"),
        (["create"], "meshctl keys create: argument TENANT: required and not given"),
        (["create", "a", "--scope=x"], "meshctl keys create: --scope: no such flag; did you mean"),
        (["create", "a", "--days=x"], "meshctl keys create: --days: 'x' is not a valid float"),
        (["create", "a", "--days"], "meshctl keys create: --days: requires an argument"),
        (["revoke", "a", "b"], "meshctl keys revoke: Got unexpected extra argument (b)"),
    ],
)
def test_an_error_names_the_command_and_the_argument(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(f"--api-keys={tmp_path}/keys.json", *words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(error)
    program = error.partition(":")[0]
    assert shown.endswith(f"(see {program} --help)\n")
    assert shown.count("\n") == 1


def test_a_failure_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"--api-keys={tmp_path}/keys.json", "revoke", "key_1") == 1
    assert capsys.readouterr().err == "meshctl keys: no key has the id 'key_1'\n"
    assert run(f"--api-keys={tmp_path}/keys.json", "create", "acme", "--scopes=x") == 1
    assert "'x' is not a valid Scope" in capsys.readouterr().err
