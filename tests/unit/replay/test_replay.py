"""`python -m replay`: formats, workloads, the mesh in virtual time, and the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random

import pytest

from replay.__main__ import main
from replay.engine import WorkerSettings
from replay.mesh import MeshSettings, ReplayMesh, ReplayResult
from replay.policies import POLICIES
from replay.report import summarize
from replay.settings import parse_settings
from replay.trace import (
    TraceError,
    TraceRequest,
    at_speed,
    largest_batch,
    load_trace,
    spread_arrivals,
)
from replay.workloads import GENERATORS, generate
from worker_svc.engines.sim.config import SimHandoffConfig
from worker_svc.engines.sim.timing import Timing

ROW = {"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}


def replay(
    requests: list[TraceRequest], policy: str = "kv", settings: MeshSettings | None = None
) -> ReplayResult:
    return ReplayMesh(settings or MeshSettings(workers=2), POLICIES[policy]).run(requests)


def test_a_mooncake_trace_is_read_in_order_of_arrival_and_from_second_0(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    earlier = {**ROW, "timestamp": 500}
    path.write_bytes(gzip.compress(f"{json.dumps(ROW)}\n\n{json.dumps(earlier)}\n".encode()))
    assert load_trace(path) == [
        TraceRequest(0.0, 1100, 5, (7, 8, 9)),
        TraceRequest(1.5, 1100, 5, (7, 8, 9)),
    ]


def test_an_azure_trace_has_lengths_and_arrivals_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.1805900,396,0\n"
    )
    first, second = load_trace(path)
    assert first == TraceRequest(0.0, 374, 44)
    assert second.at_s == pytest.approx(1.5)
    assert (second.input_tokens, second.output_tokens) == (396, 1)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", '{"timestamp": 1}\n', "request 1: KeyError: 'input_length'"),
        ("a.jsonl", f"{json.dumps(ROW)}\nnot JSON\n", "request 2: JSONDecodeError"),
        ("a.jsonl", "[]\n", "request 1: TypeError"),
        ("a.csv", "TIMESTAMP,ContextTokens\n", "it has no requests"),
        ("a.txt", "", "must end in .jsonl or .csv"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_place(
    tmp_path: Path, name: str, content: str, problem: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(TraceError, match=problem):
        load_trace(path)


def test_batches_are_spread_until_the_next_arrival() -> None:
    batched = [TraceRequest(at_s, 1, 1) for at_s in (0.0, 0.0, 0.0, 3.0, 3.0)]
    assert largest_batch(batched) == 3
    times = [one.at_s for one in spread_arrivals(batched)]
    assert times == pytest.approx([0, 1, 2, 3, 4.5])
    assert [one.at_s for one in at_speed(batched, 2.0)] == [0, 0, 0, 1.5, 1.5]


@pytest.mark.parametrize("name", GENERATORS)
def test_a_seed_determines_a_workload(name: str) -> None:
    requests = generate(name, 200, 1)
    assert requests == generate(name, 200, 1)
    assert requests != generate(name, 200, 2)
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    assert all(len(one.hash_ids) * 512 <= one.input_tokens for one in requests)


def test_an_idle_worker_answers_after_the_time_of_its_prompt_and_caches_it() -> None:
    """Time to first token = base_s + tokens / rate; the second prompt shares 2 of 3 blocks."""
    prompt = TraceRequest(0.0, 1536, 1, (1, 2, 3))
    timing = Timing(base_s=0.01, prefill_token_s=0.001, decode_seq_s=0, kv_token_s=0)
    settings = MeshSettings(workers=1, worker=WorkerSettings(timing=timing))
    again = TraceRequest(10.0, 1536, 1, (1, 2, 9))
    first, second = replay([prompt, again], settings=settings).outcomes
    assert first.ttft_s == pytest.approx(0.01 + 1.536)
    assert (first.cached_tokens, second.cached_tokens) == (0, 1024)
    assert second.ttft_s == pytest.approx(0.01 + 0.512)


def test_kv_follows_the_cache_and_random_does_not() -> None:
    rng = Random(1)
    prefixes = [tuple(range(100 * n, 100 * n + 20)) for n in range(8)]
    requests = [
        TraceRequest(4.0 * n, 21 * 512, 2, (*rng.choice(prefixes), 10_000 + n)) for n in range(80)
    ]
    settings = MeshSettings(workers=4)
    hit_rates = {
        name: summarize(name, 1, replay(requests, name, settings)).hit_rate
        for name in ("kv", "random")
    }
    assert hit_rates["kv"] > 0.8
    assert hit_rates["random"] < 0.75


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_answers_all_requests_and_repeats_exactly(policy: str) -> None:
    requests = generate("sessions", 150, 1)
    settings = MeshSettings(workers=3, routers=2)
    result = replay(requests, policy, settings)
    assert all(one.end_s is not None for one in result.outcomes)
    assert {one.worker for one in result.outcomes} == {0, 1, 2}
    assert result.outcomes == replay(requests, policy, settings).outcomes


def test_routers_see_the_bookings_of_each_other_after_the_lag() -> None:
    """Prompts of the same instant meet if routers do not see each other's bookings."""
    requests = [TraceRequest(n * 0.001, 4096, 400) for n in range(40)]
    spreads = []
    for sync_lag_s in (0.0001, 5.0):
        settings = MeshSettings(workers=8, routers=8, sync_lag_s=sync_lag_s, index_lag_s=5.0)
        workers = [one.worker for one in replay(requests, "least_loaded", settings).outcomes]
        spreads.append(max(workers.count(worker) for worker in range(8)))
    assert spreads[0] == 5 < spreads[1]


