"""What a plan is made from: live traffic, steps of an engine, and a check on a real mesh."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from replay.engine import WorkerSettings
from replay.plan import sample as sample_module
from replay.plan import traffic as traffic_module
from replay.plan.__main__ import main
from replay.plan.check import CheckError, compare
from replay.plan.sample import USE, sample
from replay.plan.search import REPLAYS, Fleet, Targets, predict
from replay.plan.speeds import CHUNK_TOKENS, Speeds, SpeedsError, fit, parse_speeds
from replay.plan.traffic import requests_like, to_lines
from replay.trace import TraceRequest, load_trace

SPEEDS = Speeds(0.006, 1 / 12_000, 20e-6, 0.003)
PROMPTS = [(n, 0.009 + n / 12_000) for n in (64, 4096)]
DECODES = [(n, 112, 0.006 + 20e-6 * n) for n in (1, 32)]
WORKER = WorkerSettings()
LIVE = {
    "seconds": 60.0,
    "prompts": {"buckets": [[50, 100, 30], [1000, 2000, 90]], "total": 30 * 80 + 90 * 1500},
    "outputs": {"buckets": [[50, 100, 120]], "total": 120 * 70},
    "cached_tokens": 60_000,
}


def trace_of(requests: list[TraceRequest], path: Path) -> Path:
    path.write_text(to_lines(requests))
    return path


def test_the_pause_of_a_stream_shows_the_size_of_a_step() -> None:
    """A prompt of 12,288 tokens in steps of 2,048."""
    pause_s = 0.006 + 2048 / 12_000
    assert fit(PROMPTS, DECODES, [(12_288, pause_s)]).chunk_tokens == 2048
    whole_s = 0.006 + 12_288 / 12_000
    assert fit(PROMPTS, DECODES, [(12_288, whole_s)]).chunk_tokens == 12_288
    short_s = 0.006 + 6144 / 12_000
    assert fit(PROMPTS, DECODES, [(6144, short_s)]).chunk_tokens == CHUNK_TOKENS
    assert fit(PROMPTS, DECODES).chunk_tokens == CHUNK_TOKENS
    assert parse_speeds(Speeds(1.0, 1.0, 1.0, 1.0, 512).to_json()).chunk_tokens == 512
    assert parse_speeds('{"base_s": 1, "prefill_token_s": 1, "decode_seq_s": 1}').outside_s == 0
    with pytest.raises(SpeedsError, match="chunk_tokens must be at least 1, not 0"):
        parse_speeds('{"base_s":1,"prefill_token_s":1,"decode_seq_s":1,"chunk_tokens":0}')


def test_a_picture_of_a_plan_is_drawn_or_the_library_for_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_of([TraceRequest(n * 0.5, 800, 10) for n in range(5)], tmp_path / "t.jsonl")
    speeds, picture = tmp_path / "speeds.json", tmp_path / "plan.png"
    speeds.write_text(SPEEDS.to_json())
    args = [str(trace), f"--speeds={speeds}", "--ttft-s=5", "--itl-s=1", f"--plot={picture}"]
    if find_spec("matplotlib"):
        assert main(args) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        return
    with pytest.raises(SystemExit):
        main(args)
    assert "pip install 'kvmesh[plot]'" in capsys.readouterr().err


def test_smaller_steps_pause_streams_for_less_time() -> None:
    requests = [TraceRequest(n * 0.5, 8000, 100) for n in range(20)]
    large, _ = predict(Fleet(aggregated=1), requests, SPEEDS, WorkerSettings(), replays=1)
    small = Speeds(*(SPEEDS.base_s, SPEEDS.prefill_token_s, SPEEDS.decode_seq_s), 0.003, 1024)
    divided, _ = predict(Fleet(aggregated=1), requests, small, WorkerSettings(), replays=1)
    assert divided.itl_p50_s != large.itl_p50_s
    assert divided.ttft_p50_s > large.ttft_p50_s


def test_a_prediction_has_the_range_of_its_replays() -> None:
    requests = [TraceRequest(n * 0.2, 2000, 40) for n in range(120)]
    many, _ = predict(Fleet(aggregated=2), requests, SPEEDS, WorkerSettings())
    low, high = many.ttft_p95_range_s
    assert REPLAYS > 1
    assert low <= many.ttft_p95_s <= high
    assert predict(Fleet(aggregated=2), requests, SPEEDS, WorkerSettings())[0] == many


def test_a_latency_that_no_request_has_is_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_of([TraceRequest(n * 1.0, 500, 1) for n in range(20)], tmp_path / "t.jsonl")
    speeds = tmp_path / "speeds.json"
    speeds.write_text(SPEEDS.to_json())
    flags = [str(trace), "--speeds", str(speeds), "--json"]

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    for targets in (["--ttft-s", "1"], ["--ttft-s", "1", "--itl-s", "1"], ["--itl-s", "1"]):
        assert main([*flags, *targets]) == 0
        best = json.loads(capsys.readouterr().out, parse_constant=refuse)["best"]
        assert best["itl_p95_s"] is None
        assert best["itl_p95_range_s"] == [None, None]
        assert best["fleet"]["aggregated"] == 1
    with pytest.raises(SystemExit):
        main(flags)
    assert "a target is needed: --ttft-s, --itl-s or both" in capsys.readouterr().err
    assert Targets() == Targets(None, None)


def test_live_traffic_becomes_requests_of_the_same_rate_lengths_and_hits() -> None:
    requests = requests_like(LIVE, 64)
    assert len(requests) / requests[-1].at_s == pytest.approx(2.0, rel=0.1)
    assert fmean(one.input_tokens for one in requests) == pytest.approx(1145, rel=0.01)
    assert fmean(one.output_tokens for one in requests) == pytest.approx(70, rel=0.02)
    common = sum(64 * len(one.hash_ids) for one in requests)
    assert common / sum(one.input_tokens for one in requests) == pytest.approx(60 / 137.4, rel=0.1)
    short = {**LIVE, "prompts": {"buckets": [[50, 100, 3]], "total": 240}}
    with pytest.raises(ValueError, match="3 requests in 60 s, fewer than 10"):
        requests_like(short, 64)


def test_the_tool_writes_a_trace_or_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "live.jsonl"

    def run(text: str) -> int:
        stdin: Any = type("In", (), {"read": staticmethod(lambda: text)})
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("sys.argv", ["traffic", str(path), "512"])
        return traffic_module.main()

    assert run(json.dumps(LIVE)) == 0
    assert len(load_trace(path)) == traffic_module.REQUESTS
    assert run("{}") == 2
    assert "meshctl plan:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fleet", "output_tokens"),
    [(Fleet(aggregated=2), 10), (Fleet(aggregated=2), 4000), (Fleet(prefill=2, decode=1), 4000)],
)
def test_a_sample_keeps_the_workers_busy_for_a_share_of_the_time(
    fleet: Fleet, output_tokens: int
) -> None:
    """A prompt takes 0.34 s, an output of 4,000 tokens as much or more."""
    requests = [TraceRequest(n * 7.0, 4000, output_tokens) for n in range(500)]
    found = sample(requests, SPEEDS, fleet, 20.0, WORKER)
    prompts_s = len(found) * (SPEEDS.base_s + 4000 * SPEEDS.prefill_token_s)
    at_once = min(256, 3000 * 512 / (4000 + output_tokens))
    outputs_s = len(found) * output_tokens * (SPEEDS.decode_seq_s + SPEEDS.base_s / at_once)
    pools = [prompts_s / 2, outputs_s] if fleet.prefill else [(prompts_s + outputs_s) / 2]
    assert max(pools) / 20 == pytest.approx(USE, rel=0.1)
    assert found[-1].at_s == pytest.approx(20.0)
    assert sample(requests[:1], SPEEDS, fleet, 1.0, WORKER) == requests[:1]


def test_a_sample_counts_how_few_requests_the_cache_has_room_for() -> None:
    requests = [TraceRequest(n * 1.0, 1000, 1000) for n in range(500)]
    large = sample(requests, SPEEDS, Fleet(aggregated=1), 99.0, WORKER)
    small = sample(requests, SPEEDS, Fleet(aggregated=1), 99.0, WorkerSettings(8, 500))
    # Two requests have room.
    outputs_s = len(small) * 1000 * (SPEEDS.decode_seq_s + SPEEDS.base_s / 2)
    prompts_s = len(small) * (SPEEDS.base_s + 1000 * SPEEDS.prefill_token_s)
    assert (prompts_s + outputs_s) / 99 == pytest.approx(USE, rel=0.1)
    assert len(large) > 2 * len(small)


def sample_of(trace: Path, speeds: Path) -> list[str]:
    return [str(trace), str(speeds), '{"aggregated": 1}', "5", "", "512"]


def test_the_tool_prints_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = trace_of([TraceRequest(n * 1.0, 4000, 10) for n in range(50)], tmp_path / "t.jsonl")
    speeds = tmp_path / "speeds.json"
    monkeypatch.setattr("sys.argv", ["sample", *sample_of(trace, speeds)])
    assert sample_module.main() == 2
    assert "speeds.json" in capsys.readouterr().err
    speeds.write_text(SPEEDS.to_json())
    assert sample_module.main() == 0
    assert json.loads(capsys.readouterr().out)[0] == [0.0, 4000, 10, []]


def test_a_check_compares_a_prediction_with_what_a_mesh_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: dict[str, Any] = {
        "fleet": {"aggregated": 1, "prefill": 0, "decode": 0},
        "requests": [[float(n), 1200, 10, []] for n in range(20)],
        "ttfts": [0.2] * 19,
        "itls": [],
    }
    found = compare(json.dumps(measured), SPEEDS, WORKER, 512)
    figure = found.figures["ttft_p95"]
    assert figure is not None
    assert figure.predicted_s == pytest.approx(0.109, rel=0.02)
    assert figure.error == pytest.approx(-0.455, abs=0.02)
    assert found.failed == 1
    assert found.figures["itl_p95"] is None
    path, trace = tmp_path / "check.json", tmp_path / "t.jsonl"
    path.write_text(json.dumps(measured))
    speeds = tmp_path / "speeds.json"
    speeds.write_text(SPEEDS.to_json())
    trace_of([TraceRequest(n * 1.0, 1200, 10) for n in range(20)], trace)
    flags = [str(trace), "--speeds", str(speeds), "--ttft-s", "1", "--check", str(path)]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert "Check: 20 requests on the running mesh, 1 aggregated, 1 failed" in shown
    assert "TTFT p95: measured 0.200 s, predicted 0.109 s (-45%)" in shown
    assert main([*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["check"]["figures"]["itl_p50"] is None
    for wrong in ("", "{}", json.dumps({**measured, "requests": []})):
        with pytest.raises(CheckError, match="no measured requests"):
            compare(wrong, SPEEDS, WORKER, 512)
