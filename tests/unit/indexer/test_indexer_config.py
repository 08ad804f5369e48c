"""Configuration of the indexer."""

from __future__ import annotations

import pytest

from common.runtime.config import ConfigError, read_config
from indexer_svc.config import IndexerConfig


def test_defaults_limit_memory_and_bind_loopback() -> None:
    config, warnings = read_config(IndexerConfig, "INDEXER", {}, [])
    assert (config.host, config.budget_mb, config.subscriber_mb) == ("127.0.0.1", 4096, 64)
    assert warnings == []


def test_all_bad_values_are_reported_at_once() -> None:
    environ = {"KVMESH_INDEXER_BUDGET_MB": "-1", "KVMESH_INDEXER_SUBSCRIBER_MB": "0"}
    with pytest.raises(ConfigError) as error:
        read_config(IndexerConfig, "INDEXER", environ, ["--metrics-port", "70000"])
    assert len(error.value.problems) == 3
