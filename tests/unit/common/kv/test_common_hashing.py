"""Block identity: exact results, rejected input, the prefix property, a search for collisions."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.kv.hashing import (
    BLOCK_SIZE_MAX,
    DEFAULT_BLOCK_SIZE,
    HASH_SCHEME_ID,
    POSITION_KEYS_CACHED_MAX,
    POSITION_MAX,
    ChainState,
    PrefixHasher,
    TokensWithHashes,
    compute_block_hash_for_seq,
    compute_seq_hashes,
    hashes_from_bytes,
    hashes_to_bytes,
)
from common.request.preprocessed import BlockExtraInfo, MmObject

MESH_KEY = b"test mesh key"
MODEL = "a-model"
ROOT = ChainState(0, 0)
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1

Hashes = NDArray[np.uint64]

token_id = st.one_of(st.integers(0, 3), st.integers(0, 200_000), st.integers(0, U32_MAX))
prompt = st.lists(token_id, max_size=80)
small_block = st.integers(1, 9)
name = st.text("ab\0é", max_size=4)


def hasher_factory(block_size: int = DEFAULT_BLOCK_SIZE) -> PrefixHasher:
    return PrefixHasher(mesh_key=MESH_KEY, model=MODEL, block_size=block_size)


def mixed(x: int) -> int:
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & U64_MAX
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & U64_MAX
    return x ^ x >> 31


def scheme_1(
    tokens: list[int],
    block_size: int,
    names: tuple[str, str, str] = (MODEL, "", ""),
    mesh_key: bytes = MESH_KEY,
    state: ChainState = ROOT,
) -> list[int]:
    """Prefix hashes by the definition in the module's docstring, with Python ints."""
    message = struct.pack("<QQ", 1, block_size)
    for name in names:
        message += struct.pack("<Q", len(name.encode())) + name.encode()
    key = hashlib.blake2b(mesh_key).digest()
    digest = hashlib.blake2b(message, key=key, digest_size=16, person=b"kvmesh-prefix").digest()
    multiplier_seed, position_seed = struct.unpack("<QQ", digest)

    def drawn(seed: int, index: int) -> int:
        return mixed((seed + (index + 1) * 0x9E3779B97F4A7C15) & U64_MAX)

    hashes, total = [], state.total
    for i in range(len(tokens) // block_size):
        block = tokens[i * block_size : (i + 1) * block_size]
        linear = sum((drawn(multiplier_seed, j) | 1) * token for j, token in enumerate(block))
        position_key = drawn(position_seed, state.position + i)
        total = (total + mixed((linear + position_key) & U64_MAX)) & U64_MAX
        hashes.append(mixed(total))
    return hashes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"mesh_key": b"", "model": "m", "block_size": 16},
            [16645033507104017962, 11720362342244662917, 822424004827309029, 2573146640832015493],
        ),
        (
            {"mesh_key": b"k" * 100, "model": "m", "block_size": 16},
            [14240389381546451312, 14137839166300674889, 3801931907309563809, 14897743265990023365],
        ),
        (
            {"mesh_key": b"", "model": "m", "block_size": 16, "lora_name": "l"},
            [8426627372494982201, 9839167321884453043, 15855634813390850453, 9805143555203161771],
        ),
        (
            {"mesh_key": b"", "model": "m", "block_size": 16, "cache_salt": "s"},
            [7750006861358828424, 14896213468530346812, 5410329612364312928, 3940430222680901746],
        ),
        (
            {"mesh_key": b"", "model": "m", "block_size": 32},
            [14742869866831622061, 16890945259863723554],
        ),
    ],
)
def test_scheme_1_always_gives_these_hashes(arguments: dict[str, Any], expected: list[int]) -> None:
    assert HASH_SCHEME_ID == 1
    got = PrefixHasher(**arguments).prefix_hashes(range(64))
    assert got.dtype == np.uint64
    assert got.tolist() == expected