def test_a_request_larger_than_the_cache_is_cut_and_counted() -> None:
    settings = MeshSettings(workers=1, worker=WorkerSettings(total_blocks=4))
    result = replay([TraceRequest(0.0, 9000, 10, tuple(range(17)))], settings=settings)
    assert result.truncated == 1
    assert result.outcomes[0].end_s is not None


def test_a_stuck_worker_leaves_its_requests_unanswered() -> None:
    settings = MeshSettings(workers=2, speeds=(0.0,))
    requests = [TraceRequest(0.1 * n, 600, 2) for n in range(20)]
    summary = summarize("kv", 1, replay(requests, "round_robin", settings))
    assert (summary.requests, summary.unanswered) == (20, 10)


def test_a_pair_answers_after_prefill_and_the_transfer_of_its_blocks() -> None:
    """TTFT = prefill step + latency + bytes / link; the second transfer waits for the link."""
    timing = Timing(base_s=0.01, prefill_token_s=0.001, decode_seq_s=0, kv_token_s=0)
    link = SimHandoffConfig(gb_per_s=1e-3, bytes_per_token=1000, latency_s=0.1)
    worker = WorkerSettings(timing=timing, handoff=link, max_num_batched_tokens=1024)
    settings = MeshSettings(workers=2, prefill_workers=1, worker=worker)
    first, second = replay(
        [TraceRequest(0.0, 1024, 3), TraceRequest(0.0, 512, 3)], settings=settings
    ).outcomes
    assert (first.prefill, first.worker) == (0, 1)
    first_s = 0.01 + 1.024 + 0.1 + 1.024
    assert first.ttft_s == pytest.approx(first_s)
    assert second.ttft_s == pytest.approx(first_s + 0.512)
    assert first.end_s == pytest.approx(first_s + 2 * 0.01)


@pytest.mark.parametrize("routers", [1, 3])
def test_pools_answer_all_requests_and_repeat_exactly(routers: int) -> None:
    requests = generate("sessions", 150, 1)
    settings = MeshSettings(workers=5, prefill_workers=3, routers=routers)
    result = replay(requests, settings=settings)
    assert all(one.end_s is not None for one in result.outcomes)
    assert {one.prefill for one in result.outcomes} == {0, 1, 2}
    assert {one.worker for one in result.outcomes} == {3, 4}
    assert summarize("kv", routers, result).split == 1.0
    assert result.outcomes == replay(requests, settings=settings).outcomes


def test_handoffs_that_fill_the_decode_cache_wait_and_preempted_ones_recover() -> None:
    requests = [TraceRequest(0.01 * n, 2048, 700) for n in range(30)]
    worker = WorkerSettings(total_blocks=24)
    settings = MeshSettings(workers=3, prefill_workers=2, worker=worker)
    result = replay(requests, settings=settings)
    assert result.preemptions > 0
    assert all(one.end_s is not None for one in result.outcomes)


