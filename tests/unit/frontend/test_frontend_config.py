"""The checks of the frontend's configuration."""

from __future__ import annotations

from pathlib import Path

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
    assert "--api-keys, or --http-open" in problem
    for flag in ("--http-open", "--insecure"):
        assert read("--http-host=0.0.0.0", *protection, flag).http_host == "0.0.0.0"


def test_a_file_of_keys_opens_the_http_port_if_it_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text("{}")
    assert read("--http-host=0.0.0.0", f"--api-keys={file}").api_keys == file
    file.write_text('{"tenants": {"a": {"keys": 1}}}')
    for path, part in ((file, "tenants.a.keys"), (tmp_path / "none", "No such file")):
        with pytest.raises(ConfigError) as caught:
            read(f"--api-keys={path}", "--http-open")
        (problem,) = caught.value.problems
        assert problem.startswith("--api-keys: ")
        assert part in problem
