"""Requests of a trace: the formats, and changes of arrival times (pure but for `load_trace`).

Formats, also with the suffix `.gz`:

- `.jsonl`: one object a line with `timestamp` (ms), `input_length`, `output_length` (tokens) and
  `hash_ids`: one id for each block of the prompt. An id names a block together with its whole
  prefix. Mooncake publishes this format with blocks of 512 tokens; `--request-trace` of a mesh
  writes it too.
- `.csv`: columns `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure). Prompts share nothing.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path

# Names of blocks that no other prompt has. Ids of traces are below.
PRIVATE_NAMES = 1 << 48
# Full blocks that a prompt must have to be continued: fewer may be an instruction of many.
SESSION_BLOCKS_MIN = 2


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """at_s: arrival in seconds. hash_ids: of the full blocks of the prompt; the rest is private."""

    at_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: int = 0
    """Number of its conversation, from 1; 0: unknown."""

    tenant: str = ""
    level: int = 0
    """Strict priority."""

    ttft_target_s: float | None = None
    """Target that the router receives; None: none."""


class TraceError(Exception):
    """A trace that cannot be read; the text names the file and the line."""


def load_trace(path: Path) -> list[TraceRequest]:
    """Returns the requests of a file, from second 0 on, in order of arrival. Raises TraceError."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise TraceError(f"{path}: {error}") from None
    format_name = path.name.removesuffix(".gz").rsplit(".", 1)[-1]
    read = {"jsonl": _read_jsonl, "csv": _read_csv}.get(format_name)
    if read is None:
        raise TraceError(f"{path}: the name must end in .jsonl or .csv, or these with .gz")
    requests: list[TraceRequest] = []
    rows = read(io.StringIO(text, newline=""))
    try:
        requests.extend(rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise TraceError(f"{path}: request {len(requests) + 1}: {reason}") from None
    if not requests:
        raise TraceError(f"{path}: it has no requests")
    requests.sort(key=lambda request: request.at_s)
    first_s = requests[0].at_s
    return [replace(request, at_s=request.at_s - first_s) for request in requests]


def _read_jsonl(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for line in lines:
        if line.strip():
            row = json.loads(line)
            yield TraceRequest(
                float(row["timestamp"]) / 1000.0,
                max(1, int(row["input_length"])),
                max(1, int(row["output_length"])),
                tuple(int(hash_id) for hash_id in row.get("hash_ids", ())),
            )


def _read_csv(lines: Iterable[str]) -> Iterator[TraceRequest]:
    for row in csv.DictReader(lines):
        # Seven digits of a second; Python reads six.
        stamp = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield TraceRequest(
            stamp, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"]))
        )


def with_sessions(requests: Sequence[TraceRequest], block_size: int) -> list[TraceRequest]:
    """Returns the requests with the conversations that their prompts show: a prompt that begins
    with all full blocks of an earlier one, at least SESSION_BLOCKS_MIN of them, is its next turn.
    """
    ends: dict[int, int] = {}
    found: list[TraceRequest] = []
    sessions = 0
    for request in requests:
        full = request.hash_ids[: request.input_tokens // block_size]
        end = next((name for name in reversed(full) if name in ends), None)
        if end is None:
            sessions += 1
        session = sessions if end is None else ends.pop(end)
        if len(full) >= SESSION_BLOCKS_MIN:
            ends[full[-1]] = session
        found.append(replace(request, session=session))
    return found


def at_speed(requests: Sequence[TraceRequest], speed: float) -> list[TraceRequest]:
    """Returns the requests at `speed` times the arrival rate."""
    return [replace(request, at_s=request.at_s / speed) for request in requests]


def with_block_size(
    requests: Sequence[TraceRequest], old_size: int, new_size: int
) -> list[TraceRequest]:
    """Returns the requests with names for blocks of `new_size` tokens, which divides `old_size`."""
    if new_size == old_size:
        return list(requests)
    parts = old_size // new_size
    numbers: dict[int, int] = {}
    found: list[TraceRequest] = []
    for request in requests:
        firsts = (numbers.setdefault(name, len(numbers)) * parts for name in request.hash_ids)
        names = tuple(first + part for first in firsts for part in range(parts))
        found.append(replace(request, hash_ids=names))
    return found


def largest_batch(requests: Sequence[TraceRequest]) -> int:
    """Returns the greatest number of requests with one arrival time."""
    return max(
        sum(1 for _ in group) for _, group in groupby(requests, lambda request: request.at_s)
    )


def spread_arrivals(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Returns requests with batches of equal arrival times spread evenly until the next batch."""
    batches = [list(group) for _, group in groupby(requests, lambda request: request.at_s)]
    spread: list[TraceRequest] = []
    gap_s = 0.0
    for number, batch in enumerate(batches):
        start_s = batch[0].at_s
        if number + 1 < len(batches):
            gap_s = batches[number + 1][0].at_s - start_s
        step_s = gap_s / len(batch)
        spread += [replace(request, at_s=start_s + at * step_s) for at, request in enumerate(batch)]
    return spread