@settings(max_examples=60)
@given(prompt, small_block, st.tuples(name, name, name), st.binary(max_size=80))
def test_vectorised_hashes_equal_the_definition_in_plain_integers(
    tokens: list[int], block_size: int, names: tuple[str, str, str], mesh_key: bytes
) -> None:
    model, lora_name, cache_salt = names
    hasher = PrefixHasher(
        mesh_key=mesh_key,
        model=model,
        block_size=block_size,
        lora_name=lora_name,
        cache_salt=cache_salt,
    )
    expected = scheme_1(tokens, block_size, names, mesh_key)
    assert hasher.prefix_hashes(tokens).tolist() == expected


@settings(max_examples=60)
@given(prompt, small_block)
def test_extending_from_any_block_equals_hashing_the_whole(
    tokens: list[int], block_size: int
) -> None:
    hasher = hasher_factory(block_size)
    whole = hasher.prefix_hashes(tokens)
    from_root, sums = hasher.extend(ROOT, tokens)
    assert from_root.tolist() == whole.tolist()
    for done in range(1, len(whole) + 1):
        state = ChainState(done, int(sums[done - 1]))
        hashes, later_sums = hasher.extend(state, tokens[done * block_size :])
        assert hashes.tolist() == whole[done:].tolist()
        assert later_sums.tolist() == sums[done:].tolist()


@settings(max_examples=60)
@given(prompt, prompt, prompt, st.integers(1, 4))
def test_hashes_agree_exactly_as_far_as_the_prompts_do(
    common: list[int], tail: list[int], other_tail: list[int], block_size: int
) -> None:
    hasher = hasher_factory(block_size)
    left, right = common + tail, common + other_tail
    left_hashes = hasher.prefix_hashes(left).tolist()
    right_hashes = hasher.prefix_hashes(right).tolist()
    for i, (a, b) in enumerate(zip(left_hashes, right_hashes, strict=False)):
        end = (i + 1) * block_size
        assert (a == b) == (left[:end] == right[:end])


@settings(max_examples=40)
@given(prompt, small_block)
def test_every_form_of_token_ids_gives_the_same_hashes(tokens: list[int], block_size: int) -> None:
    hasher = hasher_factory(block_size)
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    expected = hasher.prefix_hashes(tokens).tolist()
    spread = np.zeros(2 * len(tokens), dtype=np.uint32)
    spread[::2] = tokens
    for form in (
        packed,
        bytearray(packed),
        memoryview(packed),
        tuple(tokens),
        np.array(tokens, dtype=np.uint32),
        np.array(tokens, dtype=np.int64),
        np.array(tokens, dtype=">u4"),
        spread[::2],
    ):
        assert hasher.prefix_hashes(form).tolist() == expected


def test_hashing_does_not_change_the_callers_token_ids() -> None:
    tokens = np.arange(64, dtype=np.uint32)
    hasher_factory().prefix_hashes(tokens)
    assert tokens.tolist() == list(range(64))


def test_a_hasher_reports_its_block_size() -> None:
    assert hasher_factory(7).block_size == 7


@pytest.mark.parametrize("length", [0, 1, 15])
def test_fewer_tokens_than_a_block_give_no_hash(length: int) -> None:
    hashes, sums = hasher_factory().extend(ROOT, [1] * length)
    for empty in (hashes, sums, hasher_factory().prefix_hashes(b"\x01\0\0\0" * length)):
        assert empty.shape == (0,)
        assert empty.dtype == np.uint64


def test_a_partial_tail_changes_nothing() -> None:
    full = hasher_factory().prefix_hashes(range(32))
    assert hasher_factory().prefix_hashes(range(47)).tolist() == full.tolist()


def test_changing_any_argument_of_a_hasher_changes_every_hash() -> None:
    plain: dict[str, Any] = {"mesh_key": b"key", "model": "ab", "block_size": 4}
    changes: list[dict[str, Any]] = [
        {},
        {"mesh_key": b""},
        {"mesh_key": b"key\0"},
        {"mesh_key": b"key" * 40},
        {"model": ""},
        {"model": "a"},
        {"block_size": 2},
        {"block_size": 5},
        {"lora_name": "c"},
        {"cache_salt": "c"},
        # The same letters, split differently, are different names.
        {"model": "a", "lora_name": "b"},
        {"model": "", "lora_name": "ab"},
        {"model": "", "cache_salt": "ab"},
        {"model": "a", "cache_salt": "b"},
        # Clients can put lone surrogates into a salt.
        {"cache_salt": "\ud800"},
    ]
    hashes = [PrefixHasher(**(plain | change)).prefix_hashes([0] * 4_000) for change in changes]
    assert distinct(np.concatenate(hashes)) == sum(map(len, hashes))


