"""The cases as data: shape of the mesh, fault, targets, and limits for its effect on clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tests.kit.gray_engine import FAULTS

FaultAction = Literal["kill", "stop", "freeze", "term", "cut", "none"]

# Longest pause of a stream by a death, and by a hang. A hang is detected after three missed
# heartbeats of a second, or when the engine makes no step for two seconds.
DEATH_PAUSE_S = 1.0
HANG_PAUSE_S = 3.5
RECOMPUTE_PAUSE_S = 2.0
# Time until a worker that recovered, or was started again, serves the requests that wait for it:
# a probe interval of at most 2.5 s, a probe of 1 s, and the prompts of all streams.
RETURN_S = 6.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Process counts of a mesh. With two workers of a kind, one survives a fault."""

    workers: int = 0
    prefill: int = 0
    decode: int = 0
    routers: int = 1
    indexers: int = 1
    frontends: int = 1


AGGREGATED = Shape(workers=2)
DISAGGREGATED = Shape(prefill=2, decode=2)
ONE_PREFILL = Shape(prefill=1, decode=2)
THREE_WORKERS = Shape(workers=3)


@dataclass(frozen=True, slots=True)
class Case:
    """One fault under load.

    targets: kinds of process; the fault hits one of each at once, of workers the busiest.
    respawn: start a successor at once, as `meshctl up` does. streams, tokens: the running load;
    fresh requests are sent in addition. fresh_words: length of their prompts. pause_s: longest
    allowed pause of a running stream; None: no limit. rolling: replace each service in turn instead
    of a fault; kinds: only these. migrates: whether streams may migrate. is_total: the fault hits
    all processes of the kinds. lasts_s: the fault ends after this time, also while streams wait; 0:
    when all requests have ended.
    """

    name: str
    shape: Shape
    action: FaultAction = "none"
    targets: tuple[str, ...] = ()
    respawn: bool = False
    streams: int = 64
    tokens: int = 200
    fresh_words: int = 4
    pause_s: float | None = DEATH_PAUSE_S
    worker_flags: tuple[str, ...] = ()
    rolling: bool = False
    migrates: bool = True
    kinds: tuple[str, ...] = ()
    is_total: bool = False
    lasts_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GrayCase:
    """One worker of three fails without dying. fault: as `tests/kit/gray_engine.py` reads it."""

    name: str
    fault: str


# `make chaos` and `make gray` run them; see `gray.py`.
GRAY_CASES = (
    *(GrayCase(name, name) for name in FAULTS),
    # Steps go on for the other requests of the worker.
    GrayCase("lose-some", "lose 3"),
    GrayCase("stall-some", "stall 3"),
)


def all_cases() -> list[Case]:
    """Returns all cases in run order."""
    return [
        *_for("agg", AGGREGATED, "worker"),
        *_for("pd", DISAGGREGATED, "decode"),
        *_pd_only(),
        *_many_streams("agg", THREE_WORKERS, "worker", 500),
        *_many_streams("pd", DISAGGREGATED, "decode", 500),
        *_many_streams("agg", THREE_WORKERS, "worker", 1500),
        *_all_workers("agg", Shape(workers=2), "worker"),
        *_all_workers("pd", Shape(prefill=1, decode=2), "decode"),
    ]


