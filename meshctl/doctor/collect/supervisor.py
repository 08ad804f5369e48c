"""The services that a `meshctl up` of this host keeps running, from its control socket."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from meshctl.doctor.facts import ServiceFacts, SupervisorFacts
from meshctl.process.control import short_address

# Of the status of a large mesh.
LINE_BYTES_MAX = 16 << 20


async def read_supervisor(log_dir: Path, limit_s: float) -> SupervisorFacts:
    """Returns the services; none if no `meshctl up` has its logs in the folder."""
    try:
        with short_address(log_dir) as address:
            async with asyncio.timeout(limit_s):
                reader, writer = await asyncio.open_unix_connection(address, limit=LINE_BYTES_MAX)
                try:
                    writer.write(b'{"command": "status"}\n')
                    answer = json.loads(await reader.readline())
                finally:
                    writer.close()
        return SupervisorFacts(
            services=tuple(
                ServiceFacts(row["name"], row["state"], row["failures"], row["error"])
                for row in answer["done"]
            )
        )
    except TimeoutError:
        return SupervisorFacts(error=f"it did not answer within {limit_s:g} s")
    except OSError:
        return SupervisorFacts()
    except (ValueError, LookupError, TypeError):
        return SupervisorFacts(error="its answer cannot be read: it is of another version")
