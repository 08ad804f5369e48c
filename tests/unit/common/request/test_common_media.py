"""Media in the identity of a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.kv.hashing import PrefixHasher
from common.request.media import (
    MediaHashes,
    MediaInput,
    block_media,
    content_hash,
    expand_placeholders,
    read_data_url,
    with_media,
)
from common.request.preprocessed import BlockExtraInfo, MmObject, TokenIds

IMAGE = MediaInput(token_id=900, tokens=5, count_max=4, bytes_max=1000)
AUDIO = MediaInput(token_id=901, tokens=3, count_max=4, bytes_max=1000)
HASHER = PrefixHasher(mesh_key=b"", model="m", block_size=4)
U64 = st.integers(0, 2**64 - 1)


def prompt(*ids: int) -> TokenIds:
    return expand_placeholders(TokenIds.of(ids), [IMAGE, AUDIO])


def images(*hashes: int) -> MediaHashes:
    return MediaHashes(IMAGE, hashes)


def test_a_medium_stands_for_its_placeholders_and_nothing_else() -> None:
    expanded = prompt(1, 900, 2, 901, 900)
    assert expanded.tolist() == [1, *[900] * 5, 2, *[901] * 3, *[900] * 5]
    low, high = 7, 9
    routing = with_media(expanded, [images(low | high << 32, 3), MediaHashes(AUDIO, [900])])
    assert routing.tolist() == [1, 7, 9, 7, 9, 7, 2, 900, 0, 900, 3, 0, 3, 0, 3]


@given(st.lists(st.integers(0, 800), max_size=20), U64, U64, st.lists(st.integers(0, 800)))
def test_prefix_hashes_differ_exactly_from_the_block_of_another_medium_on(
    before: list[int], first: int, second: int, after: list[int]
) -> None:
    expanded = prompt(*before, 900, *after)
    hashes = [
        HASHER.prefix_hashes(with_media(expanded, [images(one)]).array).tolist()
        for one in (first, second)
    ]
    same = sum(a == b for a, b in zip(*hashes, strict=True))
    # A block that begins the run with one token has half of the hash.
    limit = len(before) // 4 + (len(before) % 4 == 3 and first % 2**32 == second % 2**32)
    assert same == (len(hashes[0]) if first == second else min(limit, len(hashes[0])))


def test_tokens_generated_after_the_media_are_not_media() -> None:
    """A logit bias can force the id of a placeholder into the output of a migrated response."""
    expanded = prompt(1, 900)
    continued = with_media(expanded.extended([900, 4]), [images(3)])
    assert continued == with_media(expanded, [images(3)]).extended([900, 4])


def test_a_medium_without_placeholders_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="2 media need 10 placeholders, not 5"):
        with_media(prompt(1, 900), [images(3, 4)])


@pytest.mark.row("S2-29", "S2-87")
def test_blocks_name_their_media_with_the_ranges_inside_of_the_block() -> None:
    expanded = prompt(1, 2, 900, 3, 901)
    media = [images(7), MediaHashes(AUDIO, [8])]
    infos = block_media(expanded, media, 4)
    assert infos == (
        BlockExtraInfo((MmObject(7, ((2, 4),)),)),
        BlockExtraInfo((MmObject(7, ((0, 3),)),)),
        BlockExtraInfo((MmObject(8, ((0, 3),)),)),
    )
    assert block_media(prompt(*range(8), 900), [images(7)], 4)[:2] == (None, None)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "data:",
        "data:image/png,abc",
        "data:image/png;base64,a",
        "data:;base64,+-",
        "https://a/b",
    ],
)
def test_a_url_without_base64_content_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_data_url(url, "here")
    assert raised.value.field == "here"


def test_the_media_type_of_a_data_url_may_have_parameters() -> None:
    assert read_data_url("DATA:Image/PNG;a=b;BASE64,AAAA", "") == ("image/png", bytes(3))
    assert content_hash(b"a") != content_hash(b"b")
