"""Command lines of meshctl."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from common.runtime.config import ServiceConfig
from meshctl.cli import COMMANDS, application, run_command
from meshctl.commands import status, up
from meshctl.mesh_file.load import read_mesh_file
from meshctl.options import MeshConfig, UpOptions
from meshctl.services import build_service_specs


@pytest.fixture
def environs() -> list[Mapping[str, str]]:
    """The environment that the services of each `meshctl up` inherit."""
    return []


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch, environs: list[Mapping[str, str]]) -> list[UpOptions]:
    """The settings of each `meshctl up`, which starts nothing."""
    found: list[UpOptions] = []

    def record(options: UpOptions, environ: Mapping[str, str]) -> int:
        found.append(options)
        environs.append(environ)
        return 0

    monkeypatch.setattr(up, "up", record)
    return found


class Up:
    """`meshctl up`, which returns its settings and starts nothing."""

    def __init__(self, parsed: list[UpOptions]) -> None:
        self._parsed = parsed

    def __call__(self, *argv: str, **environ: str) -> UpOptions:
        assert run_command(["up", *argv], environ) == 0
        return self._parsed.pop()


@pytest.fixture(name="up")
def up_(parsed: list[UpOptions]) -> Up:
    return Up(parsed)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    assert run_command(["up", *argv], environ) == 2
    return capsys.readouterr().err


def test_the_default_is_a_small_sim_mesh_on_port_8000(up: Up) -> None:
    options = up()
    assert (options.frontends, options.routers, options.worker_count) == (1, 1, 2)
    assert (options.engine, options.model_name, options.http_port) == ("sim", "sim", 8000)
    assert (options.registry, options.registry_path) == ("file", Path(".run/registry"))
    assert options.log_dir == Path(".run/logs")
    assert (options.sample, options.once, options.then) == (False, False, ())


def test_once_without_a_command_sends_the_sample_request(up: Up) -> None:
    assert up("--once").sample


def test_then_takes_the_rest_of_the_line_and_replaces_the_sample_request(up: Up) -> None:
    options = up("--once", "--then", "prog", "--once", "-x")
    assert options.then == ("prog", "--once", "-x")
    assert not options.sample


def test_mesh_wide_variables_configure_meshctl_too(up: Up) -> None:
    options = up(KVMESH_NAMESPACE="n1", KVMESH_REGISTRY_PATH="/r", KVMESH_FRONTEND_HTTP_HOST="::1")
    assert (options.namespace, options.registry_path) == ("n1", Path("/r"))
    assert options.http_host == "::1"
    assert up("--namespace", "n2", KVMESH_NAMESPACE="n1").namespace == "n2"
    assert up(KVMESH_DRAIN_S="3").drain_s == 3


def test_settings_of_a_mesh_file_configure_meshctl_and_no_later_start(
    up: Up, environs: list[Mapping[str, str]], tmp_path: Path
) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text("settings: {mesh_token: f, log_level: error}\nfrontends: {http_host: '::1'}\n")
    environ = {"KVMESH_LOG_LEVEL": "debug", "KVMESH_MESH_TOKEN_FILE": "/none"}
    options = up("-f", str(path), **environ)
    assert (options.mesh_token, options.log_level, options.http_host) == ("f", "error", "::1")
    assert environs == [environ]
    frontend = build_service_specs(options, read_mesh_file(path).mesh)[0]
    assert frontend.environ["KVMESH_FRONTEND_HTTP_HOST"] == "::1"


@pytest.mark.parametrize("before", [["-f"], ["--file"], ["-f{}"], ["-f={}"], ["--file={}"]])
def test_a_mesh_file_is_given_as_other_flags_are(up: Up, before: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text("routers: {count: 3}\n")
    words = [word.format(path) for word in before]
    options = up(*words, *([] if words != before else [str(path)]))
    assert (options.file, options.routers) == (path, 3)


def test_settings_of_a_mesh_file_and_variables_are_checked_together(
    up: Up, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text("settings: {host: 0.0.0.0, advertise_host: a}\n")
    assert up("-f", str(path), KVMESH_MESH_TOKEN="t").host == "0.0.0.0"
    problem = refusal(capsys, "-f", str(path))
    assert problem.startswith(f"{path}:1:12: settings.host: '0.0.0.0' is open")
    assert "KVMESH_X" in refusal(capsys, "-f", str(path), KVMESH_MESH_TOKEN="t", KVMESH_X="1")


def test_without_a_count_there_are_no_aggregated_workers_beside_a_pair(up: Up) -> None:
    assert up("--prefill=1", "--decode=2").worker_count == 0
    assert up("--prefill=1", "--decode=2", "--workers=1").worker_count == 1


def test_stable_names_contain_the_host_if_hosts_share_a_registry(up: Up) -> None:
    assert up().name_prefix == ""
    assert up("--registry", "consul").name_prefix.endswith("-")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--workers", "0"], "--workers"),
        (["--workers", "two"], "--workers"),
        (["--http-port", "65536"], "--http-port"),
        (["--http-port", "65535", "--frontends", "2"], "--http-port"),
        (["--engine", "llm"], "--engine"),
        (["--registry", "memory"], "--registry"),
        (["--namespace", "../x"], "--namespace"),
        (["--speedup", "nan"], "--speedup"),
        (["--ready-s", "0"], "--ready-s"),
        (["--drain-s", "-1"], "--drain-s"),
        (["--model-name", " "], "--model-name"),
        (["--then"], "--then"),
        (["--work", "2"], "--work"),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_flag(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refusal(capsys, *argv)


def test_the_memory_registry_is_refused_from_the_environment_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "memory" in refusal(capsys, KVMESH_REGISTRY="memory")


def test_variables_of_meshctl_itself_do_not_exist_and_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "KVMESH_MESHCTL_WORKERS" in refusal(capsys, KVMESH_MESHCTL_WORKERS="3")


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ["statsu"],
            "meshctl: 'statsu': no such command; did you mean status? (see meshctl --help)",
        ),
        (["zzz"], "meshctl: 'zzz': no such command (see meshctl --help)"),
        (
            [],
            f"meshctl: a command is required: {', '.join(COMMANDS)} (see meshctl --help)",
        ),
        (
            ["up", "--worker=3"],
            "meshctl up: the configuration cannot be used:\n"
            "  --worker: no such flag; did you mean --workers?",
        ),
        (
            ["status", "--zzz", "--registry=memory"],
            "meshctl status: the configuration cannot be used:\n"
            "  --zzz: no such flag\n"
            "  --registry: 'memory': input should be 'file' or 'consul'",
        ),
    ],
)
def test_an_error_names_the_argument_and_a_similar_one(
    argv: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(argv, {}) == 2
    assert capsys.readouterr().err == f"{error}\n"


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"replay"}))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([command, "--help"], [command, "-h"], ["--help"]):
        assert run_command(argv, {"KVMESH_X": "bad"}) == 0
        assert command in capsys.readouterr().out


def test_up_has_only_the_flags_of_meshctl_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["up", "--help"], {}) == 0
    text = capsys.readouterr().out
    for flag in ("--workers", "--registry-path", "--http-port", "--log-dir", "--then CMD"):
        assert flag in text
    assert "--ready-fd" not in text
    assert "--http-host" not in text


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServiceConfig, str, bool]]:
    """What each `meshctl status` is asked for: settings, member, whether it prints JSON."""
    found: list[tuple[ServiceConfig, str, bool]] = []

    def record(config: MeshConfig, member: str, *, as_json: bool) -> int:
        found.append((config, member, as_json))
        return 0

    monkeypatch.setattr(status, "status", record)
    return found


def test_status_prints_json_on_request(shown: list[tuple[ServiceConfig, str, bool]]) -> None:
    for argv in (
        ["--json", "--namespace=n"],
        [],
        ["n.worker.serve-1", "--namespace=n"],
        ["--namespace", "n", "n.worker.serve-1"],
    ):
        assert run_command(["status", *argv], {}) == 0
    config, member, as_json = shown[0]
    assert (as_json, config.namespace) == (True, "n")
    assert member == ""
    assert shown[1][1:] == ("", False)
    assert [member for _, member, _ in shown[2:]] == ["n.worker.serve-1"] * 2


def test_status_does_not_need_what_a_service_needs_to_bind(
    shown: list[tuple[ServiceConfig, str, bool]],
) -> None:
    """In the shipped images the variables of the service apply to every command."""
    environ = {"KVMESH_HOST": "0.0.0.0", "KVMESH_PORT": "7000", "KVMESH_HEALTH_PORT": "7001"}
    assert run_command(["status"], environ) == 0
    assert len(shown) == 1


def test_every_command_is_one_function_of_its_module() -> None:
    ctx = click.Context(application)
    for name in COMMANDS:
        command = application.get_command(ctx, name)
        assert command is not None
        assert command.name == name


def test_an_interrupt_ends_a_command_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_flags: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "status", interrupted)
    assert run_command(["status"], {}) == 130


def complete(line: str, environ: Mapping[str, str]) -> list[str]:
    """The words that a shell offers for the last word of a line."""
    *_, last = line.split(" ")
    result = CliRunner().invoke(
        application,
        prog_name="meshctl",
        obj=environ,
        env={
            "_MESHCTL_COMPLETE": "zsh_complete",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
        },
    )
    assert not result.stderr
    lines = result.output.split("\n")
    # Of each item: its kind, value and help.
    return [value for value in lines[1::3] if value.startswith(last)]


def test_a_shell_completes_commands_flags_and_values() -> None:
    assert complete("meshctl sta", {}) == ["status", "start"]
    assert complete("meshctl keys r", {}) == ["revoke", "rotate"]
    assert "--registry-path" in complete("meshctl status --reg", {})
    assert complete("meshctl status --registry c", {}) == ["consul"]
    assert complete("meshctl nothing x", {}) == []
