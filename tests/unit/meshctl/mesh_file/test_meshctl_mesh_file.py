"""Mesh files: what is read, and the place that each problem names."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from common.runtime.config import ServiceConfig, read_config
from frontend_svc.config import FrontendConfig
from indexer_svc.config import IndexerConfig
from meshctl.mesh_file.document import MeshFileError
from meshctl.mesh_file.load import LoadedMesh, read_mesh_file
from meshctl.options import UpOptions
from meshctl.process.rollout import fixed_port
from meshctl.process.settings_check import check_settings
from meshctl.services import ServiceSpec, build_service_specs, find_port_problems
from router_svc.config import RouterConfig
from worker_svc.config import WorkerConfig

EXAMPLE = Path(__file__).parents[4] / "deploy" / "mesh.yaml"


def load(tmp_path: Path, text: str) -> LoadedMesh:
    path = tmp_path / "mesh.yaml"
    path.write_text(text)
    return read_mesh_file(path)


def specs_of(loaded: LoadedMesh, **options: object) -> dict[str, ServiceSpec]:
    mesh = UpOptions.model_validate(
        {
            "frontends": loaded.mesh.frontends.count,
            "routers": loaded.mesh.routers.count,
            "indexers": loaded.mesh.indexers.count,
            **options,
        }
    )
    return {spec.name: spec for spec in build_service_specs(mesh, loaded.mesh)}


def problems(tmp_path: Path, text: str) -> list[str]:
    """The problems, without the folder of the file."""
    try:
        loaded = load(tmp_path, text)
        check_settings(list(specs_of(loaded).values()), {}, loaded)
    except MeshFileError as error:
        return [problem.removeprefix(f"{tmp_path}/") for problem in error.problems]
    return []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("workers: [\n", "mesh.yaml:2:1: "),
        ("routers: {count: 2}\nrouters: {count: 1}\n", "mesh.yaml:2:1: routers: given twice"),
        ("router:\n  count: 2\n", "mesh.yaml:1:1: router: no such key; did you mean routers?"),
        ("- a\n", "mesh.yaml:1:1: must have keys"),
        (
            "workers:\n  - count: 2\n    egnine: sim\n",
            "mesh.yaml:3:5: workers[0].egnine: no such key; did you mean engine?",
        ),
        ("routers:\n  count: two\n", "mesh.yaml:2:3: routers.count: input should be a valid int"),
        ("routers:\n  count: 0\n", "mesh.yaml:2:3: routers.count: input should be greater"),
        ("namespace: ../x\n", "mesh.yaml:1:1: namespace: "),
        (
            "settings:\n  log_levle: debug\n",
            "mesh.yaml:2:3: settings.log_levle: no such setting; did you mean log_level?",
        ),
        ("settings:\n  log_level: loud\n", "mesh.yaml:2:3: settings.log_level: 'loud'"),
        (
            "routers:\n  settings:\n    stable_name: a\n",
            "mesh.yaml:3:5: routers.settings.stable_name: is set by meshctl",
        ),
        (
            "workers:\n  - settings: {engine: sim}\n",
            "mesh.yaml:2:16: workers[0].settings.engine: set it with the key workers[].engine",
        ),
        (
            "routers:\n  count: 2\n  settings: {port: 7000}\n",
            "mesh.yaml:3:14: routers.settings.port: several processes on one host cannot have one",
        ),
        (
            "frontends:\n  settings: {Request-Timeout-S: 5}\n",
            "mesh.yaml:2:14: frontends.settings.Request-Timeout-S: no such setting; names have",
        ),
        (
            "consoles:\n  settings: {http_port: 1}\n",
            "mesh.yaml:2:14: consoles.settings.http_port: set it with the key consoles.http_port",
        ),
        ("consoles: {count: 2}\n", "mesh.yaml:1:12: consoles.count: input should be less than or"),
        (
            "routers:\n  environment: {KVMESH_LOG_LEVEL: debug}\n",
            "mesh.yaml:2:17: routers.environment.KVMESH_LOG_LEVEL: is a setting",
        ),
        (
            "workers:\n  - {model: a}\n  - {model: b}\n",
            "mesh.yaml:3:5: workers[1].name: 'worker' is the name of another group",
        ),
        (
            "workers:\n  - count: 1\n    each: [{}, {}]\n",
            "mesh.yaml:3:5: workers[0].each: has 2 entries for 1 workers",
        ),
        ("workers:\n  - role: prefill\n", "mesh.yaml:2:5: workers[0].role: needs workers of the"),
        ("indexers: {count: 0}\nrequire: [indexer]\n", "mesh.yaml:2:11: require[0]: the file has"),
        (
            "workers: [{model: qwen}]\nadapters: [{name: a, model: qwem}]\n",
            "mesh.yaml:2:22: adapters[0].model: no workers have the model 'qwem'; did you",
        ),
        (
            "workers: [{engine: echo}]\nadapters: [{name: a, model: sim}]\n",
            "mesh.yaml:2:12: adapters[0]: the echo engine has no adapters",
        ),
        (
            "adapters: [{name: a, model: sim, copies: 2, copies_max: 1}]\n",
            "mesh.yaml:1:45: adapters[0].copies_max: copies_max must be at least 2",
        ),
        (
            "adapters: [{name: a, model: sim, copies_max: 1}]\n",
            "mesh.yaml:1:34: adapters[0].copies_max: needs copies",
        ),
        (
            "adapters:\n  - {name: a b, model: sim, copies: 1}\n",
            "mesh.yaml:2:6: adapters[0].name: 'a b' is no name",
        ),
        (
            "adapters:\n  - &a {name: a, model: sim, copies: 1}\n  - *a\n",
            "mesh.yaml:2:9: adapters[1].name: another adapter has the name 'a'",
        ),
        (
            "workers: [{engine: sglang}]\n"
            "adapters: [{name: a, model: sim, uri: 'file:///a', copies: 1}]\n",
            "mesh.yaml:2:52: adapters[0].copies: SGLang loads adapters later only with max_lora_ra",
        ),
    ],
)
def test_a_problem_names_its_line_column_and_key(tmp_path: Path, text: str, expected: str) -> None:
    (problem, *_) = problems(tmp_path, text)
    assert problem.startswith(expected)


def test_a_console_has_its_ports_and_settings_from_the_file(tmp_path: Path) -> None:
    keys = "count: 1, http_port: 0, otlp_port: 8100, settings: {interval_s: 5}"
    loaded = load(tmp_path, f"consoles: {{{keys}}}\n")
    flags = loaded.option_flags([])
    assert {"--consoles=1", "--console-port=0", "--console-otlp-port=8100"} <= set(flags)
    console = specs_of(loaded, consoles=1)["console-0"]
    assert console.environ == {"KVMESH_CONSOLE_INTERVAL_S": "5"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "routers:\n  settings:\n    queue_treshold: 2\n",
            "mesh.yaml:3:5: routers.settings.queue_treshold: no such setting; did you mean"
            " queue_threshold?",
        ),
        (
            "workers:\n  - count: 2\n    each:\n      - {}\n      - settings: {speedup: fast}\n",
            "mesh.yaml:5:20: workers[0].each[1].settings.speedup: 'fast': ",
        ),
        (
            "workers:\n  - engine: lmm\n",
            "mesh.yaml:2:5: workers[0].engine: 'lmm': ",
        ),
        (
            "workers:\n  - engine_args: {tp_size: 2}\n",
            "mesh.yaml:2:5: workers[0].engine_args: the sim engine takes none",
        ),
        (
            "frontends:\n  settings: {request_timeout_s: 0}\n",
            "mesh.yaml:2:14: frontends.settings.request_timeout_s: '0': ",
        ),
    ],
)
def test_the_parsers_of_the_services_check_the_settings(
    tmp_path: Path, text: str, expected: str
) -> None:
    (problem,) = problems(tmp_path, text)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("text", "flags", "key"),
    [
        (
            "frontends: {settings: {metrics_port: 9100}}",
            {"frontends": 2},
            "frontends.settings.metrics_port",
        ),
        ("routers: {count: 2, settings: {port: 9100}}", {"routers": 1}, ""),
        ("settings: {health_port: 9100}", {}, "settings.health_port"),
        ("workers: [{count: 2, settings: {port: 9}, each: [{settings: {port: 8}}]}]", {}, ""),
    ],
)
def test_ports_are_checked_for_the_processes_that_start(
    tmp_path: Path, text: str, flags: dict[str, int], key: str
) -> None:
    specs = list(specs_of(load(tmp_path, text), **flags).values())
    found = [".".join(map(str, origin)) for origin, _ in find_port_problems(specs)]
    assert found == ([key] if key else [])


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, "routers: {count: 0}\nindexer: {}\nworkers: [{rol: x}]\n")
    assert len(found) == 3


def test_settings_of_a_worker_replace_those_of_its_group_and_of_the_mesh(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "settings: {log_level: warning}\n"
        "environment: {OMP_NUM_THREADS: 1}\n"
        "workers:\n"
        "  - count: 2\n"
        "    settings: {log_level: info, taints: [a, b], kv_events: off}\n"
        "    environment: {CUDA_VISIBLE_DEVICES: 0}\n"
        "    each:\n"
        "      - {}\n"
        "      - environment: {CUDA_VISIBLE_DEVICES: 1}\n"
        "        settings: {log_level: debug}\n",
    )
    found = [specs_of(loaded)[name].environ for name in ("worker-0", "worker-1")]
    assert [env["KVMESH_WORKER_LOG_LEVEL"] for env in found] == ["info", "debug"]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in found] == ["0", "1"]
    configs = [
        read_config(WorkerConfig, "WORKER", {k: v for k, v in env.items() if "KVMESH" in k}, [])[0]
        for env in found
    ]
    assert [config.log_level for config in configs] == ["info", "debug"]
    assert configs[0].taints == ("a", "b")
    assert not configs[0].kv_events
    router = specs_of(loaded)["router-0"].environ
    assert router == {"KVMESH_ROUTER_LOG_LEVEL": "warning", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("inherited", ["KVMESH_ROUTER_", "KVMESH_"])
def test_a_setting_of_the_file_has_precedence_over_all_its_variables(
    tmp_path: Path, inherited: str
) -> None:
    token = tmp_path / "token"
    token.write_text("of-the-file")
    loaded = load(
        tmp_path,
        f"settings: {{log_level: info, mesh_token_file: {token}, metrics_key: k}}\n"
        "routers: {settings: {admin_token: a, stream_port: 0}}\n",
    )
    names = ("LOG_LEVEL", "MESH_TOKEN", "METRICS_KEY", "ADMIN_TOKEN_FILE", "STREAM_PORT")
    values = ("error", "of-the-environment", "m", "/none", "9000")
    environ = {inherited + name: value for name, value in zip(names, values, strict=True)}
    spec = specs_of(loaded)["router-0"]
    config, _ = read_config(RouterConfig, "ROUTER", spec.with_environ(environ), [])
    found = (config.log_level, config.mesh_token, config.metrics_key, config.admin_token)
    assert found == ("info", "of-the-file", "k", "a")
    assert fixed_port(spec, environ) == ""


def test_a_setting_of_a_section_replaces_the_file_of_the_same_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    loaded = load(
        tmp_path,
        f"settings: {{admin_token: a, operator_token_file: {tmp_path}/secret}}\n"
        "routers: {settings: {admin_token_file: /other, operator_token: b}}\n",
    )
    assert specs_of(loaded)["router-0"].environ == {
        "KVMESH_ROUTER_ADMIN_TOKEN_FILE": "/other",
        "KVMESH_ROUTER_OPERATOR_TOKEN": "b",
    }


def test_groups_have_names_roles_models_and_engines(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "workers:\n"
        "  - {name: big, model: a, engine: sim, count: 2}\n"
        "  - {role: prefill, model: b}\n"
        "  - {role: decode, model: b, model_path: /m}\n",
    )
    workers = {n: s for n, s in specs_of(loaded).items() if s.module == "worker_svc"}
    assert list(workers) == ["big-0", "big-1", "prefill-0", "decode-0"]
    assert workers["big-0"].role == "aggregated worker of a"
    assert workers["prefill-0"].role == "prefill worker of b"
    assert workers["decode-0"].args[-2:] == ("--model-path", "/m")


def test_flags_replace_what_the_file_says_of_them(tmp_path: Path) -> None:
    loaded = load(tmp_path, "workers: [{count: 2, model: a}]\n")
    specs = specs_of(loaded, workers=3, model_name="b")
    assert [s.model for s in specs.values() if s.model] == ["b"] * 3
    with pytest.raises(MeshFileError, match="--prefill: the mesh file has 0 groups"):
        specs_of(loaded, prefill=2)


def test_one_of_the_counts_of_a_pair_can_be_replaced(tmp_path: Path) -> None:
    loaded = load(tmp_path, "workers: [{role: prefill}, {role: decode}]\n")
    options, _ = read_config(UpOptions, None, {}, ["--file=mesh.yaml", "--prefill=2"])
    workers = [s.name for s in build_service_specs(options, loaded.mesh) if s.model]
    assert workers == ["prefill-0", "prefill-1", "decode-0"]
    with pytest.raises(MeshFileError, match="--workers: a mesh needs a worker, or"):
        build_service_specs(options, load(tmp_path, "routers: {count: 1}\n").mesh)


def test_a_value_of_the_file_becomes_a_flag_unless_the_line_has_it(tmp_path: Path) -> None:
    loaded = load(tmp_path, "namespace: a\nrouters: {count: 2}\nlog_dir: /l\ndrain_s: 3\n")
    flags = loaded.option_flags(["--drain-s", "5"])
    assert flags == ["--namespace=a", "--log-dir=/l", "--routers=2"]


def test_adapters_are_loaded_when_a_worker_starts(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "workers:\n"
        "  - {name: a, model: a}\n"
        "  - {name: b, model: b, engine: sglang, engine_args: {tp_size: 1}}\n"
        "adapters:\n"
        "  - {name: x, model: a}\n"
        "  - {name: y, model: b, uri: file:///loras/y}\n",
    )
    specs = specs_of(loaded)
    assert specs["a-0"].environ["KVMESH_WORKER_LORAS"] == "x"
    expected = '{"tp_size": 1, "enable_lora": true, "lora_paths": {"y": "/loras/y"}}'
    assert specs["b-0"].environ["KVMESH_WORKER_ENGINE_ARGS"] == expected


def test_adapters_with_copies_are_loaded_later(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        "workers:\n"
        "  - {name: a, model: a}\n"
        "  - name: b\n"
        "    model: b\n"
        "    engine: sglang\n"
        "    engine_args: {max_lora_rank: 8, lora_target_modules: [all]}\n"
        "adapters:\n"
        "  - {name: x, model: a, copies: 1}\n"
        "  - {name: y, model: b, uri: file:///loras/y, copies: 1}\n",
    )
    specs = specs_of(loaded)
    assert "KVMESH_WORKER_LORAS" not in specs["a-0"].environ
    arguments = json.loads(specs["b-0"].environ["KVMESH_WORKER_ENGINE_ARGS"])
    assert arguments == {
        "max_lora_rank": 8,
        "lora_target_modules": ["all"],
        "enable_lora": True,
    }


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"engine": "sglang"}, "SGLang needs the location as file:///FOLDER"),
        ({"engine": "echo"}, "the echo engine has no adapters"),
        ({"model_name": "b"}, "no workers have the model 'sim'"),
        ({"engine": "sglang"}, "engine_args of worker must be a JSON object"),
    ],
)
def test_flags_that_do_not_fit_the_adapters_of_the_file_are_refused(
    tmp_path: Path, flags: dict[str, str], expected: str
) -> None:
    loaded = load(
        tmp_path,
        "workers: [{engine: 'a.b:c', engine_args: text}]\nadapters: [{name: x, model: sim}]\n",
    )
    with pytest.raises(MeshFileError, match=re.escape(f"with the flags, {expected}")):
        specs_of(loaded, **flags)


def test_the_example_has_settings_that_the_services_accept() -> None:
    loaded = read_mesh_file(EXAMPLE)
    configs: dict[str, tuple[type[ServiceConfig], str]] = {
        "frontend_svc": (FrontendConfig, "FRONTEND"),
        "router_svc": (RouterConfig, "ROUTER"),
        "indexer_svc": (IndexerConfig, "INDEXER"),
        "worker_svc": (WorkerConfig, "WORKER"),
    }
    specs = specs_of(loaded)
    assert len(specs) == 8
    for spec in specs.values():
        config, name = configs[spec.module]
        variables = {k: v for k, v in spec.environ.items() if k.startswith("KVMESH_")}
        read_config(config, name, variables, spec.args)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeshFileError, match="cannot be read: No such file"):
        read_mesh_file(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(MeshFileError, match="is not UTF-8"):
        read_mesh_file(tmp_path / "binary.yaml")


def test_a_pipe_is_refused_because_it_can_be_read_only_once() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"routers: {count: 2}\n")
    os.close(writer)
    try:
        with pytest.raises(MeshFileError, match="is not a regular file"):
            read_mesh_file(Path(f"/dev/fd/{reader}"))
    finally:
        os.close(reader)