@pytest.mark.parametrize("start", [0, 511, POSITION_KEYS_CACHED_MAX - 2, 10**6, POSITION_MAX])
def test_a_chain_can_start_at_any_position(start: int) -> None:
    state = ChainState(start, U64_MAX)
    tokens = list(range(20))
    hashes, _ = hasher_factory(4).extend(state, tokens)
    assert hashes.tolist() == scheme_1(tokens, 4, state=state)


def test_prompts_longer_than_the_cached_position_keys_hash_like_their_parts() -> None:
    tokens = np.arange(POSITION_KEYS_CACHED_MAX + 10, dtype=np.uint32)
    whole, sums = hasher_factory(1).extend(ROOT, tokens)
    used = hasher_factory(1)
    first = used.prefix_hashes(tokens[:700])
    rest, _ = used.extend(ChainState(700, int(sums[699])), tokens[700:])
    assert np.array_equal(np.concatenate([first, rest]), whole)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([-1], "0..2"),
        ([2**32], "0..2"),
        ([1.5], "float"),
        (["7"], "str"),
        ("seven", "str"),
        ([[1, 2]], "list"),
        ([None], "NoneType"),
        (5, "int"),
        (b"\0\0\0", "3 bytes"),
        (memoryview(bytes(16))[::2], "contiguous"),
        (np.array([-1]), "0..2"),
        (np.array([2**32]), "0..2"),
        (np.array([2**63], dtype=np.uint64), "0..2"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.zeros((2, 2), dtype=np.uint32), "dimension"),
        (np.uint32(3), "numpy.uint32"),
    ],
)
def test_token_ids_outside_u32_are_refused_by_name(tokens: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^token_ids: .*{why}"):
        hasher_factory(1).prefix_hashes(tokens)
    with pytest.raises(ValueError, match=rf"^token_ids: .*{why}"):
        hasher_factory(1).extend(ROOT, tokens)
    with pytest.raises(ValueError, match=rf"^tokens: .*{why}"):
        compute_block_hash_for_seq(tokens, 1)
    with pytest.raises(ValueError, match=rf"^tokens: .*{why}"):
        TokensWithHashes(tokens, 1)


@pytest.mark.parametrize("block_size", [0, -16])
def test_a_block_size_below_one_is_refused_by_name(block_size: int) -> None:
    with pytest.raises(ValueError, match=r"^block_size: "):
        hasher_factory(block_size)
    with pytest.raises(ValueError, match=r"^block_size: "):
        compute_block_hash_for_seq([1], block_size)
    with pytest.raises(ValueError, match=r"^block_size: "):
        TokensWithHashes([1], block_size)


def test_a_block_size_above_the_limit_is_rejected_before_allocation() -> None:
    assert hasher_factory(BLOCK_SIZE_MAX).prefix_hashes([0] * BLOCK_SIZE_MAX).shape == (1,)
    with pytest.raises(ValueError, match=r"^block_size: "):
        hasher_factory(2**60)


@pytest.mark.parametrize(
    ("position", "total", "name"),
    [
        (-1, 0, "position"),
        (POSITION_MAX + 1, 0, "position"),
        (0, -1, "total"),
        (0, 2**64, "total"),
    ],
)
def test_a_chain_state_outside_its_range_is_refused_by_name(
    position: int, total: int, name: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        ChainState(position, total)


@given(st.lists(st.integers(0, U64_MAX), max_size=5))
def test_hashes_round_trip_through_bytes(values: list[int]) -> None:
    data = hashes_to_bytes(np.array(values, dtype=np.uint64))
    assert data == struct.pack(f"<{len(values)}Q", *values)
    back = hashes_from_bytes(data)
    assert not back.flags.writeable
    assert back.dtype == np.uint64
    assert back.tolist() == values


def test_bytes_whose_length_is_not_a_multiple_of_8_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"^data: 12 bytes"):
        hashes_from_bytes(b"\0" * 12)


@pytest.mark.parametrize(
    "array", [np.zeros(2, dtype=np.int64), np.zeros((1, 2), dtype=np.uint64), np.zeros(2)]
)
def test_arrays_of_other_types_are_rejected_as_hashes(array: Any) -> None:
    with pytest.raises(ValueError, match=r"^hashes: "):
        hashes_to_bytes(array)


# The search for collisions. A family yields the hashes of prompts constructed to collide in a weak
# scheme, then the number of different prefixes. Families use disjoint token ids, so that no prefix
# occurs in two of them.

Family = Callable[[int], tuple[list[Hashes], int]]


def block_of(token: int) -> NDArray[np.uint32]:
    return np.full(DEFAULT_BLOCK_SIZE, token, dtype=np.uint32)


def uniform_blocks(tokens: NDArray[np.integer[Any]]) -> NDArray[np.uint32]:
    """Blocks of one repeated token id each."""
    return np.repeat(tokens.astype(np.uint32), DEFAULT_BLOCK_SIZE)


def random_prompts(size: int) -> tuple[list[Hashes], int]:
    hasher, rng = hasher_factory(), np.random.default_rng(1)
    length = 128 * size
    found = [
        hasher.prefix_hashes(rng.integers(1_000_000, 1_150_000, 16 * length, dtype=np.uint32))
        for _ in range(10 * size)
    ]
    return found, 10 * size * length


def constant_prompts(size: int) -> tuple[list[Hashes], int]:
    """Runs of token id 0, and of other ids."""
    hasher, length = hasher_factory(), 64 * size
    found = [hasher.prefix_hashes(uniform_blocks(np.full(length, i))) for i in range(256)]
    return found, 256 * length


def thue_morse_words(size: int) -> tuple[list[Hashes], int]:
    """Thue-Morse words and their complements, over many pairs of blocks."""
    hasher, length = hasher_factory(), 128 * size
    word = np.bitwise_count(np.arange(length, dtype=np.uint32)) & 1
    found: list[Hashes] = []
    for token in range(2_000, 2_064, 2):
        for letters in (word, 1 - word):
            pair = np.stack([block_of(token), block_of(token + 1)])
            found.append(hasher.prefix_hashes(pair[letters].ravel()))
    return found, 64 * length


def all_words_over_two_blocks(size: int) -> tuple[list[Hashes], int]:
    """Every word over two blocks that differ by one in one token: 2^n words of n blocks."""
    hasher, length = hasher_factory(), 8 + size // 8
    pair = np.stack([block_of(3_000), block_of(3_000)])
    pair[1, 7] += 1
    words = np.array(list(itertools.product((0, 1), repeat=length)))
    return [hasher.prefix_hashes(pair[word].ravel()) for word in words], 2 ** (length + 1) - 2


def swapped_blocks(size: int) -> tuple[list[Hashes], int]:
    """Two blocks of a prompt are swapped, at every power of two of distance."""
    hasher, length = hasher_factory(), 16 * size
    base = np.arange(4_000, 4_000 + length)
    hashes, sums = hasher.extend(ROOT, uniform_blocks(base))
    found = [hashes]
    for i in range(length):
        state = ChainState(i, int(sums[i - 1])) if i else ROOT
        distance = 1
        while i + distance < length:
            swapped = base[i:].copy()
            swapped[[0, distance]] = swapped[[distance, 0]]
            found.append(hasher.extend(state, uniform_blocks(swapped))[0])
            distance *= 2
    return found, sum(map(len, found))


def one_block_at_every_position(size: int) -> tuple[list[Hashes], int]:
    hasher, length = hasher_factory(), 16 * size
    filler = uniform_blocks(np.full(length, 8_000))
    hashes, sums = hasher.extend(ROOT, filler)
    found = [hashes]
    for i in range(length):
        state = ChainState(i, int(sums[i - 1])) if i else ROOT
        rest = filler[16 * i :].copy()
        rest[:16] = 8_001
        found.append(hasher.extend(state, rest)[0])
    return found, length + length * (length + 1) // 2


def small_lattice_differences(size: int) -> tuple[list[Hashes], int]:
    """A 0/1 vector, scaled, is added to one block and subtracted from the next: the sum is
    unchanged.
    """
    hasher, dimensions = hasher_factory(), 8 + size // 8
    found: list[Hashes] = []
    for base, step in ((500_000, 1), (600_000, 4_096)):
        tokens = np.full((3, 16), base, dtype=np.uint32)
        for point in itertools.product((0, step), repeat=dimensions):
            tokens[0, :dimensions] = base + np.array(point)
            tokens[1, :dimensions] = base - np.array(point)
            found.append(hasher.prefix_hashes(tokens.ravel()))
    return found, 2 * 3 * 2**dimensions


FAMILIES: list[Family] = [
    random_prompts,
    constant_prompts,
    thue_morse_words,
    all_words_over_two_blocks,
    swapped_blocks,
    one_block_at_every_position,
    small_lattice_differences,
]


def distinct(hashes: Hashes) -> int:
    ordered = np.sort(hashes)
    return 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))


