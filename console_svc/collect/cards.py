"""The models that workers serve, with what their cards state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

import structlog

from common.errors import MeshError
from common.registry.card import ModelCard
from common.registry.instances import Instance
from console_svc.state.members import Adapter, Model

# Summaries of cards, which are small; the cards themselves are not kept.
CARDS_MAX: Final = 256

log = structlog.get_logger()


class Cards:
    """Summaries of cards by checksum."""

    def __init__(self, get_card: Callable[[str], Awaitable[ModelCard]]) -> None:
        self._get_card = get_card
        self._summaries: OrderedDict[str, Model] = OrderedDict()

    async def load(self, instances: Iterable[Instance]) -> bool:
        """Reads the cards that are new; returns whether there were any."""
        has_new = False
        for checksum in {i.card_checksum for i in instances if i.card_checksum}:
            if checksum in self._summaries:
                continue
            try:
                card = await self._get_card(checksum)
            except MeshError as error:
                log.warning("card_not_read", checksum=checksum[:12], error=error.message)
                continue
            self._summaries[checksum] = _summarize(card, checksum)
            has_new = True
            if len(self._summaries) > CARDS_MAX:
                self._summaries.popitem(last=False)
        return has_new

    def models(
        self,
        workers: Iterable[Instance],
        name: Callable[[int], str],
        canaries: Mapping[str, str],
        problems: Mapping[str, str],
    ) -> tuple[Model, ...]:
        """Returns the models of workers, by name.

        - name: of a member by its id.
        - canaries, problems: by model, as the frontends report them.
        """
        by_model: dict[str, list[Instance]] = {}
        for worker in workers:
            by_model.setdefault(worker.model, []).append(worker)
        found = []
        for model in sorted(by_model.keys() | problems.keys()):
            of_model = by_model.get(model, [])
            checksum = next((w.card_checksum for w in of_model if w.card_checksum), "")
            summary = self._summaries.get(checksum, Model(model, checksum))
            found.append(
                replace(
                    summary,
                    name=model,
                    workers=_names_by_role(of_model, name),
                    adapters=_adapters(of_model, name),
                    canary=canaries.get(model, ""),
                    problem=problems.get(model, ""),
                )
            )
        return tuple(found)


def _summarize(card: ModelCard, checksum: str) -> Model:
    return Model(
        name=card.name,
        card_checksum=checksum,
        aliases=card.aliases,
        kinds=tuple(str(kind.name).lower() for kind in card.model_type),
        context_length=card.context_length,
        block_size=card.kv_block_size,
        hash_scheme=card.hash_scheme,
        tool_parser=card.tool_call_parser or "",
        reasoning_parser=card.reasoning_parser or "",
        artifacts={name: artifact.size for name, artifact in card.artifacts.items()},
    )


def _names_by_role(
    workers: Iterable[Instance], name: Callable[[int], str]
) -> dict[str, tuple[str, ...]]:
    names: dict[str, list[str]] = {}
    for worker in workers:
        names.setdefault(worker.role, []).append(name(worker.id))
    return {role: tuple(sorted(of_role)) for role, of_role in names.items()}


def _adapters(workers: Iterable[Instance], name: Callable[[int], str]) -> tuple[Adapter, ...]:
    holders: dict[str, list[str]] = {}
    for worker in workers:
        for lora in worker.loras:
            holders.setdefault(lora, []).append(name(worker.id))
    return tuple(Adapter(lora, tuple(sorted(of))) for lora, of in sorted(holders.items()))
