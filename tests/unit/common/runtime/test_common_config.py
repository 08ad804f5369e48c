"""Strict configuration: precedence, types, and that everything wrong is reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.runtime.config import (
    PREFIX,
    ConfigError,
    HelpRequested,
    ServiceConfig,
    at_least,
    between,
    is_loopback,
    read_config,
    read_config_or_exit,
    setting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ServiceConfig):
    model: str = field(metadata=setting("Which model; always."))
    peers: tuple[str, ...] = field(default=(), metadata=setting("Other routers, if there are any."))
    mode: Literal["kv", "random"] = field(default="kv", metadata=setting("random to compare."))
    ratio: float = field(default=0.5, metadata=setting("Never.", check=between(0, 1)))
    slots: int = field(default=4, metadata=setting("On big machines.", check=at_least(1)))
    seed: int | None = field(default=None, metadata=setting("To repeat a run."))
    key: str | None = field(
        default=None,
        repr=False,
        metadata=setting("Secret.", check=lambda key: "short" if len(key) < 8 else None),
    )
    fast: bool = field(default=False, metadata=setting("When in a hurry."))
    kv_events: bool = field(default=True, metadata=setting("Unset it to guess."))
    note: str = field(default="", metadata=setting("To remember."))
    kinds: tuple[str, ...] = field(default=("chat", "batch"), metadata=setting("For fewer."))
    folder: Path = field(default=Path("x"), metadata=setting("To keep things elsewhere."))

    def problems(self) -> list[str]:
        found = ServiceConfig.problems(self)
        if self.note and self.kv_events:
            found.append("note: nobody reads a note, kv_events and mode are set")
        return found


def read(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> RouterConfig:
    return read_config(RouterConfig, "ROUTER", environ or {}, ["--model", "m", *argv])[0]


def problems(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(argv, environ)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def test_without_anything_given_the_defaults_hold() -> None:
    assert read() == RouterConfig(model="m")


def test_a_flag_wins_over_the_rooms_variable_and_that_over_the_meshs() -> None:
    mesh = {"KVMESH_NAMESPACE": "mesh", "KVMESH_ROUTER_SLOTS": "5"}
    room = {**mesh, "KVMESH_ROUTER_NAMESPACE": "room"}
    assert read((), mesh).namespace == "mesh"
    assert read((), room).namespace == "room"
    assert read(["--namespace", "flag"], room).namespace == "flag"
    assert read((), room).slots == 5


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
    want = RouterConfig(
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
    assert read([f"--{name}={text}" for name, text in texts.items()]) == want
    assert (
        read(
            [part for name, text in texts.items() for part in (f"--{name}", text) if name != "fast"]
            + ["--fast"]
        )
        == want
    )
    assert read((), {f"KVMESH_ROUTER_{name.upper()}": text for name, text in texts.items()}) == want


@pytest.mark.parametrize("name", ["fast", "kv-events"])
def test_a_switch_is_turned_by_itself_by_a_value_or_by_its_negation(name: str) -> None:
    def is_on(flag: str) -> bool:
        return bool(getattr(read([flag, "--slots", "2"]), name.replace("-", "_")))

    assert [is_on(f"--{name}{value}") for value in ("", "=on", "=1")] == [True] * 3
    assert [is_on(f"--{name}={value}") for value in ("off", "false", "NO")] == [False] * 3
    assert not is_on(f"--no-{name}")


def test_a_word_after_a_switch_is_refused_and_told_where_values_go() -> None:
    (problem,) = problems(["--kv-events", "off", "--slots", "2"])
    assert problem.startswith("'off': not a flag")
    assert problem.endswith("as in --kv-events=off")


def test_a_negation_takes_no_value_and_contradicts_its_switch() -> None:
    assert problems(["--no-fast=off"]) == [
        "--no-fast: takes no value; say --no-fast, or --fast=off"
    ]
    assert problems(["--fast", "--no-fast"]) == ["--fast: given twice"]
    assert problems(["--no-seed"]) == ["--no-seed: no such flag"]


def test_an_empty_text_unsets_an_optional_value_only() -> None:
    assert read((), {"KVMESH_ROUTER_SEED": "", "KVMESH_MESH_TOKEN": ""}).seed is None
    assert problems((), {"KVMESH_ROUTER_SLOTS": ""}) == [
        "KVMESH_ROUTER_SLOTS: '' is not a whole number"
    ]


def test_all_problems_are_reported_at_once() -> None:
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
            ["--mode", "best", "--colour", "red", "word", "--seed"],
        )
    assert sorted(caught.value.problems) == sorted(
        [
            "KVMESH_ROUTER_SLOTS: 'many' is not a whole number",
            "KVMESH_ROUTER_RATIO: 'nan' is not a finite number",
            "KVMESH_ROUTER_FAST: 'maybe' is neither true nor false",
            "KVMESH_ROUTER_MODEE: no such variable; did you mean KVMESH_ROUTER_MODE?",
            "KVMESH_NAMESPCE: no such variable; did you mean KVMESH_NAMESPACE?",
            "KVMESH_DRAIN_S: must be at least 0",
            "--mode: 'best' is not one of kv, random",
            "--colour: no such flag",
            "'word': not a flag",
            "--seed: needs a value",
            "--model or KVMESH_ROUTER_MODEL: required and not given",
        ]
    )


@pytest.mark.parametrize(
    ("name", "meant"),
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
def test_only_a_name_that_is_near_is_suggested(name: str, meant: str) -> None:
    (problem,) = problems([], {name: "1"}) if name.startswith("K") else problems([name])
    assert problem.startswith(f"{name}: no such ")
    assert problem.partition("; did you mean ")[2] == (f"{meant}?" if meant else "")


def test_a_contradiction_names_the_knobs_as_they_were_given() -> None:
    why = "nobody reads a note, --kv-events and mode are set"
    assert problems(["--note", "x"]) == [f"--note: {why}"]
    assert problems((), {"KVMESH_ROUTER_NOTE": "x", "KVMESH_ROUTER_KV_EVENTS": "1"}) == [
        "KVMESH_ROUTER_NOTE: nobody reads a note, KVMESH_ROUTER_KV_EVENTS and mode are set"
    ]
    both = problems(["--note=x"], {"KVMESH_ROUTER_NOTE": "y"})
    assert both == [f"--note: {why}"]


def test_a_bad_value_is_refused_even_where_a_flag_overrides_it() -> None:
    assert problems(["--slots", "3"], {"KVMESH_ROUTER_SLOTS": "x"}) == [
        "KVMESH_ROUTER_SLOTS: 'x' is not a whole number"
    ]


def test_a_flag_given_twice_is_refused() -> None:
    assert problems(["--slots", "3", "--slots", "4"]) == ["--slots: given twice"]


def test_a_secret_is_neither_in_messages_nor_in_the_repr() -> None:
    secret = "swordfish-99"
    assert secret not in repr(read(["--key", secret, "--mesh-token", secret]))
    assert problems(["--key", "hunter2"]) == ["--key: short"]


def test_what_kubernetes_injects_is_ignored_with_a_warning() -> None:
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


def test_another_rooms_variables_are_not_our_business_but_unknown_rooms_are() -> None:
    assert read((), {"KVMESH_WORKER_ANYTHING": "x", "KVMESH_MESHCTL_X": "y"}) == read()
    assert problems((), {"KVMESH_ROUTR_SLOTS": "1"}) == [
        "KVMESH_ROUTR_SLOTS: no such variable; did you mean KVMESH_ROUTER_SLOTS?"
    ]


def test_a_common_variable_is_fine_for_a_room_without_that_field() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Tool:
        path: Path = field(default=Path("x"), metadata=setting("Always."))

    environ = {"KVMESH_DRAIN_S": "1", "KVMESH_REGISTRY_PATH": "/x"}
    assert read_config(Tool, "MESHCTL", environ, []) == (Tool(), [])


def test_help_names_every_flag_variable_default_and_sentence() -> None:
    with pytest.raises(HelpRequested) as caught:
        read_config(RouterConfig, "ROUTER", {"KVMESH_ROUTER_BAD": "x"}, ["--help"])
    text = caught.value.text
    for spec in fields(RouterConfig):
        assert f"--{spec.name.replace('_', '-')}" in text
        assert f"KVMESH_ROUTER_{spec.name.upper()}" in text
        assert spec.metadata["help"] in text
    assert "kv|random" in text
    assert "required" in text


def help_of(room: str | None = "ROUTER", name: str = "") -> str:
    with pytest.raises(HelpRequested) as caught:
        read_config(RouterConfig, room, {}, ["--help"], name=name)
    return caught.value.text


def test_help_has_the_rooms_own_flags_before_those_of_every_service() -> None:
    text = help_of()
    common = {spec.name for spec in fields(ServiceConfig)}
    own = [spec.name for spec in fields(RouterConfig) if spec.name not in common]
    flags = [line.split()[0].strip(",") for line in text.splitlines() if line.startswith("  --")]
    assert [flag[2:].replace("-", "_") for flag in flags][: len(own)] == own
    assert len(flags) == len(fields(RouterConfig))


def test_help_shows_how_to_turn_off_what_is_on_and_defaults_as_they_are_written() -> None:
    text = help_of()
    assert "  --kv-events, --no-kv-events\n" in text
    assert "  --fast\n" in text
    for default in ("on by default", "off by default", "empty by default", "unset by default"):
        assert f"; {default}\n" in text
    assert "KVMESH_ROUTER_KINDS; default chat,batch\n" in text
    assert "default ('" not in text


def test_a_tool_has_its_own_name_and_no_variables_but_those_of_the_mesh(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(None, "python -m records")
    assert text.startswith("python -m records: ")
    assert "KVMESH_ROUTER" not in text
    assert "KVMESH_NAMESPACE" in text
    environ = {"KVMESH_ROUTER_SLOTS": "x", "KVMESH_NAMESPACE": "n", "KVMESH_DRAIN_S": "x"}
    with pytest.raises(SystemExit):
        read_config_or_exit(RouterConfig, None, environ, [], name="python -m records")
    assert capsys.readouterr().err.splitlines() == [
        "python -m records: the configuration cannot be used:",
        "  KVMESH_DRAIN_S: 'x' is not a number",
        "  --model: required and not given",
    ]


def test_main_prints_help_or_all_problems_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_config_or_exit(RouterConfig, "ROUTER", {}, ["-h"])
    assert caught.value.code == 0
    assert "--drain-s" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        read_config_or_exit(RouterConfig, "ROUTER", {"KVMESH_X": "1"}, ["--slots=0"])
    assert caught.value.code == 2
    complaint = capsys.readouterr().err
    assert "KVMESH_X" in complaint
    assert "--slots: must be at least 1" in complaint


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.3", "::", "mesh-1.local"])
def test_an_open_bind_needs_a_token_or_tls_or_insecure(host: str) -> None:
    flags = ["--host", host, "--advertise-host", "me"]
    (problem,) = problems(flags)
    assert problem.startswith(f"--host: {host!r} is open to other hosts")
    tls = ["--tls-cert-path=c", "--tls-key-path=k", "--tls-ca-path=a"]
    for cure in (["--mesh-token", "t"], tls, ["--insecure"]):
        assert read([*flags, *cure]).host == host


def test_an_empty_token_protects_nothing() -> None:
    flags = ["--host", "10.0.0.3", "--advertise-host", "me"]
    assert problems(flags, {"KVMESH_MESH_TOKEN": ""})[0].startswith("--host:")


def test_tls_needs_all_three_files_and_a_wildcard_bind_a_name() -> None:
    assert problems(["--tls-cert-path=c", "--host=0.0.0.0", "--insecure"]) == [
        "--tls-cert-path, --tls-key-path and --tls-ca-path: give all three or none",
        "--advertise-host: needed, since peers cannot connect to the wildcard '0.0.0.0'",
    ]


def test_loopback_is_what_stays_on_this_host() -> None:
    inside = ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]", "unix:/tmp/s"]
    outside = ["0.0.0.0", "::", "10.0.0.1", "localhost.evil", "", "127.0.0.1.evil"]
    assert [is_loopback(host) for host in inside] == [True] * len(inside)
    assert [is_loopback(host) for host in outside] == [False] * len(outside)


@pytest.mark.parametrize("kind", [dict[str, str], list[str], int | str, bytes])
def test_a_field_that_text_cannot_give_is_our_own_mistake(kind: Any) -> None:
    odd = type("Odd", (), {"__annotations__": {"x": kind}, "x": field(metadata=setting("Never."))})
    with pytest.raises(TypeError, match=r"Odd\.x"):
        read_config(dataclass(odd), "ROUTER", {}, [])


def test_a_field_must_say_when_to_turn_it() -> None:
    @dataclass(frozen=True)
    class Mute:
        x: int = 1

    with pytest.raises(TypeError, match=r"Mute\.x"):
        read_config(Mute, "ROUTER", {}, [])


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
def test_any_input_gives_a_config_or_named_problems(
    environ: dict[str, str], argv: list[str]
) -> None:
    try:
        config, _ = read_config(RouterConfig, "ROUTER", environ, argv)
    except ConfigError as refusal:
        found = refusal.problems
        assert found
        assert all(found)
    except HelpRequested:
        assert {"-h", "--help"} & set(argv)
    else:
        assert config.slots >= 1