@pytest.mark.parametrize("family", FAMILIES)
def test_constructed_prefixes_do_not_collide(family: Family) -> None:
    found, prefixes = family(4)
    assert distinct(np.concatenate(found)) == prefixes


@pytest.mark.slow
def test_ten_million_adversarial_blocks_do_not_collide() -> None:
    pooled: list[Hashes] = []
    prefixes_in_all = 0
    for family in FAMILIES:
        found, prefixes = family(64)
        hashes = np.concatenate(found)
        assert distinct(hashes) == prefixes, family.__name__
        pooled.append(hashes)
        prefixes_in_all += prefixes
    assert prefixes_in_all >= 10**7
    assert distinct(np.concatenate(pooled)) == prefixes_in_all


# The XXH3 hashes. Vectors over the tokens 1..32 in blocks of 16.

VECTOR_TOKENS = list(range(1, 33))
PLAIN_VECTOR = [16863443419780771464, 2287610619914608821]


def objects(*mm_hashes: int) -> BlockExtraInfo:
    return BlockExtraInfo(tuple(MmObject(mm_hash) for mm_hash in mm_hashes))


@pytest.mark.row("S1-38")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, PLAIN_VECTOR),
        ({"lora_name": ""}, PLAIN_VECTOR),
        ({"lora_name": "my-lora"}, [4148081000444450790, 2866551892415683476]),
        ({"is_eagle": True}, [6752489653130089168]),
        ({"block_mm_infos": [objects(0xDEADBEEF)]}, [14529151895984176542, PLAIN_VECTOR[1]]),
        ({"block_mm_infos": [objects(7, 3), None]}, [14838381081241750522, PLAIN_VECTOR[1]]),
    ],
)
def test_local_hashes_are_bit_exact_with_the_reference(
    arguments: dict[str, Any], expected: list[int]
) -> None:
    assert compute_block_hash_for_seq(VECTOR_TOKENS, 16, **arguments) == expected


