"""Which variables the services of a mesh receive."""

from __future__ import annotations

import pytest

from meshctl.process.environment import service_environment

WORKER = "worker_svc"
SERVICES = ["frontend_svc", "router_svc", "indexer_svc", WORKER]
SECRETS = [
    *("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN"),
    *("DATABASE_URL", "SSH_AUTH_SOCK", "kvmesh_x", "MY_PATH", "PATHS", "XPYTHON"),
]


@pytest.mark.parametrize("module", SERVICES)
def test_a_service_receives_settings_and_what_its_libraries_read(module: str) -> None:
    names = ["KVMESH_ROUTER_PORT", "PATH", "HOME", "LC_ALL", "PYTHONPATH", "no_proxy"]
    names += ["OTEL_TRACES_SAMPLER", "CONSUL_HTTP_TOKEN", "GRPC_VERBOSITY", "TMPDIR"]
    environ = dict.fromkeys([*names, *SECRETS], "x")
    assert service_environment(environ, module) == dict.fromkeys(names, "x")


def test_only_workers_receive_the_variables_of_engines() -> None:
    environ = dict.fromkeys(["CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "SGLANG_X", "HF_TOKEN"], "x")
    assert service_environment(environ, WORKER) == environ
    assert all(service_environment(environ, module) == {} for module in SERVICES[:-1])


@pytest.mark.parametrize("module", SERVICES)
def test_more_names_and_patterns_are_passed(module: str) -> None:
    environ = {"MY_ENGINE_KEY": "a", "MY_ENGINE": "b", "EXACT": "c", "EXACTLY": "d"}
    found = service_environment(environ, module, ["MY_ENGINE_*", "EXACT"])
    assert found == {"MY_ENGINE_KEY": "a", "EXACT": "c"}
