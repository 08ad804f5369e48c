"""Plans: speeds from measured latencies, and the fewest workers of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replay.engine import WorkerSettings
from replay.plan import fit as fit_module
from replay.plan.__main__ import main
from replay.plan.search import Fleet, Targets, cheapest, fewest, fleets, predict, search
from replay.plan.speeds import Speeds, SpeedsError, fit, parse_speeds
from replay.trace import TraceRequest

SPEEDS = Speeds(0.006, 1 / 12_000, 20e-6, 0.003)
WORKER = WorkerSettings()


def arrivals(rate: float, count: int, output_tokens: int = 20) -> list[TraceRequest]:
    return [TraceRequest(n / rate, 4000, output_tokens) for n in range(count)]


def test_the_speeds_of_an_engine_are_found_from_its_latencies() -> None:
    prompts = [(n, 0.003 + 0.006 + 20e-6 + n / 12_000) for n in (64, 512, 2048, 4096)]
    decodes = [(n, 0.006 + 20e-6 * n) for n in (1, 4, 16, 32)]
    found = fit(prompts, decodes)
    assert found.base_s == pytest.approx(0.006, rel=0.01)
    assert found.prefill_token_s == pytest.approx(1 / 12_000, rel=0.01)
    assert found.decode_seq_s == pytest.approx(20e-6, rel=0.01)
    assert found.outside_s == pytest.approx(0.003, rel=0.02)
    assert parse_speeds(found.to_json()) == found


def test_noise_makes_no_speed_negative() -> None:
    flat = fit([(64, 0.02), (4096, 0.019)], [(1, 0.010), (8, 0.009)])
    assert (flat.prefill_token_s, flat.decode_seq_s) == (0.0, 0.0)
    steep = fit([(64, 0.001), (4096, 0.9)], [(1, 0.001), (32, 0.5)])
    assert min(steep.base_s, steep.outside_s) == 0.0


@pytest.mark.parametrize("points", [[], [(64, 0.1)], [(64, 0.1), (64, 0.2)], [(1, 0.0), (2, 0.1)]])
def test_latencies_of_one_size_are_no_speed(points: list[tuple[int, float]]) -> None:
    with pytest.raises(SpeedsError, match="at least two"):
        fit(points, [(1, 0.01), (2, 0.02)])


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

    assert run('{"prompts": [[64, 0.01], [640, 0.06]], "decodes": [[1, 0.006], [8, 0.007]]}') == 0
    assert parse_speeds((tmp_path / "speeds.json").read_text()).prefill_token_s > 0
    assert run('{"prompts": [], "decodes": []}') == 2
    assert "at least two" in capsys.readouterr().err
