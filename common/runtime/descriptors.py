"""The limit of open file descriptors of a service (`ulimit -n`)."""

from __future__ import annotations

import resource

from common.runtime.config import ConfigError

# Each member of a mesh takes one to three descriptors.
MINIMUM = 256
WANTED = 16_384


def raise_descriptor_limit(wanted: int = WANTED, *, minimum: int = MINIMUM, use: str = "") -> int:
    """Raises the soft limit to `wanted`, or to the hard limit if that is lower.

    Returns the limit in force, at most `wanted`. Raises ConfigError below `minimum`.

    - use: what the descriptors are for, as a text for the error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if limit < minimum:
        needed = f"a service needs at least {minimum}{use and f' {use}'}"
        raise ConfigError(
            [
                f"ulimit -n: the hard limit of file descriptors is {hard}, and {needed}; "
                f"raise it (ulimit -Hn {wanted}, LimitNOFILE= of systemd, --ulimit nofile= of a "
                "container engine)"
            ]
        )
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit
