"""The command line's flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshctl.options import HealthOptions, UpOptions, parse


def up(*argv: str, **environ: str) -> UpOptions:
    options = parse(["up", *argv], environ)
    assert isinstance(options, UpOptions)
    return options


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        up(*argv, **environ)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_without_flags_up_starts_a_small_sim_mesh_on_port_8000() -> None:
    options = up()
    mesh = options.mesh
    assert (mesh.frontends, mesh.routers, mesh.workers) == (1, 1, 2)
    assert (mesh.engine, mesh.model_name, mesh.http_port) == ("sim", "sim", 8000)
    assert (mesh.registry, mesh.registry_path) == ("file", Path(".run/registry"))
    assert options.log_dir == Path(".run/logs")
    assert (options.sample, options.once, options.then) == (False, False, ())


def test_once_alone_means_the_sample() -> None:
    assert up("--once").sample


def test_then_takes_the_rest_of_the_line_and_replaces_the_sample_of_once() -> None:
    options = up("--once", "--then", "prog", "--once", "-x")
    assert options.then == ("prog", "--once", "-x")
    assert not options.sample


def test_mesh_wide_variables_are_defaults_of_meshctl_and_of_services() -> None:
    options = up(KVMESH_NAMESPACE="n1", KVMESH_REGISTRY_PATH="/r", KVMESH_FRONTEND_HTTP_HOST="::1")
    assert (options.mesh.namespace, options.mesh.registry_path) == ("n1", Path("/r"))
    assert options.http_host == "::1"
    assert up("--namespace", "n2", KVMESH_NAMESPACE="n1").mesh.namespace == "n2"


def test_stable_names_carry_the_host_only_where_hosts_share_a_registry() -> None:
    assert up().mesh.name_prefix == ""
    assert up("--registry", "consul").mesh.name_prefix.endswith("-")


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
def test_a_bad_value_is_refused_by_the_name_of_its_flag(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refusal(capsys, *argv)


def test_a_registry_that_processes_cannot_share_is_refused_from_the_environment_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "memory" in refusal(capsys, KVMESH_REGISTRY="memory")


def test_unknown_variables_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "KVMESH_MESHCTL_WORKERS" in refusal(capsys, KVMESH_MESHCTL_WORKERS="3")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["statsu"],
            "meshctl: 'statsu': no such command; did you mean status? (see meshctl --help)",
        ),
        (["zzz"], "meshctl: 'zzz': no such command (see meshctl --help)"),
        (
            ["status", "--jsn"],
            "meshctl status: --jsn: no such flag; did you mean --json? (see meshctl status --help)",
        ),
        (
            ["up", "--worker=3"],
            "meshctl up: --worker: no such flag; did you mean --workers? (see meshctl up --help)",
        ),
        (["demo", "--zzz"], "meshctl demo: --zzz: no such flag (see meshctl demo --help)"),
        (["status", "now"], "meshctl status: 'now': not a flag (see meshctl status --help)"),
        (
            ["up", "--workers", "two"],
            "meshctl up: argument --workers: 'two': must be a whole number (see meshctl up --help)",
        ),
        (
            ["up", "--drain-s", "x"],
            "meshctl up: argument --drain-s: 'x': must be a number (see meshctl up --help)",
        ),
        (
            ["health", "localhost"],
            "meshctl health: argument HOST:PORT: 'localhost': must be HOST:PORT"
            " (see meshctl health --help)",
        ),
    ],
)
def test_a_usage_error_names_the_valid_values_and_the_help_command(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(argv, {})
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"{said}\n"


@pytest.mark.parametrize("address", ["127.0.0.1:7001", "[::1]:7001", "worker:1"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    assert parse(["health", address], {}) == HealthOptions(address)