def _for(prefix: str, shape: Shape, decode: str) -> list[Case]:
    """Returns the cases of both mesh types. decode: kind of the workers that generate tokens."""

    def case(name: str, action: FaultAction, targets: str) -> Case:
        return Case(f"{prefix}/{name}", shape, action, (targets,))

    two_routers, two_frontends = replace(shape, routers=2), replace(shape, frontends=2)
    return [
        case("kill-decode", "kill", decode),
        replace(case("kill-router", "kill", "router"), respawn=True),
        replace(case("kill-router-of-two", "kill", "router"), shape=two_routers),
        replace(case("kill-indexer", "kill", "indexer"), respawn=True),
        replace(case("kill-other-frontend", "kill", "frontend"), shape=two_frontends),
        replace(case("stop-decode", "stop", decode), pause_s=HANG_PAUSE_S),
        replace(case("freeze-decode", "freeze", decode), pause_s=HANG_PAUSE_S),
        # One frontend aborts its requests there; the other one must still detect the hang.
        replace(
            case("freeze-decode-of-two-frontends", "freeze", decode),
            shape=two_frontends,
            pause_s=HANG_PAUSE_S,
        ),
        case("stop-router", "stop", "router"),
        case("stop-indexer", "stop", "indexer"),
        # The streams outlast the drain and all migrate; the sim needs about a second to recompute
        # their 13,000 tokens.
        replace(
            case("term-decode", "term", decode),
            tokens=500,
            pause_s=RECOMPUTE_PAUSE_S,
            worker_flags=("--drain-s=0.2",),
        ),
        replace(case("term-router", "term", "router"), respawn=True),
        replace(case("term-indexer", "term", "indexer"), respawn=True),
        replace(case("term-frontend", "term", "frontend"), shape=two_frontends),
        Case(
            f"{prefix}/overload",
            shape,
            streams=192,  # three times what two engines compute at once
            pause_s=None,
            worker_flags=("--max-num-seqs=32", "--total-kv-blocks=384"),
            migrates=False,
        ),
        Case(f"{prefix}/rolling-restart", shape, rolling=True),
    ]


def _pd_only() -> list[Case]:
    # The prefill takes long enough to be hit, and one worker can still keep up.
    long = 400
    return [
        Case("pd/kill-prefill", DISAGGREGATED, "kill", ("prefill",), fresh_words=long),
        Case("pd/kill-only-prefill", ONE_PREFILL, "kill", ("prefill",), fresh_words=long),
        Case("pd/kill-both-sides", DISAGGREGATED, "kill", ("prefill", "decode")),
        Case(
            "pd/stop-prefill",
            DISAGGREGATED,
            "stop",
            ("prefill",),
            fresh_words=long,
            pause_s=HANG_PAUSE_S,
        ),
        Case(
            "pd/freeze-prefill",
            DISAGGREGATED,
            "freeze",
            ("prefill",),
            fresh_words=long,
            pause_s=HANG_PAUSE_S,
        ),
        Case("pd/term-prefill", DISAGGREGATED, "term", ("prefill",), fresh_words=long),
    ]


def _many_streams(prefix: str, shape: Shape, kind: str, streams: int) -> list[Case]:
    """The streams of a lost, or draining, worker all move. Their number sets the length of the
    pause: the others compute 32 prompts at a time each."""
    case = Case(
        f"{prefix}/{streams}",
        shape,
        targets=(kind,),
        streams=streams,
        tokens=400,
        pause_s=RETURN_S * streams / 500,
        worker_flags=("--drain-s=0.2", f"--max-num-seqs={streams}", "--total-kv-blocks=65536"),
    )
    return [
        replace(case, name=f"{case.name}-kill", action="kill"),
        replace(case, name=f"{case.name}-term", action="term"),
        replace(case, name=f"{case.name}-rolling", rolling=True, kinds=("worker", "prefill", kind)),
    ]


def _all_workers(prefix: str, shape: Shape, kind: str) -> list[Case]:
    """No worker of a kind serves for a while: requests wait for one."""
    case = Case(f"{prefix}/all", shape, targets=(kind,), is_total=True)
    stop_s, cut_s, restart_s = 6.0, 10.0, 10.0
    return [
        replace(
            case, name=f"{case.name}-stop", action="stop", lasts_s=stop_s, pause_s=stop_s + RETURN_S
        ),
        replace(
            case, name=f"{case.name}-cut", action="cut", lasts_s=cut_s, pause_s=cut_s + RETURN_S
        ),
        replace(
            case,
            name=f"{prefix}/kill-last",
            shape=replace(shape, **{kind + "s" if kind == "worker" else kind: 1}),
            action="kill",
            respawn=True,
            pause_s=restart_s + RETURN_S,
        ),
    ]
