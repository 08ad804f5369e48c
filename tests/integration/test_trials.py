"""Trials in real processes: limits of time, memory and output, crashes, ends and restarts."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import Overloaded, Unavailable
from common.trials import trials as trials_module
from common.trials.fair_trials import FairTrials
from common.trials.trial import Trial, TrialExceeded, TrialLimits, TrialRefused
from common.trials.trials import Trials
from tests.kit.waiting import until

pytestmark = pytest.mark.slow

FUNCTIONS = "tests.kit.trial_functions"
LIMITS = TrialLimits(cpu_s=0.3, wall_s=20.0, memory_bytes=64 << 20)


@pytest.fixture
def trials() -> Trials:
    return Trials((f"{FUNCTIONS}:prepare",))


def trial(name: str, *arguments: object, limits: TrialLimits = LIMITS) -> Trial:
    return Trial(f"{FUNCTIONS}:{name}", arguments, limits)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_trial_returns_the_result_of_its_function(trials: Trials) -> None:
    results = await asyncio.gather(*(trials.run(trial("double", one)) for one in range(50)))
    assert results == [2 * one for one in range(50)]


async def test_an_invalid_input_is_refused_with_its_reason(trials: Trials) -> None:
    with pytest.raises(TrialRefused, match="it is odd"):
        await trials.run(trial("refuse", "it is odd"))
    with pytest.raises(TrialRefused, match="a panic"):
        await trials.run(trial("raise_panic"))


async def test_a_trial_without_end_is_ended_at_its_limit_of_time(trials: Trials) -> None:
    with pytest.raises(TrialExceeded, match=r"more than 0\.3 s") as exceeded:
        await trials.run(trial("loop"))
    assert exceeded.value.is_time
    assert await trials.run(trial("double", 1)) == 2


async def test_a_trial_that_waits_is_ended_too(trials: Trials, tmp_path: Path) -> None:
    limits = TrialLimits(cpu_s=0.3, wall_s=0.5, memory_bytes=64 << 20)
    with pytest.raises(Overloaded):
        await trials.run(trial("wait", str(tmp_path / "file"), limits=limits))


async def test_the_wait_of_a_trial_counts_from_its_begin_however_late_that_is_seen(
    trials: Trials, tmp_path: Path
) -> None:
    assert await trials.run(trial("double", 1)) == 2
    limits = TrialLimits(cpu_s=0.3, wall_s=0.5, memory_bytes=64 << 20)
    waiting = asyncio.create_task(trials.run(trial("wait", str(tmp_path / "file"), limits=limits)))
    # The trial is requested; this process does not run until it has ended.
    await asyncio.sleep(0)
    # Sleep: stands for a busy machine.
    time.sleep(1.0)  # noqa: ASYNC251
    with pytest.raises(Overloaded):
        await waiting


@pytest.mark.parametrize(
    "name", ["allocate", "crash"], ids=["too much memory", "a fault of a library"]
)
async def test_memory_and_crashes_end_the_trial_only(trials: Trials, name: str) -> None:
    # Within this time, an end without a reply is one for want of memory.
    limits = replace(LIMITS, cpu_s=10.0)
    arguments = (1 << 30,) if name == "allocate" else ()
    with pytest.raises(TrialExceeded, match="more than 64 MiB of memory") as exceeded:
        await trials.run(trial(name, *arguments, limits=limits))
    assert not exceeded.value.is_time
    assert await trials.run(trial("allocate", 1 << 20)) == 1 << 20


async def test_a_large_result_ends_its_trial(trials: Trials) -> None:
    with pytest.raises(TrialExceeded, match="65536 bytes of output"):
        await trials.run(trial("text_of", 1 << 17))
    assert await trials.run(trial("text_of", 1 << 10)) == "x" * 1024


async def test_a_large_argument_arrives(trials: Trials) -> None:
    limits = TrialLimits(cpu_s=5.0, wall_s=20.0, memory_bytes=64 << 20)
    assert await trials.run(trial("length", "y" * 20_000_000, limits=limits)) == 20_000_000


async def test_a_trial_writes_no_files(trials: Trials, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises((TrialRefused, TrialExceeded)):
        await trials.run(trial("write_file", str(path)))
    assert not path.exists() or not path.read_bytes()


async def test_a_cancelled_trial_is_ended(trials: Trials, tmp_path: Path) -> None:
    path = tmp_path / "file"
    waiting = asyncio.create_task(trials.run(trial("wait", str(path))))
    link = tmp_path / "file.pid"
    await until(link.is_symlink, "the trial runs")
    pid = int(os.readlink(link))
    assert is_running(pid)
    waiting.cancel()
    await until(lambda: not is_running(pid), "the trial has ended")


async def test_a_process_that_ended_is_started_again(trials: Trials) -> None:
    assert await trials.run(trial("double", 1)) == 2
    forker = trials._forker
    assert forker is not None
    os.kill(forker.pid, signal.SIGKILL)
    assert await trials.run(trial("double", 2)) == 4


async def test_a_process_that_cannot_start_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_arguments: object, **_settings: object) -> None:
        raise OSError("no memory for a process")

    trials = Trials((f"{FUNCTIONS}:prepare",))
    with monkeypatch.context() as patch:
        patch.setattr(trials_module, "start_child", fail)
        with pytest.raises(Unavailable):
            await trials.run(trial("double", 1))
    assert await trials.run(trial("double", 1)) == 2


async def test_long_trials_of_a_client_delay_neither_its_short_ones_nor_other_clients(
    trials: Trials,
) -> None:
    fair, loop = FairTrials(trials), asyncio.get_running_loop()
    limits = TrialLimits(cpu_s=5.0, wall_s=20.0, memory_bytes=64 << 20)
    bombs = [
        asyncio.create_task(fair.run(trial("loop", limits=limits), "a", loop.time() + 60.0))
        for _ in range(4)
    ]
    try:
        await asyncio.sleep(0)
        for sender in ("b", "a", "c"):
            begin = loop.time()
            assert await fair.run(trial("double", 1), sender, loop.time() + 20.0) == 2
            print(f"{sender}: {loop.time() - begin:.3f} s")
        assert not any(bomb.done() for bomb in bombs)
    finally:
        for bomb in bombs:
            bomb.cancel()
        await asyncio.gather(*bombs, return_exceptions=True)


async def test_a_process_that_hangs_is_replaced(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await trials.run(trial("double", 1)) == 2
    forker = trials._forker
    assert forker is not None
    os.kill(forker.pid, signal.SIGSTOP)
    monkeypatch.setattr(trials_module, "BEGIN_S", 3.0)
    async with asyncio.timeout(30.0):
        assert await trials.run(trial("double", 2)) == 4
    pid = forker.pid
    del forker
    await until(lambda: not is_running(pid), "the process has ended")


LIMITED = f"""
import asyncio
from common.trials.trial import Trial, TrialLimits
from common.trials.trials import Trials

trial = Trial("{FUNCTIONS}:double", (2,), TrialLimits(5.0, 20.0, 64 << 30))
print(asyncio.run(Trials(("{FUNCTIONS}:prepare",)).run(trial)))
"""


async def test_lower_limits_of_the_system_stay_in_force() -> None:
    """As after `ulimit -v`: a process cannot raise a hard limit."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LIMITED),
        preexec_fn=limit,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert output == b"4\n", errors.decode()
