"""Cards as Consul stores them."""

from __future__ import annotations

import zlib

import pytest

from common.errors import InvalidRequest
from common.registry.card import Artifact, ModelCard
from common.registry.consul.entries import CARD_SLACK_BYTES, pack_card, unpack_card


def test_a_packed_card_takes_not_much_more_memory_than_in_the_store() -> None:
    card = ModelCard(name="a", artifacts={"tokenizer.json": Artifact.of(b'{"a": 1}' * 100_000)})
    parts = pack_card(card)
    parts.pop("manifest")
    assert unpack_card(parts.values(), card.checksum) == card
    bomb = zlib.compress(b" " * (100 << 20))
    with pytest.raises(InvalidRequest, match="larger than") as caught:
        unpack_card([bomb], card.checksum)
    limit = int(caught.value.message.split()[-2])
    assert CARD_SLACK_BYTES < limit < 10 << 20
