"""Block identity: token ids to the 64-bit hashes that identify KV cache blocks. Pure.

A block is `block_size` consecutive token ids. Only full blocks have a hash. Two families:

- The **prefix hash** of the mesh (`PrefixHasher`): one uint64 identifies a whole prefix up to and
  including its last block. A few vectorised passes compute it for a prompt; it is the only hash on
  the hot path. It is a hint: a collision costs a wrong placement, never a wrong response.
- The **XXH3 hashes** (`compute_block_hash_for_seq`, `compute_seq_hashes`) of other routers and
  their recordings. `/v1/internal/preprocess` returns them; the mesh itself does not use them.

The prefix hash, scheme 1. All arithmetic is modulo 2^64; i is a block's position in the prompt,
t[i, j] its token ids, mix(x) the 64-bit finaliser of SplitMix64 (Stafford's variant 13):

    digest[i] = sum over j of m[j] * t[i, j]            m[j] odd
    total[i]  = total[i - 1] + mix(digest[i] + k[i])    total[-1] = 0
    hash[i]   = mix(total[i])

The position key k[i] must enter before the mix: otherwise a chain is a sum over a multiset, and
any permutation of blocks (e.g. Thue-Morse words) or a run of token id 0 collides.

m and k come from two seeds, the little-endian halves of a 16-byte BLAKE2b digest over scheme id,
block size, model, LoRA name and cache salt, under the key BLAKE2b-512(mesh_key):
k[i] = mix(seed + (i + 1) * 0x9E3779B97F4A7C15), and m the same way with its low bit set. For
random m, two blocks have equal digests with a probability of at most 2^-(63 - v), where 2^v is the
largest power of two that divides every difference of their ids (v < 32, and < 18 for current
vocabularies).
Without a secret mesh_key a client can construct collisions.
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NewType, Protocol, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

HASH_SCHEME_ID: Final = 1
"""Id of the prefix hash described above; any change of its results needs another id."""

DEFAULT_BLOCK_SIZE: Final = 16
"""Tokens per routing block, unless a model's card sets another size."""

BLOCK_SIZE_MAX: Final = 65_536
"""Largest block size; bounds the multipliers of a hasher (512 KiB)."""

POSITION_MAX: Final = 2**48
"""Largest position of a chain state: far above any prompt, safe in 64-bit arithmetic."""

POSITION_KEYS_CACHED_MAX: Final = 65_536
"""Position keys a hasher caches (512 KiB); later keys are computed on each call."""

LocalBlockHash = NewType("LocalBlockHash", int)
"""XXH3-64 of the content of one block alone; 0 <= value < 2^64."""

SequenceHash = NewType("SequenceHash", int)
"""XXH3-64 of a block and all blocks before it; 0 <= value < 2^64."""

TokenIdsLike: TypeAlias = bytes | bytearray | memoryview | NDArray[Any] | Sequence[int]
"""Token ids, 0 <= id < 2^32: raw little-endian u32, an integer array (1-D), or a sequence."""

# Salts of tenants that send requests. A hasher takes 8 bytes a block of its longest prompt.
SALTED_HASHERS_MAX: Final = 256
_U64_MAX: Final = 2**64 - 1
_GOLDEN_GAMMA: Final = 0x9E3779B97F4A7C15
# As arrays: numpy converts an int on each use, which takes longer than a prompt's operation.
_SHIFT_1, _FACTOR_1, _SHIFT_2, _FACTOR_2, _SHIFT_3 = (
    np.array(value, dtype=np.uint64)
    for value in (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)
)
_XXH3_SEED: Final = 1337
_INITIAL_KEYS: Final = 512


@dataclass(frozen=True, slots=True)
class ChainState:
    """State of a chain of prefix hashes: `total` is the running sum after `position` blocks.

    `ChainState(0, 0)` is the root. Raises ValueError unless 0 <= position <= POSITION_MAX and
    0 <= total < 2^64.
    """

    position: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.position <= POSITION_MAX:
            raise ValueError(f"position: {self.position} is not in 0..{POSITION_MAX}")
        _require_uint64("total", self.total)


