"""Bytes that are kept have no spare room."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from frontend_svc.embeddings.body import embedding_entry
from frontend_svc.openai.output.json_bytes import compact_json
from frontend_svc.responses.schema import MessageItem
from frontend_svc.responses.translation import stored_items


@pytest.mark.parametrize(
    "build",
    [
        lambda: compact_json({"output": "x" * 3000}),
        lambda: stored_items([MessageItem(role="user", content="x" * 3000)], "resp_1")[0],
        lambda: embedding_entry(0, np.arange(600, dtype=np.float32), None),
    ],
    ids=["a response", "an input item", "a vector"],
)
def test_kept_json_has_the_memory_of_its_length(build: Callable[[], bytes]) -> None:
    build()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = [build() for _ in range(100)]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept[0]) > 2000
    assert (after - before) / 100 < 1.2 * len(kept[0]) + 200
