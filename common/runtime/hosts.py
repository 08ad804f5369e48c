"""Which addresses a port can be bound to, and reached at (pure)."""

from __future__ import annotations

import ipaddress

# Bind addresses of all interfaces.
WILDCARD_HOSTS = frozenset({"", "*", "0.0.0.0", "::", "[::]"})


def is_loopback(host: str) -> bool:
    """Returns whether an address is only reachable from this host. Unknown host names are not."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
