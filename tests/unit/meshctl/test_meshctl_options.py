"""Command lines of meshctl."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshctl.__main__ import run_command
from meshctl.options import UpOptions, parse_status, parse_up


def up(*argv: str, **environ: str) -> UpOptions:
    return parse_up(list(argv), environ)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        up(*argv, **environ)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_the_default_is_a_small_sim_mesh_on_port_8000() -> None:
    options = up()
    assert (options.frontends, options.routers, options.worker_count) == (1, 1, 2)
    assert (options.engine, options.model_name, options.http_port) == ("sim", "sim", 8000)
    assert (options.registry, options.registry_path) == ("file", Path(".run/registry"))
    assert options.log_dir == Path(".run/logs")
    assert (options.sample, options.once, options.then) == (False, False, ())


def test_once_without_a_command_sends_the_sample_request() -> None:
    assert up("--once").sample


def test_then_takes_the_rest_of_the_line_and_replaces_the_sample_request() -> None:
    options = up("--once", "--then", "prog", "--once", "-x")
    assert options.then == ("prog", "--once", "-x")
    assert not options.sample


def test_mesh_wide_variables_configure_meshctl_too() -> None:
    options = up(KVMESH_NAMESPACE="n1", KVMESH_REGISTRY_PATH="/r", KVMESH_FRONTEND_HTTP_HOST="::1")
    assert (options.namespace, options.registry_path) == ("n1", Path("/r"))
    assert options.http_host == "::1"
    assert up("--namespace", "n2", KVMESH_NAMESPACE="n1").namespace == "n2"
    assert up(KVMESH_DRAIN_S="3").drain_s == 3


def test_without_a_count_there_are_no_aggregated_workers_beside_a_pair() -> None:
    assert up("--prefill=1", "--decode=2").worker_count == 0
    assert up("--prefill=1", "--decode=2", "--workers=1").worker_count == 1


def test_stable_names_contain_the_host_if_hosts_share_a_registry() -> None:
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
            "meshctl: a command is required: up, status, health, keys, replay, demo"
            " (see meshctl --help)",
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
    with pytest.raises(SystemExit) as exit_:
        run_command(argv, {})
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"{error}\n"


@pytest.mark.parametrize("command", ["up", "status", "demo"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([command, "--help"], ["--help"]):
        with pytest.raises(SystemExit) as exit_:
            run_command(argv, {})
        assert exit_.value.code == 0
        assert command in capsys.readouterr().out


def test_up_has_only_the_flags_of_meshctl_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(["up", "--help"], {})
    text = capsys.readouterr().out
    for flag in ("--workers", "--registry-path", "--http-port", "--log-dir", "--then CMD"):
        assert flag in text
    assert "--ready-fd" not in text
    assert "--http-host" not in text


def test_status_prints_json_on_request() -> None:
    config, key, as_json = parse_status(["--json", "--namespace=n"], {})
    assert (as_json, config.namespace) == (True, "n")
    assert key == ""
    assert parse_status([], {})[1:] == ("", False)
    assert parse_status(["n.worker.serve-1", "--namespace=n"], {})[1] == "n.worker.serve-1"


def test_status_does_not_need_what_a_service_needs_to_bind() -> None:
    """In the shipped images the variables of the service apply to every command."""
    environ = {"KVMESH_HOST": "0.0.0.0", "KVMESH_PORT": "7000", "KVMESH_HEALTH_PORT": "7001"}
    parse_status([], environ)
