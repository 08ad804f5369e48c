"""Strict configuration: precedence and types; every problem is reported at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator, Field, PositiveInt, ValidationError

from common.runtime.config import (
    PREFIX,
    ConfigError,
    Names,
    ServiceConfig,
    Share,
    read_config,
    read_config_or_exit,
)
from common.runtime.hosts import is_loopback
from tests.kit.certificates import Authority


def refuse_short(key: str) -> str:
    if len(key) < 8:
        raise ValueError("too short")
    return key


class RouterConfig(ServiceConfig):
    model: str
    """Required model."""
    peers: Names = ()
    """Other routers."""
    mode: Literal["kv", "random"] = "kv"
    """random is for comparisons."""
    ratio: Share = 0.5
    """A share."""
    slots: PositiveInt = 4
    """Raise it on big machines."""
    seed: int | None = None
    """Repeats a run."""
    key: Annotated[str, AfterValidator(refuse_short)] | None = Field(default=None, repr=False)
    """A secret."""
    fast: bool = False
    """Off by default."""
    kv_events: bool = True
    """On by default,
    described in two lines."""
    note: str = ""
    """A text."""
    kinds: Names = ("chat", "batch")
    """Restrict it to 100% of one."""
    folder: Path = Path("x")
    """A folder."""

    def problems(self) -> list[str]:
        found = super().problems()
        if self.note and self.kv_events:
            found.append("note: excludes --kv-events")
        return found


def read(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> RouterConfig:
    return read_config(RouterConfig, "ROUTER", environ or {}, ["--model", "m", *argv])[0]


def problems(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(argv, environ)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def test_defaults_apply_without_flags_and_variables() -> None:
    assert read() == RouterConfig(model="m")


def test_a_flag_overrides_the_service_variable_which_overrides_the_mesh_wide_one() -> None:
    mesh = {"KVMESH_NAMESPACE": "mesh", "KVMESH_ROUTER_SLOTS": "5"}
    service = {**mesh, "KVMESH_ROUTER_NAMESPACE": "service"}
    assert read((), mesh).namespace == "mesh"
    assert read((), service).namespace == "service"
    assert read(["--namespace", "flag"], service).namespace == "flag"
    assert read((), service).slots == 5


def test_variables_of_other_standards_have_the_lowest_precedence() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317", "CONSUL_HTTP_TOKEN": "t"}
    assert read((), environ).otlp_endpoint == ("http://a:4317",)
    assert read((), environ).consul_token == "t"
    environ["KVMESH_OTLP_ENDPOINT"] = "http://b:4317"
    assert read((), environ).otlp_endpoint == ("http://b:4317",)


def test_every_type_is_read_from_flags_and_from_variables() -> None:
    texts = {
        "peers": "a:1, b:2,",
        "mode": "random",
        "ratio": "0.25",
        "slots": "7",
        "seed": "-3",
        "key": "long-enough",
        "fast": "Yes",
        "folder": "/srv/x",
    }
    expected = RouterConfig(
        model="m",
        peers=("a:1", "b:2"),
        mode="random",
        ratio=0.25,
        slots=7,
        seed=-3,
        key="long-enough",
        fast=True,
        folder=Path("/srv/x"),
    )
    assert read([f"--{name}={text}" for name, text in texts.items()]) == expected
    assert read([word for name, text in texts.items() for word in (f"--{name}", text)]) == expected
    variables = {f"KVMESH_ROUTER_{name.upper()}": text for name, text in texts.items()}
    assert read((), variables) == expected


@pytest.mark.parametrize("name", ["fast", "kv-events"])
def test_a_boolean_flag_takes_no_value_or_a_value_or_is_negated(name: str) -> None:
    def is_on(*flag: str) -> bool:
        return bool(getattr(read([*flag, "--slots", "2"]), name.replace("-", "_")))

    assert [is_on(f"--{name}{value}") for value in ("", "=on", "=1")] == [True] * 3
    assert [is_on(f"--{name}={value}") for value in ("off", "false", "NO")] == [False] * 3
    assert not is_on(f"--{name}", "off")
    assert not is_on(f"--no-{name}")


def test_a_negated_flag_takes_no_value_and_excludes_the_flag_itself() -> None:
    assert problems(["--no-fast=off"])[0].startswith("--no-fast: does not take a value")
    assert problems(["--fast", "--no-fast"]) == ["--fast: given 2 times; give it once"]
    assert problems(["--no-seed"]) == ["--no-seed: no such flag"]


def test_an_empty_text_unsets_optional_settings_only() -> None:
    assert read((), {"KVMESH_ROUTER_SEED": "", "KVMESH_MESH_TOKEN": ""}).seed is None
    (problem,) = problems((), {"KVMESH_ROUTER_SLOTS": ""})
    assert problem.startswith("KVMESH_ROUTER_SLOTS: ''")
    assert problems((), {"KVMESH_REGISTRY_PATH": ""}) == ["KVMESH_REGISTRY_PATH: '': is empty"]


def test_all_problems_are_reported_at_once_by_flag_or_variable() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(
            RouterConfig,
            "ROUTER",
            {
                "KVMESH_ROUTER_SLOTS": "many",
                "KVMESH_ROUTER_RATIO": "nan",
                "KVMESH_ROUTER_FAST": "maybe",
                "KVMESH_ROUTER_MODEE": "x",
                "KVMESH_NAMESPCE": "x",
                "KVMESH_DRAIN_S": "-1",
                "HOME": "/root",
            },
            ["--mode", "best", "--colour", "red", "word"],
        )
    assert sorted(caught.value.problems) == sorted(
        [
            "KVMESH_ROUTER_SLOTS: 'many': input should be a valid integer,"
            " unable to parse string as an integer",
            "KVMESH_ROUTER_RATIO: 'nan': input should be a finite number",
            "KVMESH_ROUTER_FAST: 'maybe': input should be a valid boolean,"
            " unable to interpret input",
            "KVMESH_ROUTER_MODEE: no such variable; did you mean KVMESH_ROUTER_MODE?",
            "KVMESH_NAMESPCE: no such variable; did you mean KVMESH_NAMESPACE?",
            "KVMESH_DRAIN_S: '-1': input should be greater than or equal to 0",
            "--mode: 'best': input should be 'kv' or 'random'",
            "--colour: no such flag",
            "'word': not a flag",
            "--model or KVMESH_ROUTER_MODEL: required and not given",
        ]
    )


def test_a_flag_without_its_value_is_reported_with_the_problems_of_variables() -> None:
    first, second = problems(["--seed"], {"KVMESH_ROUTER_SLOTS": "0"})
    assert first.startswith("--seed: requires an argument")
    assert second.startswith("KVMESH_ROUTER_SLOTS: '0'")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("KVMESH_FOO", ""),
        ("KVMESH_ROUTER_FOLD", "KVMESH_ROUTER_FOLDER"),
        ("KVMESH_WORKR_FOO", ""),
        ("KVMESH_ROUTER_MOO", ""),
        ("KVMESH_ROUTR_NOTICE_S", "KVMESH_ROUTER_NOTICE_S"),
        ("KVMESH_REGISTRY_PTH", "KVMESH_REGISTRY_PATH"),
        ("--slot", "--slots"),
        ("--ray", ""),
        ("--no-kv-event", "--no-kv-events"),
        ("--no-noise", ""),
    ],
)
def test_an_unknown_name_is_refused_with_a_similar_name_if_there_is_one(
    name: str, suggestion: str
) -> None:
    (problem,) = problems([], {name: "1"}) if name.startswith("K") else problems([name])
    assert problem.startswith(f"{name}: no such ")
    assert problem.partition("; did you mean ")[2] == (f"{suggestion}?" if suggestion else "")


def test_a_contradiction_names_the_flag_or_variable_that_set_the_field() -> None:
    message = "excludes --kv-events"
    assert problems(["--note", "x"]) == [f"--note: {message}"]
    variable = {"KVMESH_ROUTER_NOTE": "x"}
    assert problems((), variable) == [f"KVMESH_ROUTER_NOTE: {message}"]
    assert problems(["--note=x"], variable) == [f"--note: {message}"]


def test_a_bad_variable_is_refused_even_if_a_flag_overrides_it() -> None:
    (problem,) = problems(["--slots", "3"], {"KVMESH_ROUTER_SLOTS": "x"})
    assert problem.startswith("KVMESH_ROUTER_SLOTS: 'x'")


def test_a_flag_given_twice_is_refused() -> None:
    assert problems(["--slots", "3", "--slots", "4"]) == ["--slots: given 2 times; give it once"]


def test_a_secret_is_neither_in_problems_nor_in_the_repr() -> None:
    secret = "swordfish-99"
    assert secret not in repr(read(["--key", secret, "--mesh-token", secret]))
    assert problems(["--key", "hunter2"]) == ["--key: too short"]


def test_a_secret_is_read_from_a_file_that_a_flag_or_variable_names(tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    file.write_text("from-a-file\n")
    other.write_text("from-another-file")
    variables = {"KVMESH_MESH_TOKEN_FILE": str(file)}
    assert read((), variables).mesh_token == "from-a-file"
    variables["KVMESH_ROUTER_MESH_TOKEN_FILE"] = str(other)
    assert read((), variables).mesh_token == "from-another-file"
    assert read(["--mesh-token-file", str(file)], variables).mesh_token == "from-a-file"
    assert read((), {"CONSUL_HTTP_TOKEN_FILE": str(file)}).consul_token == "from-a-file"
    assert read(["--key-file", str(file)]).key == "from-a-file"
    assert problems(["--slots-file", str(file)]) == ["--slots-file: no such flag"]
    assert problems(["--key-file", str(file), "--key", "text-of-it"]) == [
        "--key: given 2 times; give it once"
    ]


def test_an_unreadable_or_empty_secret_file_is_a_problem(tmp_path: Path) -> None:
    empty, binary, short = (tmp_path / name for name in ("empty", "binary", "short"))
    empty.write_text("\n")
    binary.write_bytes(b"\xff")
    short.write_text("hunter2")
    missing = str(tmp_path / "none")
    assert problems(
        ["--key-file", str(short), "--mesh-token-file", missing, "--mesh-key-file", str(binary)],
        {"KVMESH_ADMIN_TOKEN_FILE": str(empty)},
    ) == [
        f"KVMESH_ADMIN_TOKEN_FILE: {str(empty)!r} is empty",
        f"--mesh-token-file: cannot read {missing!r}: No such file or directory",
        f"--mesh-key-file: cannot read {str(binary)!r}: it is not UTF-8",
        "--key-file: too short",
    ]


def test_variables_injected_by_kubernetes_are_ignored_with_a_warning() -> None:
    injected = {
        "KVMESH_SERVICE_HOST": "10.0.0.1",
        "KVMESH_SERVICE_PORT": "80",
        "KVMESH_SERVICE_PORT_GRPC": "80",
        "KVMESH_PORT": "tcp://10.0.0.1:80",
        "KVMESH_PORT_80_TCP": "tcp://10.0.0.1:80",
        "KVMESH_ROUTER_SERVICE_HOST": "10.0.0.2",
        "KVMESH_ROUTER_PORT": "tcp://10.0.0.2:50051",
        "KVMESH_ROUTER_PORT_50051_TCP_ADDR": "10.0.0.2",
        "KVMESH_ROUTER_PORT_50051_TCP_PROTO": "tcp",
    }
    config, warnings = read_config(RouterConfig, "ROUTER", injected, ["--model", "m"])
    assert config.port == 0
    assert sorted(warning.split()[0] for warning in warnings) == sorted(injected)
    assert read((), {"KVMESH_ROUTER_PORT": "50051"}).port == 50051


def test_variables_of_other_services_are_ignored_but_those_of_unknown_services_refused() -> None:
    assert read((), {"KVMESH_WORKER_ANYTHING": "x"}) == read()
    assert problems((), {"KVMESH_ROUTR_SLOTS": "1"}) == [
        "KVMESH_ROUTR_SLOTS: no such variable; did you mean KVMESH_ROUTER_SLOTS?"
    ]


def help_of(
    capsys: pytest.CaptureFixture[str], service: str | None = "ROUTER", name: str = ""
) -> str:
    with pytest.raises(SystemExit) as exit_:
        read_config(RouterConfig, service, {"KVMESH_ROUTER_BAD": "x"}, ["--help"], name=name)
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_help_has_every_flag_variable_default_and_description(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys)
    for name, field in RouterConfig.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert f"KVMESH_ROUTER_{name.upper()}" in text
        assert " ".join((field.description or "").split()) in text
    assert "kv|random" in text
    for default in ("required", "on by default", "off by default", "unset by default"):
        assert f"; {default}\n" in text
    assert "KVMESH_ROUTER_KINDS; default chat,batch\n" in text


def test_help_lists_the_flags_of_the_service_before_the_common_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys)
    common = text.index("settings of every service")
    assert text.index("--folder") < common < text.index("--host")
    assert "--no-kv-events" in text


def test_a_tool_has_its_own_name_and_mesh_wide_variables_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys, None, "python -m records")
    assert "python -m records [FLAGS]" in text
    assert "KVMESH_ROUTER" not in text
    assert "KVMESH_NAMESPACE" in text
    environ = {"KVMESH_ROUTER_SLOTS": "x", "KVMESH_NAMESPACE": "n", "KVMESH_DRAIN_S": "x"}
    with pytest.raises(SystemExit):
        read_config_or_exit(RouterConfig, None, environ, [], name="python -m records")
    assert capsys.readouterr().err.splitlines() == [
        "python -m records: the configuration cannot be used:",
        "  --model: required and not given",
        "  KVMESH_DRAIN_S: 'x': input should be a valid number, unable to parse string as a number",
    ]


def test_fields_without_a_flag_are_read_from_variables_only() -> None:
    environ = {"KVMESH_DRAIN_S": "5"}
    argv = ["--model", "m"]
    config, _ = read_config(RouterConfig, None, environ, argv, flags=("model",))
    assert config.drain_s == 5
    with pytest.raises(ConfigError) as caught:
        read_config(RouterConfig, None, {}, [*argv, "--drain-s", "1"], flags=("model",))
    assert caught.value.problems == ("--drain-s: no such flag",)


def test_a_main_prints_help_or_all_problems_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_config_or_exit(RouterConfig, "ROUTER", {}, ["-h"])
    assert caught.value.code == 0
    assert "--drain-s" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        read_config_or_exit(RouterConfig, "ROUTER", {"KVMESH_X": "1"}, ["--slots=0"])
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert "KVMESH_X" in errors
    assert "--slots: '0': input should be greater than 0" in errors


def test_a_rejected_configuration_is_written_to_the_ready_pipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    read_end, write_end = os.pipe()
    with pytest.raises(SystemExit):
        read_config_or_exit(RouterConfig, "ROUTER", {}, ["--slots=0", "--ready-fd", f"{write_end}"])
    with os.fdopen(read_end) as reader:
        assert json.loads(reader.read()) == {"error": capsys.readouterr().err}


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.3", "::", "mesh-1.local"])
def test_an_open_bind_needs_a_token_or_tls_or_insecure(host: str) -> None:
    flags = ["--host", host, "--advertise-host", "me"]
    (problem,) = problems(flags)
    assert problem.startswith(f"--host: {host!r} is open to other hosts")
    tls = ["--tls-cert-path=c", "--tls-key-path=k", "--tls-ca-path=a"]
    for protection in (["--mesh-token", "t"], tls, ["--insecure"]):
        assert read([*flags, *protection]).host == host


def test_an_empty_token_does_not_protect_an_open_bind() -> None:
    flags = ["--host", "10.0.0.3", "--advertise-host", "me"]
    assert problems(flags, {"KVMESH_MESH_TOKEN": ""})[0].startswith("--host:")


def test_the_admin_token_differs_from_the_mesh_token_and_an_empty_one_is_none() -> None:
    (problem,) = problems(["--mesh-token=t"], {"KVMESH_ADMIN_TOKEN": "t"})
    assert problem.startswith("KVMESH_ADMIN_TOKEN: must differ from --mesh-token")
    assert read(["--mesh-token=t", "--admin-token="]).admin_token is None


def test_the_token_of_operators_differs_from_the_other_tokens() -> None:
    for variable in ("KVMESH_MESH_TOKEN", "KVMESH_ADMIN_TOKEN"):
        (problem,) = problems(["--operator-token=t"], {variable: "t"})
        assert problem == "--operator-token: must differ from --mesh-token and --admin-token"
    assert read(["--mesh-token=m", "--operator-token=o"]).operator_token == "o"
    assert read(["--operator-token="]).operator_token is None


def test_tls_needs_all_three_files_and_a_wildcard_bind_needs_an_advertised_host() -> None:
    assert problems(["--tls-cert-path=c", "--host=0.0.0.0", "--insecure"]) == [
        "--tls-cert-path: set all of --tls-cert-path, --tls-key-path, --tls-ca-path, or none",
        "--advertise-host: required, because peers cannot connect to '0.0.0.0'",
    ]


def test_only_addresses_of_this_host_are_loopback() -> None:
    inside = ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]", "unix:/tmp/s"]
    outside = ["0.0.0.0", "::", "10.0.0.1", "localhost.evil", "", "127.0.0.1.evil"]
    assert [is_loopback(host) for host in inside] == [True] * len(inside)
    assert [is_loopback(host) for host in outside] == [False] * len(outside)


def test_a_field_without_a_description_is_a_programming_error() -> None:
    class Undescribed(ServiceConfig):
        x: int = 1

    with pytest.raises(TypeError, match=r"Undescribed\.x"):
        read_config(Undescribed, "ROUTER", {}, [])


def test_a_validation_error_does_not_show_the_value_which_may_be_a_secret() -> None:
    with pytest.raises(ValidationError) as caught:
        RouterConfig(model="m", key="hunter2")
    assert "hunter2" not in str(caught.value)


def test_a_configuration_is_immutable() -> None:
    with pytest.raises(ValidationError):
        read().slots = 5


@settings(max_examples=60, deadline=None)
@given(
    environ=st.dictionaries(
        st.text(st.characters(codec="ascii", categories=["Lu", "Nd"], include_characters="_")).map(
            lambda tail: PREFIX + tail
        ),
        st.text(max_size=12),
        max_size=4,
    ),
    argv=st.lists(st.text(max_size=12) | st.sampled_from(["--slots", "--fast", "=", "--", "-"])),
)
def test_any_input_returns_a_config_or_named_problems(
    environ: dict[str, str], argv: list[str]
) -> None:
    try:
        config, _ = read_config(RouterConfig, "ROUTER", environ, ["--model=m", *argv])
    except ConfigError as refusal:
        found = refusal.problems
        assert found
        assert all(found)
    except SystemExit:
        assert {"-h", "--help"} & set(argv)
    else:
        assert config.slots >= 1


def test_an_open_metrics_port_needs_a_key_and_roles_need_certificates(tmp_path: Path) -> None:
    open_port = ["--metrics-port", "9464", "--metrics-host", "10.1.2.3"]
    (problem,) = problems(open_port)
    assert problem.startswith("--metrics-port: '10.1.2.3' is open to other hosts; set --metrics-k")
    assert read([*open_port, "--metrics-key", "k"]).metrics_key == "k"
    (problem,) = problems(["--tls-role-domain", "mesh.test"])
    assert problem.startswith("--tls-role-domain: needs the three --tls paths")


@pytest.mark.parametrize(
    ("service", "role"), [("ROUTER", "router"), ("EPP", "frontend"), ("CONSOLE", "operator")]
)
def test_a_certificate_without_the_name_of_the_role_is_refused(
    tmp_path: Path, service: str, role: str
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("other", ["DNS:worker.mesh.test"])
    paths = [f"--tls-cert-path={cert}", f"--tls-key-path={key}", f"--tls-ca-path={authority.ca}"]
    with_roles = ["--model=m", *paths, "--tls-role-domain=mesh.test"]
    read_config(RouterConfig, service, {}, ["--model=m", *paths])
    read_config(RouterConfig, None, {}, with_roles)
    with pytest.raises(ConfigError) as refused:
        read_config(RouterConfig, service, {}, with_roles)
    (problem,) = refused.value.problems
    assert problem == (
        f"--tls-cert-path: {cert} has worker.mesh.test; its role here needs the name"
        f" {role}.mesh.test"
    )
    authority.issue("other", ["DNS:worker.mesh.test", f"DNS:{role}.mesh.test"])
    read_config(RouterConfig, service, {}, with_roles)
    authority.issue("other")
    with pytest.raises(ConfigError, match="has no DNS name"):
        read_config(RouterConfig, service, {}, with_roles)
    cert.write_text("replaced at this moment")
    read_config(RouterConfig, service, {}, with_roles)
