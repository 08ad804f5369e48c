"""The writing end of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from common.errors import Conflict, Unavailable
from common.streams.writer import FrameWriter


class Queue:
    """Numbers to write; a frame has all that are queued."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.written: list[list[int]] = []
        self.builds = 0
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.on_written: Callable[[], None] = lambda: None
        self.writer = FrameWriter(self.next_frame)

    def next_frame(self) -> list[int] | None:
        self.builds += 1
        frame, self.numbers = self.numbers, []
        return frame or None

    def put(self, number: int) -> None:
        self.numbers.append(number)
        self.writer.wake()

    async def write(self, frame: list[int]) -> None:
        await self.may_write.wait()
        self.written.append(frame)
        self.on_written()


async def run_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_frame_has_all_that_was_queued_since_the_write_before_it_began() -> None:
    queue = Queue()
    queue.put(1)
    running = asyncio.create_task(queue.writer.run(queue.write))
    queue.may_write.clear()
    await run_tasks()
    for number in (2, 3, 4):
        queue.put(number)
    queue.may_write.set()
    await run_tasks()
    assert queue.written == [[1], [2, 3, 4]]
    queue.writer.close()
    await running


async def test_a_wake_up_during_a_write_costs_no_further_attempt() -> None:
    queue = Queue()
    running = asyncio.create_task(queue.writer.run(queue.write))
    await run_tasks()
    assert queue.builds == 1
    queue.put(1)
    queue.put(2)
    await run_tasks()
    assert queue.written == [[1, 2]]
    assert queue.builds == 3, "one frame, and nothing after it"
    queue.writer.close()
    await running


async def test_a_closed_writer_writes_what_is_queued_and_ends() -> None:
    queue = Queue()
    queue.put(1)
    queue.writer.close()
    await queue.writer.run(queue.write)
    assert queue.written == [[1]]
    assert queue.writer.is_closed


async def test_a_writer_that_is_closed_with_an_error_raises_it_after_the_last_frame() -> None:
    queue = Queue()
    queue.put(1)
    queue.writer.close(Conflict("first"))
    queue.writer.close(Conflict("second"))
    with pytest.raises(Conflict, match="first"):
        await queue.writer.run(queue.write)
    assert queue.written == [[1]]


async def test_a_writer_that_waits_ends_when_it_is_closed() -> None:
    queue = Queue()
    running = asyncio.create_task(queue.writer.run(queue.write))
    await run_tasks()
    queue.writer.close()
    await asyncio.wait_for(running, 1.0)


async def test_a_wake_up_at_a_time_is_replaced_by_an_earlier_one_and_by_a_frame() -> None:
    queue = Queue()
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(queue.writer.run(queue.write))
    await run_tasks()
    writes: list[float] = []
    queue.on_written = lambda: writes.append(loop.time())
    queue.numbers.append(1)
    began = loop.time()
    queue.writer.wake_at(began + 60.0)
    queue.writer.wake_at(began + 0.02)
    queue.writer.wake_at(began + 30.0)
    await asyncio.wait_for(queue.writer.frame_taken(), 5.0)
    await run_tasks()
    assert queue.written == [[1]]
    assert writes[0] - began >= 0.015
    queue.writer.wake_at(loop.time() + 0.01)
    queue.put(2)
    await run_tasks()
    builds = queue.builds
    queue.writer.wake_at(loop.time() + 0.02)
    queue.numbers.append(3)
    await asyncio.wait_for(queue.writer.frame_taken(), 5.0)
    await run_tasks()
    assert queue.builds == builds + 2, "one frame and nothing after it: no earlier timer"
    queue.writer.close()
    await running
    assert queue.written == [[1], [2], [3]]


async def test_a_producer_waits_until_its_queue_was_taken() -> None:
    queue = Queue()
    queue.may_write.clear()
    running = asyncio.create_task(queue.writer.run(queue.write))
    queue.put(1)
    await run_tasks()
    queue.put(2)
    waiting = asyncio.create_task(queue.writer.frame_taken())
    await run_tasks()
    assert not waiting.done(), "the write of the first frame is not finished"
    queue.may_write.set()
    await asyncio.wait_for(waiting, 1.0)
    queue.writer.close()
    await running


async def test_a_reader_beside_the_writer_ends_with_it() -> None:
    queue = Queue()
    ended = asyncio.Event()

    async def read() -> None:
        try:
            queue.put(1)
            await asyncio.Event().wait()
        finally:
            ended.set()

    queue.on_written = queue.writer.close
    await asyncio.wait_for(queue.writer.serve(read(), queue.write), 1.0)
    assert ended.is_set()
    assert queue.written == [[1]]


async def test_what_a_reader_has_queued_is_written_after_its_end() -> None:
    queue = Queue()

    async def read() -> None:
        queue.put(1)
        queue.writer.close(Conflict("read to the end"))

    with pytest.raises(Conflict, match="read to the end"):
        await asyncio.wait_for(queue.writer.serve(read(), queue.write), 1.0)
    assert queue.written == [[1]]


async def test_a_failed_write_ends_the_writer_and_the_reader() -> None:
    queue = Queue()
    queue.put(1)

    async def write(frame: list[int]) -> None:
        raise Unavailable("the peer has left")

    with pytest.raises(Unavailable, match="the peer has left"):
        # Sleep: a stream that does not end by itself.
        await asyncio.wait_for(queue.writer.serve(asyncio.sleep(60), write), 1.0)


def test_wake_ups_that_are_due_already_work_on_the_loop_of_the_services() -> None:
    """uvloop calls back at once instead of setting a timer for a delay below a millisecond."""

    async def script() -> list[list[int]]:
        queue = Queue()
        running = asyncio.create_task(queue.writer.run(queue.write))
        await run_tasks()
        queue.numbers.append(1)
        now = asyncio.get_running_loop().time()
        for at in (now - 0.1, now - 0.2, now - 0.1, now + 60.0):
            queue.writer.wake_at(at)
        await run_tasks()
        queue.writer.close()
        await running
        return queue.written

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(script()) == [[1]]
