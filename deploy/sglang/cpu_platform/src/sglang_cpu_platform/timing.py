"""Timing of forward passes: on a CPU they are synchronous, so the wall clock is exact."""

from __future__ import annotations

import time

from sglang.srt.utils.device_timer import _TimingInterval  # noqa: TID251


class _Instant:
    """A device event as SGLang uses it, already completed."""

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
        """Starts an interval."""
        return CpuInterval(start_event=_Instant())

    def end(self, metadata: object) -> None:
        """Ends the interval."""
        self.end_event = _Instant()
        self.metadata = metadata
