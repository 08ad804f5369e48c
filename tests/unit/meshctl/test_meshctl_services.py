"""The services of a mesh as data."""

from __future__ import annotations

import socket
from itertools import pairwise
from pathlib import Path

import pytest

from common.runtime.config import ServiceConfig, read_config
from console_svc.config import ConsoleConfig
from epp_svc.config import EppConfig
from frontend_svc.config import FrontendConfig
from indexer_svc.config import IndexerConfig
from meshctl.options import UpOptions
from meshctl.process.rollout import fixed_port
from meshctl.services import (
    NOTICE_S,
    STOP_MARGIN_S,
    ServiceSpec,
    build_service_specs,
    find_port_problems,
)
from router_svc.config import RouterConfig
from worker_svc.config import WorkerConfig

OPTIONS = UpOptions(frontends=2, routers=2, workers=3, speedup=0.0, http_port=8100)


def flag(spec: ServiceSpec, name: str) -> str:
    return dict(pairwise(spec.args))[name]


def test_the_default_mesh_is_one_frontend_router_and_indexer_and_two_workers() -> None:
    names = [spec.name for spec in build_service_specs(UpOptions())]
    assert names == ["frontend-0", "router-0", "indexer-0", "worker-0", "worker-1"]


def test_prefill_and_decode_workers_get_their_role_flag() -> None:
    specs = build_service_specs(UpOptions(workers=0, prefill=1, decode=2))
    roles = {s.name: flag(s, "--role") for s in specs if s.module == "worker_svc"}
    assert roles == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


def test_a_console_is_started_last_and_receives_the_spans_of_all_services() -> None:
    options = UpOptions(consoles=1, console_port=8100, console_otlp_port=8101)
    *services, console = build_service_specs(options)
    assert (console.name, console.module, console.is_observer) == ("console-0", "console_svc", True)
    assert (flag(console, "--http-port"), flag(console, "--otlp-port")) == ("8100", "8101")
    assert not console.environ
    for spec in services:
        service = spec.module.removesuffix("_svc").upper()
        assert spec.environ == {f"KVMESH_{service}_OTLP_ENDPOINT": "http://127.0.0.1:8101"}
        assert not spec.is_observer


def test_a_console_receives_spans_beside_other_collectors_and_never_their_headers() -> None:
    others = {"otlp_endpoint": "http://a:4317", "consoles": 1, "console_otlp_port": 8101}
    router = build_service_specs(UpOptions.model_validate(others))[1]
    expected = {"KVMESH_ROUTER_OTLP_ENDPOINT": "http://a:4317,http://127.0.0.1:8101"}
    assert router.environ == expected
    named = UpOptions.model_validate({**others, "otlp_headers": "http://a:4317 x=1"})
    assert build_service_specs(named)[1].environ == expected
    secret = UpOptions.model_validate({**others, "otlp_headers": "x=1"})
    assert build_service_specs(secret)[1].environ == {}


def test_services_accept_the_flags_that_meshctl_passes() -> None:
    rooms: dict[str, tuple[type[ServiceConfig], str]] = {
        "frontend_svc": (FrontendConfig, "FRONTEND"),
        "router_svc": (RouterConfig, "ROUTER"),
        "indexer_svc": (IndexerConfig, "INDEXER"),
        "worker_svc": (WorkerConfig, "WORKER"),
        "console_svc": (ConsoleConfig, "CONSOLE"),
        "epp_svc": (EppConfig, "EPP"),
    }
    options = OPTIONS.model_copy(update={"consoles": 1, "pickers": 1})
    for spec in build_service_specs(options):
        room, name = rooms[spec.module]
        config, warnings = read_config(room, name, spec.environ, spec.args)
        assert config.notice_s == NOTICE_S
        assert warnings == []


def test_frontends_take_consecutive_ports_and_any_port_each_if_none_is_given() -> None:
    specs = build_service_specs(OPTIONS)
    assert [flag(spec, "--http-port") for spec in specs[:2]] == ["8100", "8101"]
    specs = build_service_specs(OPTIONS.model_copy(update={"http_port": 0}))
    assert [flag(spec, "--http-port") for spec in specs[:2]] == ["0", "0"]


def test_pickers_take_consecutive_ports_which_no_second_process_can_have() -> None:
    def ports(options: UpOptions) -> list[str]:
        specs = [spec for spec in build_service_specs(options) if spec.module == "epp_svc"]
        assert [spec.name for spec in specs] == ["epp-0", "epp-1"]
        assert list(find_port_problems(specs)) == []
        assert {fixed_port(spec, {}) for spec in specs} == (
            {"ext_proc_port"} if options.ext_proc_port else {""}
        )
        return [spec.environ["KVMESH_EPP_EXT_PROC_PORT"] for spec in specs]

    assert ports(UpOptions(pickers=2)) == ["9002", "9003"]
    assert ports(UpOptions(pickers=2, ext_proc_port=0)) == ["0", "0"]


def test_no_two_services_share_a_name_or_a_stable_name() -> None:
    specs = build_service_specs(OPTIONS)
    stable = [flag(spec, "--stable-name") for spec in specs]
    assert len({spec.name for spec in specs}) == len(specs) == 8
    assert len(set(stable)) == len(stable) == 8


def test_a_name_prefix_separates_the_workers_of_two_hosts() -> None:
    worker = build_service_specs(OPTIONS.model_copy(update={"registry": "consul"}))[-1]
    assert flag(worker, "--stable-name") == f"{socket.gethostname()}-worker-2"


def test_services_that_send_work_stop_before_services_that_receive_it() -> None:
    ranks = {spec.module: spec.drain_rank for spec in build_service_specs(OPTIONS)}
    assert ranks["frontend_svc"] < ranks["router_svc"] < ranks["worker_svc"]


def test_the_stop_limit_is_notice_plus_drain_plus_a_margin() -> None:
    spec = build_service_specs(OPTIONS.model_copy(update={"drain_s": 7.0}))[0]
    assert flag(spec, "--drain-s") == "7"
    assert spec.drain_s == pytest.approx(float(flag(spec, "--notice-s")) + 7.0 + STOP_MARGIN_S)
    assert float(flag(spec, "--notice-s")) == NOTICE_S


def test_each_registry_gets_its_own_flags_only() -> None:
    file = build_service_specs(OPTIONS.model_copy(update={"registry_path": Path("/r")}))[0]
    assert flag(file, "--registry-path") == "/r"
    assert "--consul-url" not in file.args
    consul = build_service_specs(
        OPTIONS.model_copy(update={"registry": "consul", "consul_url": "http://c:1"})
    )[0]
    assert flag(consul, "--consul-url") == "http://c:1"
    assert "--registry-path" not in consul.args
