"""The configured aliases: of a setting, or of a file that is read again when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from common.errors import MeshError
from frontend_svc.models.variants import Aliases, parse_aliases

# Time until a change of the file is in effect.
RELOAD_INTERVAL_S = 1.0

log = structlog.get_logger()


def read_aliases(setting: str) -> Aliases:
    """Returns the aliases of a setting: a JSON object, the path of a file with one, or "". Raises
    OSError and InvalidRequest."""
    if not setting:
        return {}
    if setting.lstrip().startswith("{"):
        return parse_aliases(setting.encode())
    return parse_aliases(Path(setting).read_bytes())


class AliasFile:
    """Aliases that follow a file while `follow` runs. An invalid or missing file leaves them as
    they are; it is logged once. Raises OSError and InvalidRequest.

    path: None: the setting has the aliases themselves, and nothing is to be followed.
    """

    def __init__(self, setting: str, use: Callable[[Aliases], None]) -> None:
        """
        - use: called with the aliases, now and after each change.
        """
        self.path = None if setting.lstrip().startswith("{") else Path(setting)
        self._use = use
        self._aliases = read_aliases(setting)
        self._error = ""
        use(self._aliases)

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_INTERVAL_S)
            await self.reload()

    async def reload(self) -> None:
        """Reads the file; one that has not changed since the last time changes nothing."""
        try:
            aliases = await asyncio.to_thread(read_aliases, str(self.path))
        except (OSError, MeshError) as error:
            if str(error) != self._error:
                self._error = str(error)
                log.warning("aliases_rejected", path=str(self.path), error=self._error)
            return
        self._error = ""
        if aliases != self._aliases:
            self._aliases = aliases
            self._use(aliases)
            log.info("aliases_loaded", path=str(self.path), aliases=sorted(aliases))
