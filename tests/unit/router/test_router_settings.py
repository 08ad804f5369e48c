"""Every setting of Dynamo's router exists or is absent for a reason: compares ADR 0006 with the
code.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from common.request.preprocessed import RouterConfigOverride
from common.runtime.config import ConfigError, ServiceConfig, read_config
from router_svc.config import RouterConfig
from router_svc.core.admission import NO_QUEUE, QueueSettings
from router_svc.core.eligibility import NO_LIMITS, BusyLimits
from router_svc.unused_settings import settings_without_effect

ADR = Path(__file__).parents[3] / "docs" / "adr" / "0006-router-settings.md"
SETTINGS = RouterConfig.model_fields.keys() - ServiceConfig.model_fields.keys()


def rows() -> dict[str, tuple[str, str]]:
    """Dynamo's name -> our name, and the third column."""
    table = re.findall(r"^\| `([^|]+)` \| ([^|]+) \| ([^|]+) \|$", ADR.read_text(), re.MULTILINE)
    return {name: (here.strip(), more.strip()) for name, here, more in table}


def test_the_table_has_every_flag_of_dynamo_once() -> None:
    assert len(rows()) == 50


def test_settings_of_the_table_exist_and_absent_ones_have_a_reason() -> None:
    named = set()
    for flag, (here, more) in rows().items():
        if here == "absent":
            assert more.startswith("the same") or len(more) > 10, f"{flag}: no reason"
            continue
        for name in re.findall(r"`(\w+)`", here):
            assert name in SETTINGS, f"{flag}: there is no {name}"
            named.add(name)
    text = ADR.read_text()
    missing = {name for name in SETTINGS - named - {"metrics_port"} if f"`{name}`" not in text}
    assert not missing, "settings that the ADR does not mention"


@pytest.mark.parametrize(
    "flag", ["--router-event-threads", "--min-initial-workers", "--load-aware"]
)
def test_an_absent_flag_is_rejected_by_name(flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(RouterConfig, "ROUTER", {}, [flag, "1"])
    assert flag in str(caught.value)


@pytest.mark.row("S1-102")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue_threshold", "-1"),
        ("queue_policy", "lifo"),
        ("queue_requests_max", "0"),
        ("queue_requests_max", "8193"),
        ("queue_tokens_max", "0"),
        ("queue_wait_max_s", "0"),
        ("active_decode_blocks_threshold", "1.1"),
        ("active_prefill_tokens_threshold", "-1"),
        ("active_prefill_tokens_threshold_frac", "nan"),
        ("active_request_expiry_s", "10"),
    ],
)
def test_a_value_out_of_range_names_its_field(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(RouterConfig, "ROUTER", {}, ["--" + name.replace("_", "-"), value])
    assert name in str(caught.value).replace("-", "_")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"track_output_blocks": True, "track_active_blocks": False}, "track_output_blocks"),
        ({"queue_threshold": 1.0, "track_prefill_tokens": False}, "queue_threshold"),
    ],
)
def test_a_setting_that_another_one_disables_is_reported(
    settings: dict[str, Any], name: str
) -> None:
    assert list(settings_without_effect(RouterConfig(**settings))) == [name]


def test_queue_and_busy_thresholds_are_off_by_default_and_configurable() -> None:
    policy = RouterConfig().policy
    assert (policy.queue, policy.busy) == (NO_QUEUE, NO_LIMITS)
    policy = RouterConfig(
        queue_threshold=2.0,
        queue_policy="wspt",
        queue_requests_max=10,
        queue_tokens_max=99,
        queue_wait_max_s=3.0,
        active_decode_blocks_threshold=0.9,
        active_prefill_tokens_threshold=5,
        active_prefill_tokens_threshold_frac=1.5,
    ).policy
    assert policy.queue == QueueSettings(
        threshold=2.0, policy="wspt", requests_max=10, tokens_max=99, wait_max_s=3.0
    )
    assert policy.busy == BusyLimits(
        active_decode_blocks=0.9, active_prefill_tokens=5, active_prefill_tokens_frac=1.5
    )


def test_every_setting_that_a_request_may_override_is_in_the_adr() -> None:
    text = ADR.read_text()
    assert all(f"`{spec.name}`" in text for spec in fields(RouterConfigOverride))
