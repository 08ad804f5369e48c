"""Output of meshctl."""

from __future__ import annotations

import io
import shlex
import signal
from random import Random

import pytest

from common.service.restarts import RestartPolicy, Restarts
from meshctl.process.child import ReadyLine
from meshctl.process.supervise import BecameReady, Child, Died, Event, RestartsExhausted, Stopped
from meshctl.services import ServiceSpec
from meshctl.view.screen import (
    Screen,
    describe_log_line,
    describe_status,
    find_crash_reason,
    hints,
    http_url,
    own_command,
    should_colour,
    table,
)

LINE = ReadyLine("worker", 7, "1", {"grpc": "127.0.0.1:1"})


class Shown:
    """A screen; every log ends with the line `boom`."""

    def __init__(self, colour: bool = False) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.screen = Screen(
            self.out,
            self.err,
            colour=colour,
            clock=iter([10.0, 11.26, 12.0, 13.0]).__next__,
            tail=lambda name: ["boom"],
            log=lambda name: f"logs/{name}.log",
        )

    def line(self, event: Event) -> str:
        self.screen.event(event)
        return self.out.getvalue()


def test_a_ready_service_is_one_plain_line_with_the_time_since_the_start() -> None:
    line = Shown().line(BecameReady("worker-0", LINE, 1.2))
    assert line.startswith("    1.3 s  worker-0      ready ")
    assert "pid 7" in line
    assert "\x1b" not in line


def test_a_terminal_gets_colours() -> None:
    assert "\x1b[32mready" in Shown(colour=True).line(BecameReady("worker-0", LINE, 1.2))


def test_a_death_is_one_line_with_service_status_log_and_restart() -> None:
    line = Shown().line(Died("worker-1", -9, "", 3.0, 0.2))
    assert "worker-1" in line
    assert "killed by SIGKILL after 3.0 s, see logs/worker-1.log; again in 0.2 s" in line


def test_the_reason_of_a_death_is_printed_once_until_it_changes() -> None:
    shown = Shown()
    for name, error in (("a", "no such model"), ("b", "no such model"), ("a", "no memory")):
        shown.line(Died(name, 1, "", 3.0, 0.2, error))
    assert shown.err.getvalue() == "  | no such model\n  | no memory\n"


def test_a_death_without_a_start_error_has_no_reason() -> None:
    shown = Shown()
    shown.line(Died("worker-0", -9, "", 3.0, 0.2))
    assert shown.err.getvalue() == ""


def test_exhausted_restarts_print_the_reason_only() -> None:
    shown = Shown()
    shown.line(RestartsExhausted("worker-1", 5, start_error="no such model"))
    assert shown.err.getvalue() == (
        "meshctl: worker-1 was started 5 times and was never ready\n  | no such model\n"
    )


def test_exhausted_restarts_print_the_end_of_a_log_without_a_reason() -> None:
    shown = Shown()
    shown.line(RestartsExhausted("worker-1", 5))
    assert "the end of logs/worker-1.log:\n  | boom\n" in shown.err.getvalue()


def test_an_invalid_configuration_is_printed_once() -> None:
    lines = ["worker: the configuration cannot be used:", "  --block-size: must be at least 1"]
    shown, error = Shown(), "\n".join(lines)
    shown.line(Died("worker-1", 2, "", 3.0, None, error))
    shown.line(RestartsExhausted("worker-1", 1, is_retryable=False, start_error=error))
    assert shown.err.getvalue() == (
        "".join(f"  | {line}\n" for line in lines)
        + "meshctl: worker-1 has an invalid configuration\n"
    )


def test_a_service_killed_after_sigterm_is_reported_as_killed() -> None:
    assert "killed    20.3 s after SIGTERM" in Shown().line(Stopped("router-0", -9, 20.3, True))


def test_exit_statuses_are_words() -> None:
    assert describe_status(3) == "exit status 3"
    assert describe_status(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert describe_status(-63) == "killed by signal 63"
    assert describe_status(None) == "could not be started"


def test_the_table_has_a_row_for_each_service() -> None:
    child = Child(
        ServiceSpec("frontend-0", "frontend_svc", (), 0, 1.0), Restarts(RestartPolicy(), Random())
    )
    header, row = table([child])
    assert header.split() == ["SERVICE", "STATE", "PID", "ADDRESS", "URL"]
    assert row.split() == ["frontend-0", "starting", "-", "-", "-"]
    child.line = ReadyLine("frontend", 1, "1", {"grpc": "h:1", "http": "h:2"})
    assert table([child])[1].split()[-2:] == ["h:1", "http://h:2"]


def test_an_address_that_is_a_url_stays_one() -> None:
    assert http_url(ReadyLine("f", 1, "1", {"http": "https://h"})) == "https://h"
    assert http_url(None) == ""


def test_the_hint_is_a_command_line_even_for_a_model_with_quotes_in_its_name() -> None:
    words = shlex.split(hints("http://h:1", "it's")[1])
    assert words[:2] == ["chat", "curl"]
    assert '"model": "it\'s"' in words[-1]


@pytest.mark.parametrize(
    ("program", "typed"),
    [
        (".venv/bin/meshctl", ".venv/bin/meshctl"),
        ("/usr/bin/meshctl", "meshctl"),
        ("/srv/mesh/bin/meshctl", "/srv/mesh/bin/meshctl"),
        ("/srv/mesh/meshctl/__main__.py", "python -m meshctl"),
    ],
)
def test_hints_name_the_command_as_the_user_can_type_it(program: str, typed: str) -> None:
    command = own_command(program, "/bin:/usr/bin")
    assert command == typed
    assert hints("http://h:1", "sim", command)[2] == f"status   {typed} status"


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_disables_colours(environ: dict[str, str]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert should_colour(Terminal(), {})
    assert not should_colour(Terminal(), environ)
    assert not should_colour(io.StringIO(), {})


def test_a_log_line_is_shown_as_its_event_and_its_own_fields() -> None:
    line = '{"event":"loading","shard":3,"service":"worker","level":"info","timestamp":"t"}'
    assert describe_log_line(line) == "loading shard=3"
    for other in ("plain text", "", "[1]", "3"):
        assert describe_log_line(other) == other


def test_the_reason_of_a_crash_is_the_last_error_of_the_log() -> None:
    stopped = '{"event":"stopped","status":1,"level":"info"}'
    failed = '{"event":"task_failed","level":"error","exception":"Traceback\\nOSError: no disk"}'
    assert find_crash_reason([failed, stopped]) == "task_failed: OSError: no disk"
    assert find_crash_reason([failed, "Fatal Python error: Aborted"]) == (
        "Fatal Python error: Aborted"
    )
    assert find_crash_reason([stopped]) == "stopped status=1"
    assert find_crash_reason([]) == ""