def test_the_rules_of_the_routers_are_set_by_name() -> None:
    settings = parse_settings(
        ["queue_threshold=2", "bypass_policy=isl_or_load", "uncached_block_weight=3"]
    )
    assert settings.rules.queue.threshold == 2
    assert settings.rules.bypass.policy == "isl_or_load"
    assert settings.rules.bypass.prefill_busy_threshold == 2, "as in the router"
    assert settings.cost.uncached_block_weight == 3


def test_a_bypass_serves_short_prompts_on_one_worker() -> None:
    requests = [TraceRequest(n * 1.0, tokens, 2) for n, tokens in enumerate([600, 6000] * 4)]
    texts = ["bypass_policy=isl_bounding", "bypass_eff_isl_ratio_threshold=2"]
    rules = parse_settings(texts).rules
    settings = MeshSettings(workers=2, prefill_workers=1, rules=rules)
    splits = [one.prefill is not None for one in replay(requests, settings=settings).outcomes]
    assert splits == [False, True] * 4


@pytest.mark.parametrize("routers", [1, 2])
def test_a_queue_holds_prompts_until_a_worker_has_capacity(routers: int) -> None:
    """Without the queue the engine is at work in order of arrival; wspt takes short ones first."""
    sizes = [8192] * 6 + [600] * 4
    requests = [TraceRequest(n * 1e-4, tokens, 1) for n, tokens in enumerate(sizes)]
    rules = parse_settings(["queue_threshold=0", "queue_policy=wspt"]).rules
    settings = MeshSettings(workers=1, routers=routers, rules=rules)
    outcomes = replay(requests, settings=settings).outcomes
    assert all(one.end_s is not None for one in outcomes)
    ends = [one.end_s or 0.0 for one in outcomes]
    assert max(ends[6:]) < sorted(ends[:6])[2 * routers]


def test_requests_beyond_the_limits_of_the_queue_are_unanswered() -> None:
    requests = [TraceRequest(n * 1e-4, 8192, 1) for n in range(20)]
    texts = ["queue_threshold=0", "queue_requests_max=4", "queue_wait_max_s=2"]
    settings = MeshSettings(workers=1, rules=parse_settings(texts).rules)
    summary = summarize("kv", 1, replay(requests, settings=settings))
    assert summary.unanswered == 17, "one ran, four were queued, and two of these in time"


def test_the_table_has_a_line_for_each_policy_and_number_of_routers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--requests", "60", "--policies", "kv,random", "--routers", "1,2", "--speeds", "0.5"]
    assert main(["bursts", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-4:]] == [
        ["kv", "1"],
        ["random", "1"],
        ["kv", "2"],
        ["random", "2"],
    ]


def test_json_has_the_figures_and_the_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n" * 3)
    assert main([str(path), "--policies", "kv", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["notes"] == ["arrivals spread: up to 3 requests had the same arrival time"]
    assert printed["runs"][0]["requests"] == 3
    assert printed["runs"][0]["ttft_mean_s"] > 0


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["bursts", "--policies", "best"], "'best': no such policy"),
        (["bursts", "--workers", "0"], "0 is below 1"),
        (["bursts", "--speed", "nan"], "nan is below"),
        (["bursts", "--workers", "1", "--speeds", "0"], "every worker is stuck"),
        (["bursts", "--workers", "2", "--prefill-workers", "2"], "no worker is left to decode"),
        (["bursts", "--set", "speed=2"], "'speed': no such setting"),
        (["bursts", "--set", "queue_threshold=-1"], "'-1' is not a number of 0 or more"),
        (["bursts", "--set", "bypass_policy=on"], "'on' is none of off, isl_bounding"),
        (["bursts", "--set", "assume_kv_reuse=1"], "'1' is not true or false"),
        (["absent.jsonl"], "absent.jsonl"),
    ],
)
def test_a_bad_argument_is_refused(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(flags)
    assert exit_status.value.code == 2
    assert problem in capsys.readouterr().err
