"""Plans: speeds from measured latencies, and the fewest workers of a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replay.engine import WorkerSettings
from replay.plan import fit as fit_module
from replay.plan.__main__ import main
from replay.plan.search import Fleet, Targets, cheapest, fewest, fleets, predict, search
from replay.plan.speeds import Capacity, Speeds, SpeedsError, fit, parse_speeds
from replay.trace import TraceRequest, with_block_size

SPEEDS = Speeds(0.006, 1 / 12_000, 20e-6, 0.003)
WORKER = WorkerSettings()


def arrivals(rate: float, count: int, output_tokens: int = 20) -> list[TraceRequest]:
    return [TraceRequest(n / rate, 4000, output_tokens) for n in range(count)]


def test_the_speeds_of_an_engine_are_found_from_its_latencies() -> None:
    prompts = [(n, 0.003 + 0.006 + 20e-6 + n / 12_000) for n in (64, 512, 2048, 4096)]
    decodes = [(n, 112, 0.006 + 20e-6 * n) for n in (1, 4, 16, 32)]
    found = fit(prompts, decodes)
    assert found.base_s == pytest.approx(0.006, rel=0.01)
    assert found.prefill_token_s == pytest.approx(1 / 12_000, rel=0.01)
    assert found.decode_seq_s == pytest.approx(20e-6, rel=0.01)
    assert found.outside_s == pytest.approx(0.003, rel=0.02)
    assert found.kv_token_s == 0.0
    assert parse_speeds(found.to_json()) == found


def test_what_reading_the_cache_costs_is_found_from_long_contexts() -> None:
    decodes = [(n, 112, 0.006 + n * (20e-6 + 112e-8)) for n in (1, 4, 16, 32)]
    decodes += [(n, 2096, 0.006 + n * (20e-6 + 2096e-8)) for n in (8, 32)]
    found = fit([(64, 0.01), (4096, 0.35)], decodes)
    assert found.kv_token_s == pytest.approx(1e-8, rel=0.01)
    assert found.decode_seq_s == pytest.approx(20e-6, rel=0.01)
    (alone,) = arrivals(1.0, 1, 50)
    slow, _ = predict(Fleet(aggregated=1), [alone], found, WORKER)
    quick, _ = predict(Fleet(aggregated=1), [alone], replace(found, kv_token_s=0.0), WORKER)
    assert slow.itl_p50_s - quick.itl_p50_s == pytest.approx(4025e-8, rel=0.01)


@pytest.mark.parametrize("is_mixed", [True, False])
def test_pauses_show_whether_prompts_share_steps_with_tokens(is_mixed: bool) -> None:
    prompts = [(n, 0.006 + n / 12_000) for n in (64, 4096)]
    decodes = [(n, 112, 0.006 + 20e-6 * n) for n in (1, 32)]

    def pause(tokens: int) -> tuple[int, float]:
        chunk = min(tokens, 2048) if is_mixed else tokens
        steps = 1 if is_mixed else 1 + -(-tokens // 2048)
        return tokens, steps * 0.006 + chunk / 12_000

    stated = Capacity(chunk_tokens=2048)
    assert fit(prompts, decodes, [pause(12_288)], stated).is_mixed == is_mixed
    short = fit(prompts, decodes, [pause(512), pause(2048)], stated)
    assert (short.is_mixed, short.chunk_tokens) == (is_mixed, 2048)
    assert fit(prompts, decodes, [pause(512), pause(2048)]).is_mixed == is_mixed
    assert parse_speeds(short.to_json()) == short


def test_prompts_in_steps_of_their_own_stop_all_streams() -> None:
    requests = [TraceRequest(n * 0.5, 8000, 100) for n in range(20)]
    mixed = replace(SPEEDS, chunk_tokens=512)
    first = replace(mixed, is_mixed=False)
    itls = [
        predict(Fleet(aggregated=1), requests, one, WORKER)[0].itl_p95_s for one in (mixed, first)
    ]
    ttfts = [
        predict(Fleet(aggregated=1), requests, one, WORKER)[0].ttft_p95_s for one in (mixed, first)
    ]
    assert itls[0] < itls[1] * 1.1
    assert ttfts[1] < ttfts[0]


def test_a_worker_has_the_cache_and_the_requests_that_it_advertises() -> None:
    """Ten requests of 1,000 tokens; the cache has room for four of them, or four may run."""
    requests = [TraceRequest(0.0, 900, 100) for _ in range(10)]
    free, _ = predict(Fleet(aggregated=1), requests, SPEEDS, Capacity().settings(None, 512))
    for capacity in (Capacity(250, 16), Capacity(3000, 512, requests=4)):
        worker = capacity.settings(None, 512)
        limited, _ = predict(Fleet(aggregated=1), requests, SPEEDS, worker)
        assert limited.ttft_p95_s > free.ttft_p95_s + 0.5
    assert Capacity(250, 16).settings(None, 512) == WorkerSettings(250, 16, 256)
    assert Capacity(250, 48).settings(None, 512) == WorkerSettings(750, 16, 256)
    assert Capacity(250, 16, 4).settings(100, 512) == WorkerSettings(100, 512, 4)
    assert Capacity(250).settings(None, 64) == WorkerSettings(3000, 64, 256)
    for wrong in ({"blocks": 0}, {"requests": "4"}, {"slots": 1}):
        with pytest.raises(SpeedsError, match="no speeds"):
            parse_speeds(json.dumps({**json.loads(SPEEDS.to_json()), "capacity": wrong}))


def test_named_blocks_of_a_trace_become_smaller_ones() -> None:
    requests = [TraceRequest(0.0, 1100, 1, (7, 9)), TraceRequest(1.0, 600, 1, (7,))]
    first, second = with_block_size(requests, 512, 256)
    assert len(first.hash_ids) == len(set(first.hash_ids)) == 4
    assert second.hash_ids == first.hash_ids[:2]
    assert with_block_size(requests, 512, 512) == requests


def test_noise_makes_no_speed_negative() -> None:
    flat = fit([(64, 0.02), (4096, 0.019)], [(1, 112, 0.010), (8, 112, 0.009)])
    assert (flat.prefill_token_s, flat.decode_seq_s) == (0.0, 0.0)
    steep = fit([(64, 0.001), (4096, 0.9)], [(1, 112, 0.001), (32, 112, 0.5)])
    assert min(steep.base_s, steep.outside_s) == 0.0


@pytest.mark.parametrize("points", [[], [(64, 0.1)], [(64, 0.1), (64, 0.2)], [(1, 0.0), (2, 0.1)]])
def test_latencies_of_one_size_are_no_speed(points: list[tuple[int, float]]) -> None:
    with pytest.raises(SpeedsError, match="at least two"):
        fit(points, [(1, 112, 0.01), (2, 112, 0.02)])


@pytest.mark.parametrize("text", ["", "[]", '{"base_s": 1}', '{"a": 1}', '{"base_s": "x"}'])
def test_a_file_without_speeds_is_refused(text: str) -> None:
    with pytest.raises(SpeedsError, match="no speeds"):
        parse_speeds(text)


def test_a_plan_has_the_fewest_workers_that_meet_the_targets() -> None:
    """6 prompts a second take 2 s of work a second: two workers are always late."""
    requests = arrivals(6.0, 180)
    targets = Targets(1.0, 0.2)
    found = list(search(requests, SPEEDS, WORKER, targets, 8, splits=False))
    best = cheapest(found, targets)
    assert best is not None
    assert best.fleet == Fleet(aggregated=3)
    assert [one.fleet.workers for one in found] == [1, 2, 3]
    assert fewest(requests, SPEEDS, Targets(0.0, 0.2)) == 2


def test_prompts_that_arrive_at_once_have_until_the_target() -> None:
    """12 prompts take 4 s of work."""
    requests, targets = arrivals(1000.0, 12), Targets(6.0, 10.0)
    (found,) = search(requests, SPEEDS, WORKER, targets, 8, splits=False)
    assert found.fleet == Fleet(aggregated=1)
    assert found.meets(targets)


def test_split_workers_win_where_a_prompt_may_not_delay_tokens() -> None:
    requests = arrivals(2.8, 60, 600)
    targets = Targets(1.0, 0.0065)
    found = list(search(requests, SPEEDS, WORKER, targets, 4, splits=True))
    best = cheapest(found, targets)
    assert best is not None
    assert best.fleet.prefill > 0
    assert not any(one.meets(targets) for one in found if one.fleet.aggregated)


def test_targets_that_no_fleet_meets_give_no_plan() -> None:
    targets = Targets(0.001, 0.001)
    found = list(search(arrivals(1.0, 20), SPEEDS, WORKER, targets, 3, splits=True))
    assert cheapest(found, targets) is None
    assert len(found) == sum(len(list(fleets(count, splits=True))) for count in (1, 2, 3))


def test_what_is_outside_of_the_engine_counts_in_the_time_to_the_first_token() -> None:
    (alone,) = arrivals(1.0, 1)
    outside = Speeds(0.006, 1 / 12_000, 20e-6, 0.5)
    near, _ = predict(Fleet(aggregated=1), [alone], SPEEDS, WORKER)
    far, _ = predict(Fleet(aggregated=1), [alone], outside, WORKER)
    assert far.ttft_p95_s - near.ttft_p95_s == pytest.approx(0.497)


def test_the_command_prints_a_plan_and_its_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, speeds = tmp_path / "trace.jsonl", tmp_path / "speeds.json"
    rows = [
        {"timestamp": n * 500, "input_length": 4000, "output_length": 20, "hash_ids": []}
        for n in range(40)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    speeds.write_text(SPEEDS.to_json())
    flags = [str(trace), "--speeds", str(speeds), "--itl-s", "1"]
    assert main([*flags, "--ttft-s", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"]["fleet"] == {"aggregated": 1, "prefill": 0, "decode": 0}
    assert main([*flags, "--ttft-s", "1"]) == 0
    assert "1 aggregated: the fewest workers" in capsys.readouterr().out
    assert main([*flags, "--ttft-s", "0.001", "--max-workers", "2"]) == 1
    assert "no fleet of up to 2 workers" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*flags, "--ttft-s", "1", "--speed", "0"])
    assert "--speed must be above 0, not 0" in capsys.readouterr().err
    speeds.write_text("")
    with pytest.raises(SystemExit):
        main([*flags, "--ttft-s", "1"])
    assert "no speeds" in capsys.readouterr().err


def test_measured_latencies_become_a_file_of_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(text: str) -> int:
        stdin: Any = type("In", (), {"read": staticmethod(lambda: text)})
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("sys.argv", ["fit", str(tmp_path / "speeds.json")])
        return fit_module.main()

    assert (
        run('{"prompts": [[64, 0.01], [640, 0.06]], "decodes": [[1, 112, 0.006], [8, 112, 0.007]]}')
        == 0
    )
    assert parse_speeds((tmp_path / "speeds.json").read_text()).prefill_token_s > 0
    assert run('{"prompts": [], "decodes": []}') == 2
    assert "at least two" in capsys.readouterr().err
