"""Which settings of a console are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.runtime.config import ConfigError, read_config
from console_svc.app import ConsoleApp
from console_svc.config import ConsoleConfig


def problems(*flags: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read_config(ConsoleConfig, "CONSOLE", {}, flags)
    return "; ".join(refused.value.problems)


def test_a_console_is_closed_to_other_hosts_by_default() -> None:
    config, _ = read_config(ConsoleConfig, "CONSOLE", {}, [])
    assert config.http_host == config.otlp_host == "127.0.0.1"
    assert "--http-host: '0.0.0.0' is open" in problems("--http-host=0.0.0.0")
    assert "--otlp-key-file" in problems("--otlp-host=0.0.0.0")
    flags = ["--http-host=0.0.0.0", "--http-open", "--otlp-host=0.0.0.0", "--otlp-key=secret"]
    config, _ = read_config(ConsoleConfig, "CONSOLE", {}, flags)
    assert config.http_open


def test_an_unreadable_file_of_keys_is_refused(tmp_path: Path) -> None:
    assert "--api-keys" in problems(f"--api-keys={tmp_path / 'absent.json'}")


def test_a_proxy_with_tls_protects_the_cookie_as_tls_of_the_console_does() -> None:
    assert ConsoleConfig(public_url="https://console.example").uses_https
    assert ConsoleConfig(http_tls_cert_path=Path("cert.pem")).uses_https
    assert not ConsoleConfig(public_url="http://console.example").uses_https


def test_an_installation_without_the_packages_of_the_console_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nicegui", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvmesh\[console\]'"):
        ConsoleApp(ConsoleConfig())
