"""Prefix hashes for callers that send token ids, for example grpcurl."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from common.errors import InvalidRequest
from common.kv.hashing import BLOCK_SIZE_MAX, PrefixHasher, hashes_to_bytes

HASHERS_MAX = 64


class HasherCache:
    """Hashers by model, block size, adapter and cache salt; the HASHERS_MAX used last."""

    def __init__(self, mesh_key: bytes) -> None:
        self._mesh_key = mesh_key
        self._hashers: OrderedDict[tuple[str, int, str, str], PrefixHasher] = OrderedDict()

    def prefix_hashes(
        self,
        token_ids: Sequence[int],
        *,
        model: str,
        block_size: int,
        lora_name: str = "",
        cache_salt: str = "",
    ) -> bytes:
        """Returns prefix hashes, 8 B little endian each. Raises InvalidRequest for a bad block
        size."""
        if not 1 <= block_size <= BLOCK_SIZE_MAX:
            raise InvalidRequest(
                f"query.block_size {block_size} is not in 1..{BLOCK_SIZE_MAX}", "query.block_size"
            )
        key = (model, block_size, lora_name, cache_salt)
        if (hasher := self._hashers.get(key)) is None:
            hasher = self._hashers[key] = PrefixHasher(
                mesh_key=self._mesh_key,
                model=model,
                block_size=block_size,
                lora_name=lora_name,
                cache_salt=cache_salt,
            )
            if len(self._hashers) > HASHERS_MAX:
                self._hashers.popitem(last=False)
        self._hashers.move_to_end(key)
        return hashes_to_bytes(hasher.prefix_hashes(token_ids))
