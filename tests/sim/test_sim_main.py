"""Output of `make sim`: the last line counts, and a violation names the command that repeats it."""

from __future__ import annotations

from random import Random

import pytest

from frontend_svc.request.gateway import Gateway
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.placement_request import PlacementRequest
from frontend_svc.request.ports import ResponseSink
from frontend_svc.request.types import RequestOutcome, RequestPlan
from tests.sim.__main__ import main
from tests.sim.clients import draw_client_specs
from tests.sim.fleet import Parts
from tests.sim.scenario import EOS, EOS_ONE_IN, TOKEN_IDS, Scenario
from tests.sim.world import run_scenario
from worker_svc.engines.sim.token_oracle import TokenOracle

CLIENT_SPECS = draw_client_specs(
    Random(7), 20, 3.0, TokenOracle(TOKEN_IDS, EOS, eos_one_in=EOS_ONE_IN), long_prompts=False
)


@pytest.mark.slow
def test_the_last_line_counts_the_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["2", "--first", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 passed, 0 failed"
    assert any(line.startswith("faults, by number of seeds: attach_cut ") for line in lines)


class _Twice:
    """A ResponseSink that receives the outcome twice."""

    def __init__(self, sink: ResponseSink) -> None:
        self.tokens = sink.tokens
        self._finished = sink.finished

    def finished(self, outcome: RequestOutcome) -> None:
        self._finished(outcome)
        self._finished(outcome)


class EndsTwice(Gateway):
    def open(self, plan: RequestPlan, query: PlacementRequest, sink: ResponseSink) -> RequestHandle:
        return super().open(plan, query, _Twice(sink))


@pytest.mark.slow
def test_a_violation_is_printed_with_its_events_and_the_command_that_repeats_it() -> None:
    report = run_scenario(Scenario(seed=7, client_specs=CLIENT_SPECS), Parts(gateway=EndsTwice))
    name = report.violations[0].what.split()[0]
    lines = [line.strip() for line in str(report).splitlines()]
    assert lines[-1] == "replay: make sim SEEDS=1 ARGS='--first 7 --trace'"
    shown = lines[lines.index("before the first:") + 1 : -1]
    assert any(f"requests {name} " in line for line in shown)
    assert any(f"ends {name} " in line for line in shown)
    assert all(float(line.split()[0]) <= report.violations[0].at + 1e-5 for line in shown)
