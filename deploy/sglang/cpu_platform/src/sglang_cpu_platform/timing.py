"""Timing of forward passes: on a CPU they are synchronous, so wall clock is exact."""

from __future__ import annotations

import time

from sglang.srt.utils.device_timer import _TimingInterval  # noqa: TID251


class _Instant:
    """What SGLang expects of a device event, already over."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def elapsed_time(self, other: _Instant) -> float:
        return (other.at - self.at) * 1000.0


class CpuInterval(_TimingInterval):
    """An interval between two instants."""

    @staticmethod
    def create(track_stream: bool = False) -> CpuInterval:
        """Begins one."""
        return CpuInterval(start_event=_Instant())

    def end(self, metadata: object) -> None:
        """Ends it."""
        self.end_event = _Instant()
        self.metadata = metadata
