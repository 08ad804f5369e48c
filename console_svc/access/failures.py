"""The limit of failed logins (pure).

Keys and tokens have 256 bits, so no limit protects them from guesses. It bounds the work and the
log lines that a client can cause.
"""

from __future__ import annotations

FAILURES_MAX = 5
"""Of one address in WINDOW_S."""

WINDOW_S = 60.0
ADDRESSES_MAX = 1024


class LoginFailures:
    """Failed logins of the last WINDOW_S, by the address of the client."""

    def __init__(self) -> None:
        # When the window began, and its failures.
        self._windows: dict[str, tuple[float, int]] = {}

    def wait_s(self, address: str, now_s: float) -> float:
        """Returns the seconds until a login is tried again; 0: now."""
        began_s, failures = self._windows.get(address, (now_s, 0))
        return max(0.0, began_s + WINDOW_S - now_s) if failures >= FAILURES_MAX else 0.0

    def add(self, address: str, now_s: float) -> None:
        """Counts a failure."""
        began_s, failures = self._windows.pop(address, (now_s, 0))
        if now_s - began_s >= WINDOW_S:
            began_s, failures = now_s, 0
        if len(self._windows) >= ADDRESSES_MAX:
            del self._windows[next(iter(self._windows))]
        self._windows[address] = (began_s, failures + 1)
