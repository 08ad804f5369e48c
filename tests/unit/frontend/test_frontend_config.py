"""The checks of the frontend's configuration."""

from __future__ import annotations

import pytest

from common.runtime.config import ConfigError, read_config
from frontend_svc.config import FrontendConfig


def read(*flags: str) -> FrontendConfig:
    config, _ = read_config(FrontendConfig, "FRONTEND", {}, flags)
    return config


@pytest.mark.parametrize("protection", [[], ["--mesh-token=t"]], ids=["none", "a mesh token"])
def test_an_http_port_open_to_other_hosts_needs_a_flag_of_its_own(protection: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read("--http-host=0.0.0.0", *protection)
    (problem,) = caught.value.problems
    assert problem.startswith("--http-host: '0.0.0.0' is open to other hosts")
    assert problem.endswith("or set --http-open")
    for flag in ("--http-open", "--insecure"):
        assert read("--http-host=0.0.0.0", *protection, flag).http_host == "0.0.0.0"
