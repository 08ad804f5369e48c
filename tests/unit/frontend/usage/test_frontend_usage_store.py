"""The records of use: sums by hour that survive their process, are bounded and lose nothing
silently."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.errors import InvalidRequest, Unavailable
from common.runtime.config import ConfigError
from common.usage import (
    DAY_S,
    DIMENSIONS,
    HOUR_S,
    UsageBucket,
    UsageCounts,
    UsageKey,
    UsageQuery,
    total,
)
from frontend_svc.app import _open_usage
from frontend_svc.config import FrontendConfig
from frontend_svc.endpoints.query import parse_query
from frontend_svc.routes.usage import UsageParameters, usage_query
from frontend_svc.usage import ledger, store
from frontend_svc.usage.ledger import OTHER_KEY, UsageCollector, UsageLedger
from frontend_svc.usage.store import MEMORY, UsageStore
from tests.kit.waiting import wait_for

# An hour of a day, at which both begin.
MIDNIGHT_S = 20_000 * DAY_S
ONE = UsageCounts(1, 0, 10, 4, 3)
KEY = UsageKey("acme", "key_1", "m")


@contextmanager
def opened(path: str | Path = MEMORY, days: int = 90) -> Iterator[UsageStore]:
    records = UsageStore(str(path), days)
    try:
        yield records
    finally:
        records.close(5.0)


def query(
    start_s: int = MIDNIGHT_S, hours: int = 24, width_s: int = HOUR_S, **more: int
) -> UsageQuery:
    end_s = start_s + hours * HOUR_S
    return UsageQuery(start_s, end_s, width_s, DIMENSIONS, **{"limit": 168, **more})


def written(records: UsageStore, requests: int) -> bool:
    return records.written == requests


def sums(records: UsageStore, **more: int) -> dict[UsageKey, UsageCounts]:
    return total(records.read(query(**more)).buckets)


def test_requests_are_summed_by_hour_and_key() -> None:
    other = UsageKey("acme", "key_1", "m", "french")
    with opened() as records:
        for at_s in (0, HOUR_S - 1, HOUR_S):
            records.put(KEY, ONE, MIDNIGHT_S + at_s)
        records.put(other, ONE, MIDNIGHT_S)
        first, second, *rest = records.read(query()).buckets
        assert dict(first.results) == {KEY: ONE + ONE, other: ONE}
        assert dict(second.results) == {KEY: ONE}
        assert len(rest) == 22, "hours without requests are buckets, too"
        assert not any(bucket.results for bucket in rest)
        (day,) = records.read(query(width_s=DAY_S)).buckets
        assert (day.start_s, day.end_s) == (MIDNIGHT_S, MIDNIGHT_S + DAY_S)
        assert total([day], ("adapter",)) == {
            UsageKey(): ONE + ONE + ONE,
            UsageKey(adapter="french"): ONE,
        }


def test_a_file_continues_after_a_restart_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as records:
        records.put(KEY, ONE, MIDNIGHT_S)
        source = records.source
        wait_for(lambda: (tmp_path / "usage.db-wal").exists(), "it is written")
        modes = {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
        assert modes == {0o600}
    with opened(path) as records:
        assert records.source == source
        records.put(KEY, ONE, MIDNIGHT_S)
        assert sums(records) == {KEY: ONE + ONE}


def test_what_is_written_needs_no_close(tmp_path: Path) -> None:
    """A killed process closes nothing."""
    path = tmp_path / "usage.db"
    with opened(path) as records, opened(path) as reader:
        for number in range(1, 4):
            records.put(KEY, ONE, MIDNIGHT_S)
            wait_for(partial(written, records, number), "it is written")
            assert sums(reader)[KEY].requests == number


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with ExitStack() as stack:
        stores = [stack.enter_context(opened(path)) for _ in range(4)]
        assert len({records.source for records in stores}) == 1
        for number in range(400):
            stores[number % 4].put(KEY, ONE, MIDNIGHT_S + number)
    with opened(path) as records:
        assert sums(records)[KEY] == UsageCounts(400, 0, 4000, 1600, 1200)
    assert sum(records.written for records in stores) == 400


def test_records_are_kept_for_the_configured_days() -> None:
    with opened(days=2) as records:
        records.put(KEY, ONE, MIDNIGHT_S)
        records.put(KEY, ONE, MIDNIGHT_S + HOUR_S)
        assert sums(records)[KEY].requests == 2
        records.put(KEY, ONE, MIDNIGHT_S + 2 * DAY_S + HOUR_S)
        assert sums(records, hours=72)[KEY].requests == 2, "the first hour is removed"


def test_a_disk_that_refuses_delays_records_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(store, "LOCK_TIMEOUT_S", 0.01)
    path = tmp_path / "usage.db"
    with opened(path) as records:
        with closing(sqlite3.connect(path)) as other:
            other.execute("BEGIN IMMEDIATE")
            records.put(KEY, ONE, MIDNIGHT_S)
            with pytest.raises(Unavailable, match="locked"):
                records.read(query())
            records.put(KEY, ONE, MIDNIGHT_S)
            assert records.written == 0
            other.rollback()
        wait_for(lambda: records.written == 2, "the records are written")
        assert sums(records) == {KEY: ONE + ONE}
        assert records.dropped == 0


def test_records_that_cannot_be_kept_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PENDING_MAX", 2)
    monkeypatch.setattr(store, "LOCK_TIMEOUT_S", 0.01)
    path = tmp_path / "usage.db"
    with closing(sqlite3.connect(path)) as other, opened(path) as records:
        other.execute("BEGIN IMMEDIATE")
        for number in range(100):
            records.put(UsageKey(f"tenant-{number}"), ONE, MIDNIGHT_S)
        assert 0 < records.dropped < 100
        records.close(5.0)
        assert (records.written, records.dropped) == (0, 100)


def test_a_file_of_a_newer_version_or_that_is_none_is_refused(tmp_path: Path) -> None:
    newer, none = tmp_path / "newer.db", tmp_path / "none.db"
    with closing(sqlite3.connect(newer)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(sqlite3.DatabaseError, match="its version is 99"):
        UsageStore(str(newer), 1)
    none.write_bytes(b"no database, of any length that is large enough" * 20)
    with pytest.raises(sqlite3.DatabaseError):
        UsageStore(str(none), 1)
    with pytest.raises(OSError, match="No such file"):
        UsageStore(str(tmp_path / "missing" / "usage.db"), 1)


def test_a_setting_with_an_unusable_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "usage.db"
    with pytest.raises(ConfigError) as raised:
        _open_usage(FrontendConfig(usage_file=str(path)), None)
    (problem,) = raised.value.problems
    assert problem.startswith(f"--usage-file: '{path}' cannot be opened")


def test_pages_end_at_a_bucket_and_join_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RESULTS_MAX", 3)
    with opened() as records:
        for hour in range(5):
            for tenant in ("a", "b"):
                records.put(UsageKey(tenant), ONE, MIDNIGHT_S + hour * HOUR_S)
        whole = UsageQuery(MIDNIGHT_S, MIDNIGHT_S + DAY_S, HOUR_S, DIMENSIONS, limit=20)
        buckets, starts = list[UsageBucket](), list[int | None]([MIDNIGHT_S])
        # Ends: each page starts after the one before.
        while (start_s := starts[-1]) is not None:
            page = records.read(replace(whole, start_s=start_s))
            buckets += page.buckets
            starts.append(page.next_start_s)
        assert starts == [*(MIDNIGHT_S + hour * HOUR_S for hour in (0, 2, 4)), None]
        assert [bucket.start_s for bucket in buckets] == [
            MIDNIGHT_S + hour * HOUR_S for hour in range(24)
        ]
        assert total(buckets)[UsageKey("b")].requests == 5


def test_a_process_counts_a_bounded_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "KEYS_MAX", 3)
    with opened() as records:
        book = UsageLedger(records, lambda: float(MIDNIGHT_S))
        for number in range(100):
            book.add(UsageKey(adapter=f"a{number % 10}"), ONE)
        assert len(book.totals) == 4
        assert book.totals[OTHER_KEY].requests == 70
        assert sums(records) == book.totals, "the records are equal to the counters"
        registry = CollectorRegistry()
        registry.register(UsageCollector(book, "p"))
        text = generate_latest(registry).decode()
        assert (
            'p_usage_prompt_tokens_total{adapter="other",key="other",model="other",'
            'tenant="other"} 700.0' in text
        )
        assert text.count("p_usage_requests_total{") == 4


def test_the_query_has_the_parameters_of_openai() -> None:
    pairs = [("start_time", "7200"), ("group_by[]", "model"), ("group_by[]", "tenant")]
    parsed = usage_query(parse_query(UsageParameters, pairs), 90_000.5)
    assert parsed == UsageQuery(7200, 90_001, DAY_S, ("model", "tenant"), 7)
    more = [("bucket_width", "1h"), ("limit", "168"), ("page", "10800"), ("end_time", "14400")]
    parsed = usage_query(parse_query(UsageParameters, [*pairs, *more]), 0.0)
    assert parsed == UsageQuery(10_800, 14_400, HOUR_S, ("model", "tenant"), 168)
    days = usage_query(parse_query(UsageParameters, [*pairs, ("limit", "168")]), 0.0)
    assert days.limit == 31
    own = parse_query(UsageParameters, parsed.parameters)
    assert usage_query(own, 0.0) == parsed, "what readers send"


@pytest.mark.parametrize(
    ("pairs", "field"),
    [
        ([], "start_time"),
        ([("start_time", "yesterday")], "start_time"),
        ([("start_time", "-1")], "start_time"),
        ([("start_time", "0"), ("bucket_width", "1m")], "bucket_width"),
        ([("start_time", "0"), ("group_by", "user")], "group_by[0]"),
        ([("start_time", "0"), ("limit", "0")], "limit"),
        ([("start_time", "0"), ("models", "m")], "models"),
    ],
)
def test_a_parameter_that_is_not_served_is_refused_by_name(
    pairs: list[tuple[str, str]], field: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_query(UsageParameters, pairs)
    assert raised.value.field == field


def test_the_file_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write any file")
    path = tmp_path / "usage.db"
    path.touch(0o400)
    with pytest.raises(PermissionError):
        UsageStore(str(path), 1)
