"""The faults, as data: what kind of mesh, what happens to whom, and what clients may see of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

FaultAction = Literal["kill", "stop", "freeze", "term", "none"]

# What a death, and what a hang, may cost a running stream. A hang is noticed after three missed
# heartbeats of a second, or when the engine stands still for two seconds.
DEATH_PAUSE_S = 1.0
HANG_PAUSE_S = 3.5
RECOMPUTE_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A mesh. Two of each worker kind that is there, so that somebody can go on."""

    workers: int = 0
    prefill: int = 0
    decode: int = 0
    routers: int = 1
    indexers: int = 1
    frontends: int = 1


AGGREGATED = Shape(workers=2)
DISAGGREGATED = Shape(prefill=2, decode=2)
ONE_PREFILL = Shape(prefill=1, decode=2)


@dataclass(frozen=True, slots=True)
class Case:
    """One fault under load.

    who: kinds of service, one process of each is hit at the same moment, the busiest worker.
    respawn: start a successor at once, as `meshctl up` does. streams, tokens: the running load;
    fresh requests come besides, a few each second. fresh_words: how long their prompts are.
    pause_s: the longest pause a running stream may have; None: not judged. rolling: instead, each
    service is replaced in turn. migrates: whether streams may go on elsewhere.
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


def all_cases() -> list[Case]:
    """In the order in which they are run."""
    return [*_for("agg", AGGREGATED, "worker"), *_for("pd", DISAGGREGATED, "decode"), *_pd_only()]


def _for(prefix: str, shape: Shape, decode: str) -> list[Case]:
    """What can happen to either mesh. decode: the kind of worker that makes the tokens."""

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
        # What one frontend takes back from it, the other must not mistake for an engine at rest.
        replace(
            case("freeze-decode-of-two-frontends", "freeze", decode),
            shape=two_frontends,
            pause_s=HANG_PAUSE_S,
        ),
        case("stop-router", "stop", "router"),
        case("stop-indexer", "stop", "indexer"),
        # Longer streams than the drain has patience for: all go on elsewhere, where the sim needs
        # about a second to compute their 13,000 tokens again.
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
    # Words whose prefill takes long enough to be hit, and that one worker can still keep up with.
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
