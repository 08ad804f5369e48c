"""The process that renders chat templates: batches, large prompts, ends and restarts."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

from common.errors import Unavailable
from common.trials import child_process
from frontend_svc.prompts import template_process
from frontend_svc.prompts.control_tokens import ControlTokens
from frontend_svc.prompts.prompt import TemplateError
from frontend_svc.prompts.template_process import BATCH_MAX, TemplateProcess
from tests.kit.waiting import until

pytestmark = pytest.mark.slow

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}<{{ messages[0].content }}>"
)


@pytest.fixture
def template() -> TemplateProcess:
    return TemplateProcess(TEMPLATE, bos_token=None, eos_token=None, control=ControlTokens(()))


def child_pids() -> set[int]:
    threads = Path("/proc/self/task").iterdir()
    found = [(thread / "children").read_text().split() for thread in threads]
    return {int(pid) for pids in found for pid in pids}


def pid_of(template: TemplateProcess) -> int:
    process = template._process._process
    assert process is not None
    return process.pid


async def prompt(template: TemplateProcess, content: str) -> str:
    made = await template.prompt(
        [{"role": "user", "content": content}],
        tools=None,
        template_kwargs={},
        add_generation_prompt=True,
        now=datetime.now(UTC),
    )
    return made.text


async def test_prompts_of_one_turn_are_rendered_in_their_order(template: TemplateProcess) -> None:
    contents = [f"prompt {number}" for number in range(3 * BATCH_MAX + 1)]
    found = await asyncio.gather(*(prompt(template, one) for one in contents))
    assert found == [f"<{one}>" for one in contents]


async def test_a_prompt_larger_than_the_buffers_of_a_socket(template: TemplateProcess) -> None:
    large = "large " * 2_000_000
    found = await asyncio.gather(*(prompt(template, one) for one in (large, "small")))
    assert found == [f"<{large}>", "<small>"]
    assert await prompt(template, "next") == "<next>"


async def test_a_process_that_ended_between_prompts_is_started_again(
    template: TemplateProcess,
) -> None:
    assert await prompt(template, "first") == "<first>"
    pid = pid_of(template)
    os.kill(pid, signal.SIGKILL)

    async def has_ended() -> bool:
        return pid not in child_pids()

    await until(has_ended, "the process has ended")
    assert await prompt(template, "second") == "<second>"
    assert pid_of(template) != pid


async def test_a_process_that_ended_before_its_first_prompt(template: TemplateProcess) -> None:
    pid = pid_of(template)
    os.kill(pid, signal.SIGKILL)
    assert await prompt(template, "first") == "<first>"
    assert pid_of(template) != pid


async def test_a_process_that_cannot_be_started_fails_its_prompts_only(
    template: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await prompt(template, "first") == "<first>"
    os.kill(pid_of(template), signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", failing_popen)
        found = await asyncio.gather(
            *(prompt(template, one) for one in ("a", "b")), return_exceptions=True
        )
        assert all(isinstance(one, OSError | TemplateError) for one in found), found
    assert await prompt(template, "second") == "<second>"


def failing_popen(*_args: object, **_settings: object) -> NoReturn:
    raise OSError("no memory for a process")


async def test_prompts_that_are_too_large_together_fail_and_later_ones_do_not(
    template: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(template_process, "frame", failing_frame)
        with pytest.raises(OverflowError):
            await prompt(template, "first")
    assert await prompt(template, "second") == "<second>"


def failing_frame(_json: bytes) -> NoReturn:
    raise OverflowError("int too big to convert")


async def test_only_the_prompt_that_exceeds_a_limit_fails(template: TemplateProcess) -> None:
    contents = ["a", "loop", "b"]
    tasks = [asyncio.create_task(prompt(template, one)) for one in contents]
    await until(lambda: len(template._batch) == 3, "the first prompts are sent")
    waiting = asyncio.create_task(prompt(template, "c"))  # while they are rendered
    found = await asyncio.gather(*tasks, waiting, return_exceptions=True)
    assert isinstance(found[1], TemplateError)
    assert "exceeded its limits" in str(found[1])
    assert [found[0], found[2], found[3]] == ["<a>", "<b>", "<c>"]


async def test_a_prompt_alone_that_exceeds_its_time_is_rendered_once(
    template: TemplateProcess,
) -> None:
    ends_before = child_process.unexpected_ends[child_process.TEMPLATE]
    with capture_logs() as logs, pytest.raises(TemplateError, match="exceeded its limits"):
        await prompt(template, "loop")
    assert [line["event"] for line in logs] == ["template_process_ended"]
    assert child_process.unexpected_ends[child_process.TEMPLATE] == ends_before + 1
    assert await prompt(template, "next") == "<next>"


async def test_a_prompt_alone_whose_process_ends_otherwise_is_rendered_again(
    template: TemplateProcess,
) -> None:
    task = asyncio.create_task(prompt(template, "loop"))
    await until(lambda: len(template._batch) == 1, "the prompt is sent")
    with capture_logs() as logs:
        os.kill(pid_of(template), signal.SIGKILL)
        with pytest.raises(TemplateError, match="exceeded its limits"):
            await task
    assert len(logs) == 2


async def test_a_cancelled_prompt_does_not_affect_the_next(template: TemplateProcess) -> None:
    task = asyncio.create_task(prompt(template, "x" * 1_000_000))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    assert await prompt(template, "next") == "<next>"
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_prompt_that_waits_too_long_is_unavailable(
    template: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "RENDER_TIMEOUT_S", 0.2)
    with pytest.raises(Unavailable, match="busy with other prompts"):
        await prompt(template, "loop")


async def test_json_that_cannot_be_written_fails_its_own_prompt(template: TemplateProcess) -> None:
    other = asyncio.create_task(prompt(template, "other"))
    with pytest.raises(TypeError):
        await template.prompt(
            [{"role": "user", "content": 2**70}],
            tools=None,
            template_kwargs={},
            add_generation_prompt=True,
            now=datetime.now(UTC),
        )
    assert await other == "<other>"


def test_a_process_ends_with_its_event_loop_and_is_started_again_in_another(
    template: TemplateProcess,
) -> None:
    pid = pid_of(template)
    for content in ("first", "second"):
        assert asyncio.run(prompt(template, content)) == f"<{content}>"
        assert pid not in child_pids()
        assert not template._process.is_connected


async def test_the_process_ends_with_its_template() -> None:
    template = TemplateProcess(TEMPLATE, bos_token=None, eos_token=None, control=ControlTokens(()))
    assert await prompt(template, "first") == "<first>"
    process = template._process
    pid = pid_of(template)
    assert pid in child_pids()
    del template
    gc.collect()
    assert pid not in child_pids()

    async def is_closed() -> bool:
        return not process.is_connected

    await until(is_closed, "the socket is closed")
