"""The settings of an endpoint picker."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from common.runtime.config import ConfigError, read_config
from epp_svc.config import EppConfig

CLOSED = ("--host=10.0.0.1", "--mesh-token=0123456789abcdef0123456789abcdef")


def config_of(*flags: str) -> EppConfig:
    return read_config(EppConfig, "EPP", {}, flags)[0]


def test_an_open_port_for_gateways_needs_tls_or_an_explicit_permission() -> None:
    for flags in ((), CLOSED):
        with pytest.raises(ConfigError, match=r"'0\.0\.0\.0' is open to other hosts"):
            config_of("--ext-proc-host=0.0.0.0", *flags)
    for flag in ("--ext-proc-open", "--insecure"):
        assert config_of("--ext-proc-host=0.0.0.0", flag).ext_proc_port == 9002
    tls = ("--ext-proc-tls-cert-path=/c", "--ext-proc-tls-key-path=/k")
    assert config_of("--ext-proc-host=0.0.0.0", *tls).ext_proc_tls_ca_path is None


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--objectives=a=1,b"], "--objectives: 'b' is not NAME=PRIORITY"),
        (["--ext-proc-tls-cert-path=/c"], "set both --ext-proc-tls-cert-path"),
        (["--ext-proc-tls-ca-path=/c"], "set both --ext-proc-tls-cert-path"),
        (["--fallbacks=17"], "--fallbacks: '17'"),
    ],
)
def test_invalid_settings_are_refused_by_name(flags: Sequence[str], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        config_of(*flags)


def test_objectives_have_priorities() -> None:
    assert config_of("--objectives=high=5,batch=-1").priorities == {"high": 5, "batch": -1}
