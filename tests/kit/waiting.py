"""Waits for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

# What these conditions wait for takes less than a second on an idle machine.
WAIT_S = 30.0
POLL_S = 0.002
PROCESS_POLL_S = 0.01

T = TypeVar("T")


def wait_for(condition: Callable[[], T], description: str, timeout_s: float = WAIT_S) -> T:
    """Returns the first true value of `condition`; blocks meanwhile.

    Raises AssertionError with `description` after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {description}"
        time.sleep(PROCESS_POLL_S)
    return value


@overload
async def until(
    condition: Callable[[], Awaitable[T]],
    what: str,
    within_s: float = WAIT_S,
    poll_s: float = POLL_S,
) -> T: ...


@overload
async def until(
    condition: Callable[[], T], what: str, within_s: float = WAIT_S, poll_s: float = POLL_S
) -> T: ...


# Any: the value of the condition.
async def until(
    condition: Callable[[], Any], what: str, within_s: float = WAIT_S, poll_s: float = POLL_S
) -> Any:
    """Returns the first true value of `condition`, a plain or an async function.

    Raises AssertionError with `what` after `within_s`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert loop.time() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(poll_s)
