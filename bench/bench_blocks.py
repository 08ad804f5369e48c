"""Measure block hashing; print one JSON line.

    PYTHONPATH=protos:. python bench/bench_blocks.py [--block-size 16] [--repeats 15]

Figures are microseconds per call: the median of `--repeats` samples; a sample is as many calls as
fill 20 ms. The prefix hash is timed by form of input (array, wire bytes, list of ints) and output
(array, list of ints), the XXH3 loop on the same prompts.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable

import numpy as np

from bench.measure import parse_settings, print_report
from common.kv.hashing import (
    DEFAULT_BLOCK_SIZE,
    HASH_SCHEME_ID,
    ChainState,
    PrefixHasher,
    compute_block_hash_for_seq,
    compute_seq_hashes,
)

PROMPT_TOKENS = (8_192, 131_072)
VOCABULARY = 150_000
SAMPLE_S = 0.02


def main() -> None:
    settings = parse_settings(__doc__, block_size=DEFAULT_BLOCK_SIZE, repeats=15)
    result = {
        "numpy": np.__version__,
        "unit": "us per call, median",
        "prompt_tokens": {
            str(tokens): prompt_figures(tokens, settings.block_size, settings.repeats)
            for tokens in PROMPT_TOKENS
        },
        "single": single_figures(settings.block_size, settings.repeats),
    }
    parameters = {"scheme": HASH_SCHEME_ID, **vars(settings), "sample_s": SAMPLE_S}
    print_report("blocks", parameters, result)


def prompt_figures(tokens: int, block_size: int, repeats: int) -> dict[str, float]:
    """Time each hash variant on a random prompt of `tokens` token ids."""
    array = np.random.default_rng(1).integers(0, VOCABULARY, tokens, dtype=np.uint32)
    wire, ints = array.astype("<u4").tobytes(), array.tolist()
    hasher = new_hasher(block_size)
    variants: dict[str, Callable[[], object]] = {
        "prefix_from_array": lambda: hasher.prefix_hashes(array),
        "prefix_from_bytes": lambda: hasher.prefix_hashes(wire),
        "prefix_from_list": lambda: hasher.prefix_hashes(ints),
        "prefix_from_array_to_ints": lambda: hasher.prefix_hashes(array).tolist(),
        "xxh3_local": lambda: compute_block_hash_for_seq(wire, block_size),
        "xxh3_local_and_sequence": lambda: compute_seq_hashes(
            compute_block_hash_for_seq(wire, block_size)
        ),
    }
    return {name: median_us(variant, repeats) for name, variant in variants.items()}


def single_figures(block_size: int, repeats: int) -> dict[str, float]:
    """Time the work per decoded block and per new (model, adapter, salt)."""
    hasher, block = new_hasher(block_size), np.arange(block_size, dtype=np.uint32)
    state = ChainState(position=511, total=12_345)
    return {
        "extend_by_one_block": median_us(lambda: hasher.extend(state, block), repeats),
        "new_hasher": median_us(lambda: new_hasher(block_size), repeats),
        "new_hasher_and_one_block": median_us(
            lambda: new_hasher(block_size).prefix_hashes(block), repeats
        ),
    }


def new_hasher(block_size: int) -> PrefixHasher:
    return PrefixHasher(mesh_key=b"bench", model="bench-model", block_size=block_size)


def median_us(call: Callable[[], object], repeats: int) -> float:
    timer = timeit.Timer(call)
    calls = max(1, int(SAMPLE_S / max(timer.timeit(3) / 3, 1e-7)))
    return round(statistics.median(timer.repeat(repeats, calls)) / calls * 1e6, 2)


if __name__ == "__main__":
    main()
