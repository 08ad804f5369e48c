"""Cases of `bench_replay`: latency targets at 1.2 times the capacity.

The conversation trace with four tenants, one of which has half of all conversations; each second
conversation is interactive (its first token is due within INTERACTIVE_S), the others have BATCH_S.
Three ways to serve the same requests, all with the router's queue:

- `plain`: in order of arrival, no targets;
- `priority`: interactive ones at a higher strict priority, no targets;
- `deadlines`: routers receive the targets.

Keys: `deadlines_attainment` (and `plain_`, `priority_`): share of all requests with a first token
within the target; `…_interactive`, `…_batch`: of each kind; `…_jain`: Jain index of what the
tenants got, the prompt tokens of requests that met their target, divided by the tenant's max-min
fair share of all; `deadlines_refused`: share of requests that were refused; `deadlines_late`: of
those that were served, the share that was late all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from replay.mesh import MeshSettings, Outcome, ReplayMesh
from replay.policies import POLICIES
from replay.settings import parse_settings
from replay.trace import TraceRequest, at_speed, spread_arrivals, with_sessions

BLOCK = 512
OVERLOAD = 1.2
INTERACTIVE_S, BATCH_S = 4.0, 20.0
WAYS = ("plain", "priority", "deadlines")
# The share of the conversations of each tenant.
TENANTS: Mapping[str, float] = {"a": 0.5, "b": 0.2, "c": 0.2, "d": 0.1}
# Of the two replays that measure the capacity: the first is never idle, the second is overloaded by
# half.
SATURATING_SPEED, MEASURED_OVERLOAD = 40.0, 1.5
QUEUE = ("queue_threshold=0.5", "queue_wait_max_s=60")


@dataclass(frozen=True, slots=True)
class Attainment:
    """The figures of one way; see the module."""

    all: float
    interactive: float
    batch: float
    jain: float
    refused: float
    late: float


def capacity(requests: Sequence[TraceRequest]) -> float:
    """Returns the speed of the trace that the mesh can just serve: the one at which it serves all
    requests while it is overloaded."""
    spread, speed, found = spread_arrivals(requests), SATURATING_SPEED, 0.0
    for _ in range(2):
        served = ReplayMesh(MeshSettings(), POLICIES["kv"]).run(at_speed(spread, speed))
        found = spread[-1].at_s / max(outcome.end_s or 0.0 for outcome in served.outcomes)
        speed = MEASURED_OVERLOAD * found
    return found


def overloaded_trace(
    requests: Sequence[TraceRequest], speed: float, seed: int
) -> list[TraceRequest]:
    """Returns the requests at OVERLOAD times the capacity of the mesh, with tenants and targets.
    speed: of `capacity`."""
    rng = Random(seed)
    named = with_sessions(spread_arrivals(requests), BLOCK)
    paced = at_speed(named, OVERLOAD * speed)
    names, shares = list(TENANTS), list(TENANTS.values())
    tenants: dict[int, str] = {}
    targets: dict[int, float] = {}
    for request in paced:
        if request.session not in tenants:
            tenants[request.session] = rng.choices(names, shares)[0]
            targets[request.session] = rng.choice((INTERACTIVE_S, BATCH_S))
    return [
        replace(
            request,
            tenant=tenants[request.session],
            ttft_target_s=targets[request.session],
        )
        for request in paced
    ]


def execute(requests: Sequence[TraceRequest], way: str, speed: float, seed: int) -> Attainment:
    """Replays the trace in one of WAYS. speed: of `capacity`."""
    trace = overloaded_trace(requests, speed, seed)
    sent = trace
    if way != "deadlines":
        sent = [replace(request, ttft_target_s=None) for request in trace]
    if way == "priority":
        sent = [
            replace(request, level=int(known.ttft_target_s == INTERACTIVE_S))
            for request, known in zip(sent, trace, strict=True)
        ]
    settings = MeshSettings(rules=parse_settings(QUEUE).rules)
    outcomes = ReplayMesh(settings, POLICIES["kv"]).run(sent).outcomes
    return attainment(trace, outcomes)


def attainment(trace: Sequence[TraceRequest], outcomes: Sequence[Outcome]) -> Attainment:
    """Returns the figures of the outcomes of a trace, which has the target of each request."""
    total, met, refused, late = Counter[float](), Counter[float](), 0, 0
    wanted, got = Counter[str](), Counter[str]()
    for request, outcome in zip(trace, outcomes, strict=True):
        target_s = request.ttft_target_s
        assert target_s is not None, "each request has a target"
        total[target_s] += 1
        wanted[request.tenant] += request.input_tokens
        refused += outcome.refusal != ""
        if outcome.ttft_s is None:
            continue
        if outcome.ttft_s <= target_s:
            met[target_s] += 1
            got[request.tenant] += request.input_tokens
        else:
            late += 1
    return Attainment(
        met.total() / total.total(),
        met[INTERACTIVE_S] / max(1, total[INTERACTIVE_S]),
        met[BATCH_S] / max(1, total[BATCH_S]),
        jain_index(got, fair_shares(wanted, got.total())),
        refused / total.total(),
        late / max(1, late + met.total()),
    )


def fair_shares(wanted: Mapping[str, int], capacity: float) -> dict[str, float]:
    """Returns the max-min fair part of the capacity for each tenant, none above what it wants."""
    shares: dict[str, float] = {}
    left, open_tenants = float(capacity), sorted(wanted, key=lambda name: wanted[name])
    for index, name in enumerate(open_tenants):
        shares[name] = min(float(wanted[name]), left / (len(open_tenants) - index))
        left -= shares[name]
    return shares


def jain_index(got: Mapping[str, float], shares: Mapping[str, float]) -> float:
    """Returns (sum of x)^2 / (n * sum of x^2) of x = got / share: 1 if all are equal."""
    parts = [got.get(name, 0.0) / share for name, share in shares.items() if share]
    squares = sum(part * part for part in parts)
    return sum(parts) ** 2 / (len(parts) * squares) if squares else 0.0


def table(found: Mapping[str, Attainment]) -> str:
    columns = ("all", "interactive", "batch", "jain", "refused", "late")
    lines = [f"{f'targets at {OVERLOAD:g} of capacity':28}" + "".join(f"{c:>13}" for c in columns)]
    for way in WAYS:
        values = "".join(f"{getattr(found[way], column):13.3f}" for column in columns)
        lines.append(f"{way:28}{values}")
    return "\n".join(lines) + "\n"


def figures(found: Mapping[str, Attainment]) -> dict[str, float]:
    """Returns the keys of the module."""
    values: dict[str, float] = {}
    for way in WAYS:
        one = found[way]
        values[f"{way}_attainment"] = one.all
        values[f"{way}_interactive"] = one.interactive
        values[f"{way}_batch"] = one.batch
        values[f"{way}_jain"] = one.jain
    values["deadlines_refused"] = found["deadlines"].refused
    values["deadlines_late"] = found["deadlines"].late
    return values
