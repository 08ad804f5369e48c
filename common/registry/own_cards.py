"""The cards that a client stored. It stores them again if the store has lost them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import structlog

from common.errors import MeshError
from common.registry.card import ModelCard
from common.registry.instances import Instance

LOG = structlog.get_logger(__name__)


class OwnCards:
    """The cards of one client of a registry."""

    def __init__(
        self,
        is_stored: Callable[[str], Awaitable[bool]],
        store: Callable[[ModelCard], Awaitable[None]],
    ) -> None:
        """
        - is_stored: returns whether the store has a card, by checksum.
        - store: stores a card.
        """
        self._is_stored = is_stored
        self._store = store
        self._cards: dict[str, ModelCard] = {}
        self._is_lost = False

    def add(self, card: ModelCard, registered: Iterable[Instance]) -> None:
        """Adds a card that was stored. Others are kept while a registered instance has them."""
        used = {instance.card_checksum for instance in registered}
        kept = {checksum: own for checksum, own in self._cards.items() if checksum in used}
        self._cards = {**kept, card.checksum: card}

    async def restore(self, registered: Iterable[Instance]) -> bool:
        """Stores the missing cards of registered instances; returns whether the store has all.
        Logs what is restored, and the first of several failures."""
        used = {instance.card_checksum for instance in registered}
        try:
            for checksum, card in tuple(self._cards.items()):
                if checksum in used and not await self._is_stored(checksum):
                    await self._store(card)
                    LOG.info("card_restored", model=card.name, card_checksum=checksum)
        except MeshError as error:
            if not self._is_lost:
                LOG.warning("card_lost", error=error.message)
            self._is_lost = True
            return False
        self._is_lost = False
        return True
