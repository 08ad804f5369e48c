"""Which network addresses URLs of clients may reach (pure)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Final

_GLOBAL_UNICAST_V6: Final = ipaddress.ip_network("2000::/3")
# Reserved, of tunnels, or of a cloud's metadata service, although `ipaddress` calls them global.
_EXCEPTIONS: Final = tuple(
    map(ipaddress.ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "2002::/16"))
)


def is_public(address: str) -> bool:
    """Returns whether an IP address belongs to the public internet. Private, shared, loopback,
    link-local, multicast, reserved and metadata addresses do not, nor does IPv6 that contains
    IPv4."""
    ip = ipaddress.ip_address(address)
    if ip.version == 6 and ip not in _GLOBAL_UNICAST_V6:
        return False
    return (
        ip.is_global
        and not ip.is_multicast
        and not any(ip.version == network.version and ip in network for network in _EXCEPTIONS)
    )


def are_public(addresses: Iterable[str]) -> bool:
    """Returns whether a name resolves to public addresses only, at least one."""
    addresses = tuple(addresses)
    return bool(addresses) and all(map(is_public, addresses))
