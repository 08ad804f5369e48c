"""Settings of the router: the selector, the cost, and rejected values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest

from common.registry.registry import MemoryRegistry, MemoryStore
from common.runtime.config import ConfigError, read_config
from router_svc.app import RouterApp
from router_svc.config import RouterConfig, load_selector
from router_svc.core.cost import DEFAULT_COST_SETTINGS
from router_svc.core.selectors import SELECTORS, LeastLoadedSelector


@pytest.fixture
def plugin() -> Iterator[ModuleType]:
    module = ModuleType("test_router_plugin")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def read(*flags: str) -> RouterConfig:
    return read_config(RouterConfig, "ROUTER", {}, flags)[0]


def test_the_default_selector_is_built_in() -> None:
    assert read().selector in SELECTORS


@pytest.mark.parametrize("name", sorted(SELECTORS))
def test_every_built_in_selector_can_be_configured(name: str) -> None:
    assert load_selector(read("--selector", name).selector).name == name


@pytest.mark.row("S1-40")
def test_a_custom_selector_is_configured_by_its_import_path(plugin: ModuleType) -> None:
    class CustomSelector(LeastLoadedSelector):
        name = "custom"

    plugin.make = CustomSelector  # type: ignore[attr-defined]  # The module is defined in the test.
    config = read("--selector", "test_router_plugin:make")
    assert isinstance(load_selector(config.selector), CustomSelector)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fastest", "one of"),
        ("fastest:", "one of"),
        ("no_such_module_here:make", "ModuleNotFoundError"),
        ("test_router_plugin:absent", "AttributeError"),
        ("test_router_plugin:number", "not callable"),
    ],
)
def test_a_selector_that_cannot_be_imported_stops_the_start(
    plugin: ModuleType, name: str, message: str
) -> None:
    plugin.__dict__.update(number=1)
    with pytest.raises(ConfigError) as refused:
        read("--selector", name)
    assert len(refused.value.problems) == 1
    assert message in refused.value.problems[0]
    assert "--selector" in refused.value.problems[0]


@pytest.mark.parametrize(
    ("name", "message"), [("broken", "ZeroDivisionError"), ("nothing", "no WorkerSelector")]
)
async def test_a_factory_that_returns_no_selector_stops_the_start(
    plugin: ModuleType, name: str, message: str
) -> None:
    plugin.__dict__.update(broken=lambda: 1 // 0, nothing=lambda: None)
    config = read("--selector", f"test_router_plugin:{name}")
    with pytest.raises(ConfigError) as refused:
        RouterApp(config, registry=MemoryRegistry(MemoryStore()))
    (problem,) = refused.value.problems
    assert f"--selector: 'test_router_plugin:{name}'" in problem
    assert message in problem


async def test_a_selector_factory_runs_once_per_process(plugin: ModuleType) -> None:
    built = []

    def make() -> LeastLoadedSelector:
        built.append(LeastLoadedSelector())
        return built[-1]

    plugin.make = make  # type: ignore[attr-defined]  # The module is defined in the test.
    config = read("--selector", "test_router_plugin:make")
    app = RouterApp(config, registry=MemoryRegistry(MemoryStore()))
    await app.close()
    assert [app.router.selector] == built


@pytest.mark.row("S1-14")
def test_cost_settings_have_the_defaults_of_the_cost_and_are_passed_to_it() -> None:
    assert read().cost_settings == DEFAULT_COST_SETTINGS
    config = read("--overlap-score-credit", "0.5", "--assume-kv-reuse", "--router-temperature=2")
    assert config.cost_settings == replace(
        DEFAULT_COST_SETTINGS,
        overlap_score_credit=0.5,
        assume_kv_reuse=True,
        router_temperature=2.0,
    )


@pytest.mark.row("S1-102")
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--overlap-score-credit", "-1"),
        ("--overlap-score-credit-decay", "nan"),
        ("--prefill-load-scale", "-0.1"),
        ("--router-temperature", "-1"),
        ("--host-cache-hit-weight", "1.5"),
        ("--disk-cache-hit-weight", "-0.5"),
        ("--recent-miss-weight", "-2"),
        ("--recent-miss-half-life-s", "0"),
        ("--decode-active-request-weight", "inf"),
    ],
)
def test_a_value_out_of_range_stops_the_start_and_is_named(flag: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(f"{flag}={value}")
    (problem,) = refused.value.problems
    assert problem.startswith(flag)


def test_the_mesh_key_is_not_in_the_repr() -> None:
    assert "hush" not in repr(read("--mesh-key", "hush"))