class PrefixHasher:
    """Prefix hashes (scheme 1) of one model, block size, LoRA adapter and cache salt.

    Deterministic: equal arguments give equal hashes in every process. Hashers that differ in any
    argument have unrelated hashes. Thread-safe.

    Raises ValueError when block_size is not in 1..BLOCK_SIZE_MAX.
    """

    def __init__(
        self,
        *,
        mesh_key: bytes,
        model: str,
        block_size: int,
        lora_name: str = "",
        cache_salt: str = "",
    ) -> None:
        if not 1 <= block_size <= BLOCK_SIZE_MAX:
            raise ValueError(f"block_size: {block_size} is not in 1..{BLOCK_SIZE_MAX}")
        self._names = mesh_key, model, lora_name
        multiplier_seed, position_seed = _derive_seeds(
            mesh_key, block_size, (model, lora_name, cache_salt)
        )
        self.block_size = block_size
        self._multipliers = _splitmix64_stream(multiplier_seed, 0, block_size) | 1
        self._position_seed = position_seed
        self._position_keys = np.empty(0, dtype=np.uint64)

    def salted(self, cache_salt: str) -> PrefixHasher:
        """Returns the hasher with another cache salt; "" for none. Recent ones are kept."""
        mesh_key, model, lora_name = self._names
        return _kept_hasher(mesh_key, model, self.block_size, lora_name, cache_salt)

    def prefix_hashes(self, token_ids: TokenIdsLike) -> NDArray[np.uint64]:
        """Returns one hash for each full block of a whole prompt, shape (len // block_size,).

        Raises ValueError when token_ids are not integers in 0..2^32-1, not one-dimensional, or
        bytes of a length that is not a multiple of 4.
        """
        return _splitmix64_finalize(self._running_sums(ChainState(0, 0), token_ids))

    def extend(
        self, state: ChainState, token_ids: TokenIdsLike
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Continues a chain: hashes and running sums of the full blocks that follow `state`.

        Both have shape (len // block_size,). After n of these blocks the state is
        ChainState(state.position + n, int(sums[n - 1])). Errors as in `prefix_hashes`.
        """
        sums = self._running_sums(state, token_ids)
        return _splitmix64_finalize(sums.copy()), sums

    def _running_sums(self, state: ChainState, token_ids: TokenIdsLike) -> NDArray[np.uint64]:
        ids = _to_uint32_array(token_ids, "token_ids")
        count = len(ids) // self.block_size
        if count == 0:
            return np.empty(0, dtype=np.uint64)
        blocks = ids[: count * self.block_size].reshape(count, self.block_size)
        # vecdot widens the ids in cache-sized pieces, without a 64-bit copy of the prompt.
        terms: NDArray[np.uint64] = np.vecdot(blocks, self._multipliers)
        terms += self._position_keys_between(state.position, state.position + count)
        _splitmix64_finalize(terms)
        if state.total:
            # A slice, because numpy warns about overflow of scalars but not of arrays.
            terms[:1] += np.uint64(state.total)
        return np.add.accumulate(terms, out=terms)

    def _position_keys_between(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Returns the keys of positions start..stop-1, from the cache if possible."""
        if stop > POSITION_KEYS_CACHED_MAX:
            return _splitmix64_stream(self._position_seed, start, stop)
        cached = self._position_keys
        if stop > len(cached):
            size = min(max(stop, 2 * len(cached), _INITIAL_KEYS), POSITION_KEYS_CACHED_MAX)
            # Replaced as a whole, so that another thread reads either the old or the new array.
            self._position_keys = cached = _splitmix64_stream(self._position_seed, 0, size)
        return cached[start:stop]


@lru_cache(maxsize=SALTED_HASHERS_MAX)
def _kept_hasher(
    mesh_key: bytes, model: str, block_size: int, lora_name: str, cache_salt: str
) -> PrefixHasher:
    return PrefixHasher(
        mesh_key=mesh_key,
        model=model,
        block_size=block_size,
        lora_name=lora_name,
        cache_salt=cache_salt,
    )


def hashes_to_bytes(hashes: NDArray[np.uint64]) -> bytes:
    """Returns 8 bytes per hash, little endian. Raises ValueError unless `hashes` is 1-D uint64."""
    if hashes.dtype != np.uint64 or hashes.ndim != 1:
        raise ValueError(
            f"hashes: must be a 1-D array of uint64, not {hashes.ndim}-D of {hashes.dtype}"
        )
    return hashes.astype("<u8", copy=False).tobytes()


def hashes_from_bytes(data: bytes) -> NDArray[np.uint64]:
    """Returns a read-only array of `hashes_to_bytes`. Raises ValueError for other sizes."""
    if len(data) % 8:
        raise ValueError(f"data: {len(data)} bytes are not a multiple of 8")
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)


def hash_view(data: bytes) -> memoryview:
    """Returns the hashes of `hashes_to_bytes` one by one, without a copy: ints only when read."""
    if sys.byteorder == "little":
        return memoryview(data).cast("Q")
    return hashes_from_bytes(data).data


class MediaObject(Protocol):
    """One image, video or audio clip in a block. mm_hash: of its content, 0 <= mm_hash < 2^64."""

    @property
    def mm_hash(self) -> int: ...


class BlockMedia(Protocol):
    """The media in a block."""

    @property
    def mm_objects(self) -> Sequence[MediaObject]: ...


def compute_block_hash_for_seq(
    tokens: TokenIdsLike,
    block_size: int,
    block_mm_infos: Sequence[BlockMedia | None] | None = None,
    lora_name: str | None = None,
    *,
    is_eagle: bool = False,
) -> list[LocalBlockHash]:
    """Returns the XXH3-64 local hash of each full block, bit-exact with NVIDIA Dynamo 1.6.1.

    A block's hash covers its token ids as little-endian u32, then the `mm_hash` of its objects as
    little-endian u64 in ascending order. The seed is 1337, plus XXH3-64(lora_name, seed 0) modulo
    2^64 for an adapter; "" means no adapter. With `is_eagle` a block covers
    block_size + 1 tokens and still advances by block_size.

    Cache namespaces are not supported: Dynamo's derivation of their seed is not documented.
    `PrefixHasher` has its own cache salt.

    `block_mm_infos[i]` belongs to block i; later blocks have none. Raises
    ValueError for block_size < 1, bad token ids, or more infos than blocks (partial tail counted).
    """
    if block_size < 1:
        raise ValueError(f"block_size: {block_size} is below 1")
    ids = _to_uint32_array(tokens, "tokens")
    media_infos = block_mm_infos or ()
    started_blocks = -(-len(ids) // block_size)
    if len(media_infos) > started_blocks:
        raise ValueError(f"block_mm_infos: {len(media_infos)} entries for {started_blocks} blocks")
    window = block_size + 1 if is_eagle else block_size
    data = ids.astype("<u4", copy=False).tobytes()
    seed = _XXH3_SEED
    if lora_name:
        # Surrogates pass for the same reason as in `_derive_seeds`.
        seed += xxhash.xxh3_64_intdigest(lora_name.encode("utf-8", "surrogatepass"))
    hashes = []
    for i, start in enumerate(range(0, len(ids) - window + 1, block_size)):
        content = data[4 * start : 4 * (start + window)]
        info = media_infos[i] if i < len(media_infos) else None
        if info is not None:
            media_hashes = sorted(mm_object.mm_hash for mm_object in info.mm_objects)
            for media_hash in media_hashes:
                _require_uint64("mm_hash", media_hash)
            content += struct.pack(f"<{len(media_hashes)}Q", *media_hashes)
        hashes.append(LocalBlockHash(xxhash.xxh3_64_intdigest(content, seed & _U64_MAX)))
    return hashes


def compute_seq_hashes(local_hashes: Iterable[int]) -> list[SequenceHash]:
    """Chains local hashes: seq[0] = local[0], seq[i] = XXH3-64(LE8(seq[i-1]) | LE8(local[i]),
    1337).

    Raises ValueError when a local hash is not in 0..2^64-1.
    """
    hashes: list[SequenceHash] = []
    for local_hash in local_hashes:
        _require_uint64("local_hashes", local_hash)
        chained = local_hash
        if hashes:
            pair = struct.pack("<QQ", hashes[-1], local_hash)
            chained = xxhash.xxh3_64_intdigest(pair, _XXH3_SEED)
        hashes.append(SequenceHash(chained))
    return hashes


class TokensWithHashes:
    """Token ids with their XXH3 block and sequence hashes, computed at first use and cached.

    The ids are copied (read-only uint32), so that the cached hashes stay valid. Arguments and
    errors as in `compute_block_hash_for_seq`; invalid `block_mm_infos` raise at first use.
    """

    def __init__(
        self,
        tokens: TokenIdsLike,
        block_size: int,
        block_mm_infos: Sequence[BlockMedia | None] | None = None,
        lora_name: str | None = None,
        *,
        is_eagle: bool = False,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is below 1")
        self.tokens = _to_uint32_array(tokens, "tokens").copy()
        self.tokens.flags.writeable = False
        self.block_size = block_size
        self._block_mm_infos = tuple(block_mm_infos or ())
        self._lora_name = lora_name
        self._is_eagle = is_eagle

    def __len__(self) -> int:
        """Returns the number of tokens, the partial tail included."""
        return len(self.tokens)

    @cached_property
    def block_hashes(self) -> tuple[LocalBlockHash, ...]:
        """The local hash of each full block."""
        infos, lora, is_eagle = self._block_mm_infos, self._lora_name, self._is_eagle
        return tuple(
            compute_block_hash_for_seq(self.tokens, self.block_size, infos, lora, is_eagle=is_eagle)
        )

    @cached_property
    def seq_hashes(self) -> tuple[SequenceHash, ...]:
        """The sequence hash of each full block."""
        return tuple(compute_seq_hashes(self.block_hashes))


def _derive_seeds(mesh_key: bytes, block_size: int, names: tuple[str, str, str]) -> tuple[int, int]:
    """Returns the multiplier and the position seed of a hasher."""
    # Hashing the key first admits keys of any length; BLAKE2b itself takes at most 64 bytes.
    digest = hashlib.blake2b(
        struct.pack("<QQ", HASH_SCHEME_ID, block_size),
        key=hashlib.blake2b(mesh_key).digest(),
        digest_size=16,
        person=b"kvmesh-prefix",
    )
    for name in names:
        # Lengths distinguish ("ab", "c") from ("a", "bc"). Salts come from clients as JSON, which
        # may contain lone surrogates.
        encoded = name.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(encoded)) + encoded)
    multiplier_seed, position_seed = struct.unpack("<QQ", digest.digest())
    return multiplier_seed, position_seed


def _splitmix64_stream(seed: int, start: int, stop: int) -> NDArray[np.uint64]:
    """Returns elements start..stop-1 of the SplitMix64 stream of `seed`."""
    # Not numpy's generators: hashes must not change with a numpy version.
    counters = np.arange(start + 1, stop + 1, dtype=np.uint64)
    counters *= np.uint64(_GOLDEN_GAMMA)
    counters += np.uint64(seed)
    return _splitmix64_finalize(counters)


def _splitmix64_finalize(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the SplitMix64 finaliser (a bijection on 64 bits) to each element; returns `x`."""
    x ^= x >> _SHIFT_1
    x *= _FACTOR_1
    x ^= x >> _SHIFT_2
    x *= _FACTOR_2
    x ^= x >> _SHIFT_3
    return x


def _to_uint32_array(token_ids: TokenIdsLike, name: str) -> NDArray[np.uint32]:
    """Returns token ids as a 1-D uint32 array, without a copy if possible."""
    if isinstance(token_ids, np.ndarray):
        return _validate_array(token_ids, name)
    if isinstance(token_ids, bytes | bytearray | memoryview):
        view = memoryview(token_ids)
        if not view.c_contiguous:
            raise ValueError(f"{name}: must be a contiguous buffer")
        if view.nbytes % 4:
            raise ValueError(f"{name}: {view.nbytes} bytes are not a multiple of 4")
        return np.frombuffer(token_ids, dtype="<u4").astype(np.uint32, copy=False)
    try:
        # About three times as fast as numpy on a list; raises for floats, which numpy rounds.
        packed = array.array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"{name}: must be integers in 0..2^32-1 ({error})") from error
    return np.frombuffer(packed, dtype=np.uintc).astype(np.uint32, copy=False)


def _validate_array(token_ids: NDArray[Any], name: str) -> NDArray[np.uint32]:
    if token_ids.ndim != 1:
        raise ValueError(f"{name}: must have one dimension, not {token_ids.ndim}")
    if token_ids.dtype == np.uint32:
        return token_ids
    if token_ids.dtype.kind not in "iu":
        raise ValueError(f"{name}: must be integers, not {token_ids.dtype}")
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) <= 0xFFFFFFFF:
        raise ValueError(f"{name}: must be integers in 0..2^32-1")
    return token_ids.astype(np.uint32)


def _require_uint64(name: str, value: int) -> None:
    if not 0 <= value <= _U64_MAX:
        raise ValueError(f"{name}: {value} is not in 0..2^64-1")
