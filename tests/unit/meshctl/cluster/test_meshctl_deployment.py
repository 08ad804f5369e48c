"""From a mesh file to the members of a cluster, and to their command lines."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from common.errors import InvalidRequest
from common.runtime.config import ServiceConfig, read_config
from meshctl.cluster.deployment import (
    Deployment,
    decode_deployment,
    desired_member,
    encode_deployment,
    new_deployment,
    spec_on_node,
)
from meshctl.cluster.recommended import Recommendation, follow
from meshctl.cluster.state import CPU, GPU, Desired, Needs
from meshctl.mesh_file.document import MeshFileError
from meshctl.options import UpOptions
from meshctl.services import ServiceSpec, check_counts
from router_svc.config import RouterConfig
from tests.kit.cluster import deployment, mesh
from worker_svc.config import WorkerConfig

TEXT = """
namespace: prod
registry: consul
routers: {count: 2}
workers:
  - name: big
    count: 2
    model: m
    resources: {cpus: 4, gpus: 2, custom: {nvme: 1}, labels: {zone: a}, per_node: 1}
  - {name: fill, model: m, role: prefill, transfer_per_node: true}
  - {name: tokens, model: m, role: decode, transfer_per_node: true}
"""


def desired_of(found: Deployment) -> dict[str, Desired]:
    return {name: desired_member(spec, found) for name, spec in found.specs().items()}


def flags(spec: ServiceSpec) -> dict[str, str]:
    return dict(pairwise(spec.args))


def test_each_member_of_the_file_is_desired_with_its_resources() -> None:
    found = desired_of(deployment(TEXT))
    assert list(found) == [
        *("frontend-0", "router-0", "router-1", "indexer-0"),
        *("big-0", "big-1", "fill-0", "tokens-0"),
    ]
    big = found["big-1"]
    assert (big.group, big.role) == ("big", "aggregated worker of m")
    assert big.needs == Needs({CPU: 4.0, GPU: 2.0, "nvme": 1.0}, {"zone": "a"}, 1)
    assert found["router-0"].needs == Needs({CPU: 1.0})
    assert found["fill-0"].needs.pairs_by == found["tokens-0"].needs.pairs_by == "m"
    assert found["frontend-0"].is_surge
    assert found["frontend-0"].has_fixed_port
    ranks = {one.group: one.rank for one in found.values()}
    assert ranks["frontend"] < ranks["router"] < ranks["big"] < ranks["indexer"]


def test_a_service_binds_and_advertises_the_address_of_its_node() -> None:
    specs = deployment(TEXT).specs()
    router = spec_on_node(specs["router-0"], "10.0.0.7", {})
    config, _ = read_config(RouterConfig, "ROUTER", {"KVMESH_MESH_TOKEN": "t"}, router.args)
    assert (config.host, config.advertise_host) == ("10.0.0.7", "10.0.0.7")
    assert (config.registry, config.namespace) == ("consul", "prod")
    # A name stands for a member, wherever it runs.
    assert config.stable_name == "router-0"
    frontend = flags(spec_on_node(specs["frontend-0"], "10.0.0.7", {}))
    assert frontend["--http-host"] == "10.0.0.7"


def test_hosts_of_settings_have_precedence_over_the_address_of_the_node() -> None:
    text = f"{TEXT}settings: {{host: 0.0.0.0}}\nfrontends: {{http_host: 127.0.0.1}}\n"
    specs = deployment(text).specs()
    router = flags(spec_on_node(specs["router-0"], "10.0.0.7", {}))
    assert "--host" not in router
    assert router["--advertise-host"] == "10.0.0.7"
    assert "--http-host" not in flags(spec_on_node(specs["frontend-0"], "10.0.0.7", {}))
    named = {"KVMESH_WORKER_ADVERTISE_HOST": "worker.example"}
    assert "--advertise-host" not in flags(spec_on_node(specs["big-0"], "10.0.0.7", named))


def test_workers_that_transfer_inside_of_a_node_have_its_transfer_group() -> None:
    specs = deployment(TEXT).specs()
    groups = {
        (name, address): read_config(
            WorkerConfig,
            "WORKER",
            {"KVMESH_INSECURE": "on"},
            spec_on_node(specs[name], address, {}).args,
        )[0].transfer_group
        for name in ("fill-0", "tokens-0", "big-0")
        for address in ("10.0.0.1", "10.0.0.2")
    }
    assert groups["fill-0", "10.0.0.1"] == groups["tokens-0", "10.0.0.1"] != ""
    assert groups["fill-0", "10.0.0.1"] != groups["fill-0", "10.0.0.2"]
    assert groups["big-0", "10.0.0.1"] == ""


def test_what_the_controller_stores_describes_the_same_mesh() -> None:
    found = deployment(TEXT, drain_s=7.0).scaled({"big": 5})
    again = decode_deployment(encode_deployment(found))
    assert again.specs() == found.specs()
    assert desired_of(again) == desired_of(found)
    assert again.group_counts()["big"] == 5


def test_secrets_are_stored_as_the_operator_gave_them(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a secret of the mesh")
    environ = {"KVMESH_MESH_TOKEN_FILE": str(file), "KVMESH_ROUTER_DRAIN_S": "9"}
    base, _ = read_config(ServiceConfig, None, {"KVMESH_MESH_TOKEN_FILE": str(file)}, [])
    options = UpOptions.model_validate({"mesh_token": base.mesh_token, "on": "ray"})
    found = new_deployment(options, mesh(TEXT), environ, environ)
    raw = encode_deployment(found)
    assert b"a secret" not in raw
    assert decode_deployment(raw).read_options().mesh_token == "a secret of the mesh"


def test_a_member_is_replaced_when_its_settings_change_and_when_it_is_asked_for() -> None:
    before = desired_of(deployment(TEXT))
    changed = desired_of(deployment(f"{TEXT}indexers: {{settings: {{budget_mb: 64}}}}\n"))
    differing = {name for name in before if before[name].digest != changed[name].digest}
    assert differing == {"indexer-0"}
    asked = desired_of(replace(deployment(TEXT), restarts={"router-1": 1}))
    assert {n for n in before if before[n].digest != asked[n].digest} == {"router-1"}
    # The name of the command's file is no setting of a service.
    other = desired_of(deployment(TEXT, file=Path("other.yaml"), log_dir=Path("elsewhere")))
    assert other == before


def test_a_new_file_sets_the_counts_again_except_of_groups_that_follow_the_routers() -> None:
    text = "workers: [{name: a, count: 2, scaling: recommended}, {name: b, count: 2, model: m2}]"
    old = replace(deployment(text).scaled({"a": 6, "b": 6}), restarts={"a-0": 1})
    new = old.successor(deployment(text.replace("b, count: 2", "b, count: 3")))
    assert new.group_counts()["a"] == 6
    assert new.group_counts()["b"] == 3
    assert new.restarts == {"a-0": 1}


def test_a_drained_member_is_not_desired_until_its_group_is_scaled() -> None:
    drained = replace(deployment(TEXT), drained=["big-1", "router-1"])
    assert "big-1" not in drained.specs()
    scaled = drained.scaled({"big": 3})
    assert {"big-1", "big-2"} <= scaled.specs().keys()
    assert "router-1" not in scaled.specs()


def test_a_mesh_that_stops_has_no_desired_member() -> None:
    assert replace(deployment(TEXT), is_stopping=True).specs() == {}


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ({"bigg": 1}, "no such group; did you mean big?"),
        ({"router": 0}, "router=0: must be between 1 and 10000"),
        ({"big": 10_001}, "big=10001: must be between 0 and 10000"),
        ({}, "name a group and its number"),
    ],
)
def test_numbers_that_a_mesh_cannot_have_are_refused(counts: dict[str, int], problem: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        check_counts(deployment(TEXT).group_counts(), counts)
    assert problem in error.value.message


def test_two_groups_of_one_pool_cannot_follow_the_routers() -> None:
    with pytest.raises(MeshFileError) as error:
        mesh("workers: [{name: a, scaling: recommended}, {name: b}]")
    assert "mesh.yaml:1:" in str(error.value)
    assert "workers[0].scaling: routers recommend a number for a model and role" in str(error.value)


class TestRecommendedNumbers:
    GROUPS = mesh(
        "workers: [{name: a, scaling: recommended}, {name: b, model: m, role: prefill},"
        " {name: c, model: m, role: decode, scaling: recommended}]"
    ).workers
    PRESENT = {"a": 2, "b": 1, "c": 3}  # noqa: RUF012

    def test_the_greatest_recommendation_of_the_routers_counts(self) -> None:
        found = [Recommendation("sim", "aggregated", workers) for workers in (3, 5, 4)]
        assert follow(self.GROUPS, found, self.PRESENT) == {"a": 5}

    def test_groups_that_do_not_follow_and_pools_without_data_keep_their_number(self) -> None:
        found = [Recommendation("m", "prefill", 9)]
        assert follow(self.GROUPS, found, self.PRESENT) == {}
        assert follow(self.GROUPS, [], self.PRESENT) == {}

    def test_an_unchanged_number_is_no_change_and_zero_is_a_number(self) -> None:
        found = [Recommendation("m", "decode", 3), Recommendation("sim", "aggregated", 0)]
        assert follow(self.GROUPS, found, self.PRESENT) == {"a": 0}


def test_a_deployment_is_json() -> None:
    assert json.loads(encode_deployment(deployment(TEXT)))["mesh"]["namespace"] == "prod"