@pytest.mark.row("S1-38")
def test_three_tokens_have_no_local_hash() -> None:
    assert compute_block_hash_for_seq([1, 2, 3], 16) == []


@pytest.mark.row("S1-38")
@pytest.mark.parametrize(("length", "blocks"), [(16, 0), (17, 1), (32, 1), (33, 2)])
def test_an_eagle_block_needs_one_token_more_than_it_advances(length: int, blocks: int) -> None:
    hashes = compute_block_hash_for_seq(range(length), 16, is_eagle=True)
    assert len(hashes) == blocks
    for i, got in enumerate(hashes):
        assert [got] == compute_block_hash_for_seq(range(16 * i, 16 * i + 17), 17)


@pytest.mark.row("S1-31")
def test_a_local_hash_depends_only_on_the_content_of_its_block() -> None:
    first, second, third = compute_block_hash_for_seq([1, 2, 3, 4, 1, 2], 2)
    assert first == third != second
    assert [second] == compute_block_hash_for_seq([3, 4], 2)
    assert all(type(h) is int and 0 <= h <= U64_MAX for h in (first, second, third))


@pytest.mark.row("S1-30")
def test_multimodal_objects_distinguish_blocks_of_equal_tokens() -> None:
    def hashes(*infos: BlockExtraInfo | None) -> list[int]:
        return list(compute_block_hash_for_seq([1, 2, 1, 2], 2, infos))

    plain = hashes()
    assert hashes(None, objects(9))[0] == plain[0]
    assert hashes(None, objects(9))[1] not in (*plain, *hashes(objects(8)))
    assert hashes(objects(7, 3)) == hashes(objects(3, 7)) != hashes(objects(7))
    assert hashes(objects(7, 7)) != hashes(objects(7))
    assert hashes(BlockExtraInfo()) == plain
    placed = BlockExtraInfo((MmObject(9, offsets=((0, 2),)),))
    assert hashes(placed) == hashes(objects(9))


