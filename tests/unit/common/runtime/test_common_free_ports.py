"""Consecutive free ports outside the automatic range of the system."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from common.runtime import free_ports as module
from common.runtime.free_ports import PORT_LIMIT, PORT_MIN, RANGE_SIZE_MIN, free_ports


@pytest.mark.parametrize("count", [1, 2, 16])
def test_ports_are_free_consecutive_and_below_the_automatic_range(count: int) -> None:
    base = free_ports(count)
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert base >= PORT_MIN
    assert base + count <= (low if PORT_MIN + RANGE_SIZE_MIN <= low < PORT_LIMIT else PORT_LIMIT)
    held = [socket.socket() for _ in range(count)]
    try:
        for offset, one in enumerate(held):
            one.bind(("127.0.0.1", base + offset))
    finally:
        for one in held:
            one.close()


def test_a_port_in_use_is_skipped() -> None:
    base = free_ports(2, start=0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", base + 1))
        other = free_ports(2, start=base - PORT_MIN)
        assert base + 1 not in (other, other + 1)


def test_an_automatic_range_of_all_ports_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    range_file = tmp_path / "range"
    range_file.write_text("1024 65535")
    monkeypatch.setattr(module, "_EPHEMERAL_RANGE_FILE", range_file)
    assert free_ports(2, start=1000) >= PORT_MIN + 1000


def test_different_offsets_return_different_ports() -> None:
    assert free_ports(4, start=0) != free_ports(4, start=400)


def test_a_count_out_of_range_is_refused() -> None:
    for count in (0, 10_000):
        with pytest.raises(ValueError, match="count"):
            free_ports(count)
