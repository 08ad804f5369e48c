"""The same load on several servers in turns: bodies, runs of bench/loadgen.c, and their medians."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.measure import run_load
from tests.sglang.sglang_mesh import MODEL
from worker_svc.engines.model_files import read_words

PATH: Final = "/v1/completions"
# One token each with the tokenizer of `tests.gpu.model`.
_BODIES: Final = 2048


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of `prompt_words` and `output_tokens`, from `concurrency` connections for
    `seconds`."""

    concurrency: int
    seconds: float
    prompt_words: int
    output_tokens: int


def write_bodies(out: Path, load: Load, seed: int = 1) -> None:
    """Writes bodies of completions, one JSON a line; all prompts are different."""
    rng = random.Random(seed)
    words = read_words()
    with out.open("w") as file:
        for _ in range(_BODIES):
            body = {
                "model": MODEL,
                "prompt": " ".join(rng.choices(words, k=load.prompt_words)),
                "max_tokens": load.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            file.write(json.dumps(body) + "\n")


# Any: figures as JSON.
def run_in_turns(
    ports: Mapping[str, int], loads: Sequence[Load], rounds: int, folder: Path, loadgen: Path
) -> dict[str, Any]:
    """Returns for each load and server the medians of `rounds` runs; each round runs every server.

    A run before them, which does not count, warms every server up.
    """
    result: dict[str, Any] = {}
    sent = dict.fromkeys(ports, 0)
    for load in loads:
        bodies = folder / f"bodies-{load.prompt_words}.jsonl"
        write_bodies(bodies, load)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ports}
        for turn in range(rounds + 1):
            # In alternating order, so that none always follows the same other one.
            for name, port in sorted(ports.items(), reverse=bool(turn % 2)):
                run = run_load(
                    *(loadgen, port, bodies, load.concurrency, load.seconds, {}),
                    offset=sent[name],
                    tokens_per_request=load.output_tokens,
                    path=PATH,
                )
                sent[name] += run["ok"] + load.concurrency
                if turn:
                    runs[name].append(run)
        result[f"c{load.concurrency}"] = {name: summary(found) for name, found in runs.items()}
    return result


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the medians of what the runs measured, and the sum of their failed requests."""
    return {
        "requests": sum(run["ok"] for run in runs),
        "errors": sum(run[name] for run in runs for name in ("non200", "broken", "unfinished")),
        "tokens_per_s": round(median(run["tokens_per_s"] for run in runs)),
        "tokens_per_s_runs": [round(run["tokens_per_s"]) for run in runs],
        "ttft_ms_p50": round(median(run["ttft_ms"]["p50"] for run in runs), 2),
        "ttft_ms_p99": round(median(run["ttft_ms"]["p99"] for run in runs), 2),
        "gap_ms_p50": round(median(run["gap_ms"]["p50"] for run in runs), 3),
    }


def ratios(figures: Mapping[str, Mapping[str, Any]], base: str) -> dict[str, dict[str, float]]:
    """Returns throughput and TTFT of each server as ratios to those of `base`."""
    found: dict[str, dict[str, float]] = {}
    for name, one in figures.items():
        if name != base and figures[base]["tokens_per_s"] and figures[base]["ttft_ms_p50"]:
            found[name] = {
                key: round(one[key] / figures[base][key], 3)
                for key in ("tokens_per_s", "ttft_ms_p50")
            }
    return found