@pytest.mark.row("S1-30")
def test_multimodal_infos_that_fit_no_block_are_refused() -> None:
    assert len(compute_block_hash_for_seq([1, 2, 3], 2, [None, objects(9)])) == 1
    with pytest.raises(ValueError, match=r"^block_mm_infos: 3 entries for 2 blocks"):
        compute_block_hash_for_seq([1, 2, 3], 2, [None, None, None])
    for mm_hash in (-1, 2**64):
        with pytest.raises(ValueError, match=r"^mm_hash: "):
            compute_block_hash_for_seq([1, 2], 2, [objects(mm_hash)])


def test_sequence_hashes_chain_the_local_ones() -> None:
    local = [U64_MAX, 0, 5]
    second = xxhash.xxh3_64_intdigest(struct.pack("<QQ", U64_MAX, 0), seed=1337)
    third = xxhash.xxh3_64_intdigest(struct.pack("<QQ", second, 5), seed=1337)
    assert compute_seq_hashes(local) == [U64_MAX, second, third]
    assert compute_seq_hashes([]) == []
    assert compute_seq_hashes(PLAIN_VECTOR)[1] == 12466389667045779788


@pytest.mark.parametrize("bad", [[-1], [2**64], [1, 2**64]])
def test_local_hashes_outside_u64_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^local_hashes: "):
        compute_seq_hashes(bad)


@pytest.mark.row("S1-36")
def test_tokens_with_hashes_give_the_hashes_of_their_tokens() -> None:
    held = TokensWithHashes([*VECTOR_TOKENS, 5], 16)
    assert (len(held), held.block_size) == (33, 16)
    assert held.tokens.tolist() == [*VECTOR_TOKENS, 5]
    assert list(held.block_hashes) == PLAIN_VECTOR
    assert list(held.seq_hashes) == compute_seq_hashes(PLAIN_VECTOR)


@pytest.mark.row("S1-36")
def test_tokens_with_hashes_pass_on_adapter_objects_and_mode() -> None:
    infos = [None, objects(3)]
    for is_eagle in (False, True):
        held = TokensWithHashes(range(33), 16, infos, "an-adapter", is_eagle=is_eagle)
        expected = compute_block_hash_for_seq(range(33), 16, infos, "an-adapter", is_eagle=is_eagle)
        assert list(held.block_hashes) == expected


@pytest.mark.row("S1-36")
def test_tokens_with_hashes_compute_lazily_and_once() -> None:
    class CountedInfo(BlockExtraInfo):
        """Counts how often hashing reads the objects."""

        reads = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "mm_objects":
                CountedInfo.reads += 1
            return super().__getattribute__(name)

    held = TokensWithHashes(VECTOR_TOKENS, 16, [CountedInfo((MmObject(9),))])
    assert CountedInfo.reads == 0
    sequence = held.seq_hashes
    assert CountedInfo.reads == 1
    assert held.block_hashes is held.block_hashes
    assert held.seq_hashes is sequence
    assert CountedInfo.reads == 1


@pytest.mark.row("S1-36")
@pytest.mark.parametrize("form", ["list", "array", "bytearray"])
def test_tokens_with_hashes_ignore_later_changes_of_the_callers_ids(form: str) -> None:
    array = np.array(VECTOR_TOKENS, dtype=np.uint32)
    ids: Any = {"list": array.tolist(), "array": array, "bytearray": bytearray(array.tobytes())}
    held = TokensWithHashes(ids[form], 16)
    ids[form][0] = 77
    assert list(held.block_hashes) == PLAIN_VECTOR
    with pytest.raises(ValueError, match="read-only"):
        held.tokens[0] = 77
