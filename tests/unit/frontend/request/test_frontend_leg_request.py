"""What legs send to their workers, as recorded bytes: a change of them breaks older workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from common.errors import MeshError, WorkerLost
from common.request.placement import Decision, Placement
from common.request.preprocessed import (
    AgentContext,
    BootstrapInfo,
    FinishReason,
    GuidedDecoding,
    MmRoutingInfo,
    PrefillResult,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TokenIds,
    TokenLogprob,
)
from common.request.token_stream import FrontendLink, Hello, LegRequest, Terminal
from common.wire.token_stream import request_frame_to_proto
from frontend_svc.openai.body.preprocessing import choice_request
from frontend_svc.request.leg import Leg
from frontend_svc.request.machine import RequestMachine
from frontend_svc.request.types import RequestOutcome, RequestPlan

REQUEST = PreprocessedRequest(
    model="m",
    token_ids=TokenIds.of([1, 2, 3]),
    stop_conditions=StopConditions(max_tokens=9, min_tokens=4),
    sampling_options=SamplingOptions(seed=7),
)
HINTS = RoutingHints(decode_worker_id=6, lora_name="lora", priority=4, cache_salt="salt")
PAIR = Decision(Placement(2), prefill=Placement(1, 1), bootstrap=BootstrapInfo("h", 80, 99))
TRACE = "ab" * 16


class RecordingPorts:
    """Encodes each submit at once."""

    def __init__(self) -> None:
        self.legs: list[Leg] = []
        self.sent: list[str] = []
        self.requests: list[PreprocessedRequest | None] = []

    def submit(self, worker_id: int, leg_request: LegRequest, leg: Leg) -> None:
        self.legs.append(leg)
        self.requests.append(leg_request.request)
        link = FrontendLink(Hello(1, 2, 3), 0.0)
        link.submit(leg_request, leg)
        frame = link.next_frame(0.0)
        assert frame is not None
        self.sent.append(request_frame_to_proto(frame).submits[0].SerializeToString().hex())

    def place(self, attempt: int, excluded: frozenset[int]) -> None: ...
    def abort_leg(self, leg: Leg, reason: str) -> None: ...
    def wait_for_worker(self, until: float) -> None: ...
    def prefill_done(self, attempt: int) -> None: ...
    def free(self, attempt: int) -> None: ...
    def emit(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None: ...
    def emit_chunk(self, json: bytes) -> None: ...
    def finish(self, outcome: RequestOutcome) -> None: ...
    def wake_at(self, at: float) -> None: ...
    def now(self) -> float:
        return 2.0

    def members(self) -> tuple[frozenset[int], frozenset[int]]:
        return frozenset(), frozenset()

    def take_permit(self) -> bool:
        return True

    def take_retry(self, error: MeshError) -> bool:
        return True

    def has_left(self, worker_id: int) -> bool:
        return False

    def stalled_s(self) -> float:
        return 0.0

    def worker_failed(self, worker_id: int) -> None:
        pass

    def silent_s(self, worker_id: int) -> float:
        return 0.0


def begin(
    request: PreprocessedRequest, placed: Decision, *, trace_id: str = ""
) -> tuple[RequestMachine, RecordingPorts]:
    ports = RecordingPorts()
    plan = RequestPlan("r", request, 100.0, trace_id=trace_id, tenant="t", priority=3)
    machine = RequestMachine(plan, ports, Random(1))
    machine.start()
    machine.placed(0, placed, 1.0)
    return machine, ports


def sent_first(request: PreprocessedRequest, placed: Decision, *, trace_id: str = "") -> list[str]:
    return begin(request, placed, trace_id=trace_id)[1].sent


def sent_after_migration(request: PreprocessedRequest, placed: Decision) -> list[str]:
    machine, ports = begin(request, placed, trace_id=TRACE)
    legs = len(ports.legs)
    ports.legs[-1].accepted()
    ports.legs[-1].tokens([7, 8], ())
    ports.legs[-1].lost(WorkerLost("gone", retryable=True))
    machine.placed(1, placed, 2.0)
    return ports.sent[legs:]


def sent_in_turn(request: PreprocessedRequest) -> list[str]:
    _, ports = begin(request, replace(PAIR, bootstrap=None))
    ports.legs[0].accepted()
    result = PrefillResult(disaggregated_params={"handle": 1})
    ports.legs[0].terminal(Terminal(1, FinishReason.LENGTH, prefill_result=result))
    return ports.sent


GUIDED = replace(
    REQUEST, sampling_options=SamplingOptions(guided_decoding=GuidedDecoding(regex="a+"))
)
LOCAL = replace(
    REQUEST,
    agent_context=AgentContext(session_id="s"),
    request_timestamp_ms=5.5,
    mm_routing_info=MmRoutingInfo(routing_token_ids=TokenIds.of([1, 2]), block_mm_infos=(None,)),
)
GIVEN = replace(
    REQUEST,
    prefill_result=PrefillResult(disaggregated_params={"handle": 2}),
    bootstrap_info=BootstrapInfo("x", 1, 2),
)
SENT: dict[str, Callable[[], list[str]]] = {
    "plain": lambda: sent_first(REQUEST, Decision(Placement(1))),
    "pinned rank": lambda: sent_first(REQUEST, Decision(Placement(1, 2))),
    "hints": lambda: sent_first(replace(REQUEST, routing=HINTS), Decision(Placement(1, 2))),
    "local fields": lambda: sent_first(LOCAL, Decision(Placement(1))),
    "third choice": lambda: sent_first(choice_request(REQUEST, 2), Decision(Placement(1))),
    "pair": lambda: sent_first(REQUEST, PAIR, trace_id=TRACE),
    "pair in turn": lambda: sent_in_turn(REQUEST),
    "migration": lambda: sent_after_migration(REQUEST, Decision(Placement(1))),
    "migration of a pair": lambda: sent_after_migration(REQUEST, PAIR),
    "migration of a constraint": lambda: sent_after_migration(GUIDED, Decision(Placement(1, 2))),
    "migration of a given handoff": lambda: sent_after_migration(GIVEN, Decision(Placement(1))),
}

# Written by the version before requests were shared by their legs.
RECORDED = {
    "plain": [
        (
            "080112017220b885063a017440064a1d0a016d120c0100000002000000030000003a040809280442"
            "0260074a00"
        ),
    ],
    "pinned rank": [
        (
            "080112017220b885063a017440064a210a016d120c0100000002000000030000003a040809280442"
            "0260074a006a022002"
        ),
    ],
    "hints": [
        (
            "080112017220b885063a017440064a2f0a016d120c0100000002000000030000003a040809280442"
            "0260074a006a1020023a046c6f726148046a0473616c74"
        ),
    ],
    "local fields": [
        (
            "080112017220b885063a017440064a1d0a016d120c0100000002000000030000003a040809280442"
            "0260074a00"
        ),
    ],
    "third choice": [
        (
            "080112017220b885063a017440064a1d0a016d120c0100000002000000030000003a040809280442"
            "0260094a00"
        ),
    ],
    "pair": [
        (
            "080112017220b885063210393162373538346132323635623166353a017440064a2b0a016d120c01"
            "00000002000000030000003a0408012801420260074a006a0220018a01070a0168105018636801"
        ),
        (
            "080112017220b885063210636436313365333064386631366164663a017440064a5e0a016d120c01"
            "00000002000000030000003a0408092804420260074a008201340a20616261626162616261626162"
            "61626162616261626162616261626162616261621210393162373538346132323635623166358a01"
            "070a0168105018636802"
        ),
    ],
    "pair in turn": [
        (
            "080112017220b885063a017440064a210a016d120c0100000002000000030000003a040801280142"
            "0260074a006a0220016801"
        ),
        (
            "080112017220d0fd053a017440064a2d0a016d120c0100000002000000030000003a040809280442"
            "0260074a007a0e0a0c7b2268616e646c65223a317d6802"
        ),
    ],
    "migration": [
        (
            "0801120172180120d0fd053210636436313365333064386631366164663a017440064a5c0a016d12"
            "1401000000020000000300000007000000080000003a0408072802420260074a008201340a206162"
            "61626162616261626162616261626162616261626162616261626162616212103931623735383461"
            "3232363562316635"
        ),
    ],
    "migration of a pair": [
        (
            "0801120172180120d0fd053210313032376334643163333836626263343a017440064a6a0a016d12"
            "1401000000020000000300000007000000080000003a0408012801420260074a006a022001820134"
            "0a206162616261626162616261626162616261626162616261626162616261626162121063643631"
            "3365333064386631366164668a01070a0168105018636801"
        ),
        (
            "0801120172180120d0fd053210316532666562383934313463333433633a017440064a660a016d12"
            "1401000000020000000300000007000000080000003a0408072802420260074a008201340a206162"
            "61626162616261626162616261626162616261626162616261626162616212103130323763346431"
            "63333836626263348a01070a0168105018636802"
        ),
    ],
    "migration of a constraint": [
        (
            "0801120172180120d0fd053210636436313365333064386631366164663a017440064a660a016d12"
            "1401000000020000000300000007000000080000003a0408072802420872061202612b40024a006a"
            "0220028201340a206162616261626162616261626162616261626162616261626162616261626162"
            "121039316237353834613232363562316635"
        ),
    ],
    "migration of a given handoff": [
        (
            "0801120172180120d0fd053210636436313365333064386631366164663a017440064a5c0a016d12"
            "1401000000020000000300000007000000080000003a0408072802420260074a008201340a206162"
            "61626162616261626162616261626162616261626162616261626162616212103931623735383461"
            "3232363562316635"
        ),
    ],
}


@pytest.mark.parametrize("case", SENT)
def test_the_bytes_of_a_submit_are_those_of_earlier_versions(case: str) -> None:
    assert SENT[case]() == RECORDED[case]


def test_all_legs_of_a_request_share_the_request_unchanged() -> None:
    request, before = replace(REQUEST, routing=HINTS), replace(REQUEST, routing=HINTS)
    machine, ports = begin(request, PAIR, trace_id=TRACE)
    ports.legs[-1].tokens([7, 8], ())
    ports.legs[-1].lost(WorkerLost("gone", retryable=True))
    machine.placed(1, PAIR, 2.0)
    assert len(ports.requests) == 4
    assert all(shared is request for shared in ports.requests)
    assert request == before
