"""Token ids as a value. Pure."""

from __future__ import annotations

import reprlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

TOKEN_ID_MAX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class TokenIds(Sequence[int]):
    """Token ids, stored as 4 bytes little endian each, which is also their wire form."""

    little_endian: bytes = b""

    def __post_init__(self) -> None:
        assert len(self.little_endian) % 4 == 0, "token ids are 4 bytes each"

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        """Returns the ids as a value. Raises OverflowError or TypeError for any id but a u32."""
        if isinstance(ids, TokenIds):
            return ids
        if isinstance(ids, np.ndarray):
            is_integer = ids.dtype.kind in "iu"
            if ids.size and not (is_integer and ids.min() >= 0 and ids.max() <= TOKEN_ID_MAX):
                raise OverflowError(f"token ids are integers from 0 to {TOKEN_ID_MAX}")
            return cls(ids.astype("<u4").tobytes())
        values = array("I", ids)
        if sys.byteorder == "big":
            values.byteswap()
        return cls(values.tobytes())

    @property
    def array(self) -> npt.NDArray[np.uint32]:
        """The ids as a read-only view, shape [tokens]."""
        return np.frombuffer(self.little_endian, dtype="<u4")

    @property
    def largest(self) -> int:
        """The largest id. Raises ValueError without ids."""
        return int(np.maximum.reduce(self.array))  # `max` of an array takes twice as long

    def tolist(self) -> list[int]:
        ids: list[int] = self.array.tolist()
        return ids

    def extended(self, ids: Iterable[int]) -> TokenIds:
        """Returns these ids followed by `ids`."""
        return TokenIds(self.little_endian + TokenIds.of(ids).little_endian)

    def __len__(self) -> int:
        return len(self.little_endian) // 4

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...
    def __getitem__(self, index: int | slice) -> int | TokenIds:
        if isinstance(index, slice):
            return TokenIds(self.array[index].tobytes())
        return int(self.array[index])

    def __repr__(self) -> str:
        return f"TokenIds({reprlib.repr(self[:7].tolist())}, len={len(self)})"
