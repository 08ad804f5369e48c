"""The checks of tools/style, on small examples and on a repository of their own."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from tools.style.commits import check_commits, commits_since, message_problems
from tools.style.docstrings import packed_docstrings
from tools.style.functions import LINES_MAX, long_functions
from tools.style.loops import unbounded_loops
from tools.style.sleeps import sleeps

BODY = "The problem is known.\nThe solution is small. Validated by tests."


def function(lines: int, docstring: str = "") -> ast.Module:
    return ast.parse("def work():\n" + docstring + "    pass\n" * (lines - 1))


def test_a_function_of_the_limit_is_accepted_and_one_more_line_is_not() -> None:
    assert not list(long_functions(function(LINES_MAX)))
    assert list(long_functions(function(LINES_MAX + 1))) == [("work", 1, LINES_MAX + 1)]


def test_the_docstring_does_not_count_as_lines_of_a_function() -> None:
    docstring = '    """Returns nothing.\n\n    More.\n    """\n'
    assert not list(long_functions(function(LINES_MAX, docstring)))


def test_a_method_and_an_async_function_count_too() -> None:
    body = "        pass\n" * LINES_MAX
    tree = ast.parse(f"class Work:\n    async def run(self):\n{body}")
    assert [name for name, _, _ in long_functions(tree)] == ["run"]


def packed(docstring: str, fields: str = "a b c d e") -> bool:
    lines = "".join(f"    {field}: int\n" for field in fields.split())
    return bool(list(packed_docstrings(ast.parse(f'class Work:\n    """{docstring}"""\n{lines}'))))


@pytest.mark.parametrize(
    "docstring",
    [
        "Work.\n\n    a: one. b: two. c: three. d: four.",
        "Work.\n\n    a: one. b: two. c: three, in a text that fills\n    the line. d: four.",
        "Work. a, b: one. c, d: two.",
        "Work. `a` is one. `b` is two; `c` and `d` are more.",
        "Work. a (seconds): one. b: two. c: three. d: four.",
    ],
)
def test_running_text_that_explains_four_fields_is_packed(docstring: str) -> None:
    assert packed(docstring)


@pytest.mark.parametrize(
    "docstring",
    [
        "Work. a: one. b: two. c: three.",
        "Work.\n\n    a: one.\n    b: two.\n    c, d: three.\n    e: four.",
        "Work. a: one. b: two.\n\n    c: three. d: four.",
        "Work of `a`, `b`, `c` and `d`, which are not explained.",
        "Work. other: one. words: two. that: three. are: four. none: five.",
    ],
)
def test_few_explanations_a_list_and_other_words_are_not_packed(docstring: str) -> None:
    assert not packed(docstring)


def test_the_parameters_of_functions_and_constructors_count() -> None:
    text = '"""Work. a: one. b: two. c: three. d: four."""'
    source = f"def work(a, b, *, c, d):\n    {text}\n"
    assert list(packed_docstrings(ast.parse(source))) == [("work", 1)]
    source = (
        f"class Work:\n    {text}\n\n    def __init__(self, a, b):\n        self.c = self.d = a\n"
    )
    assert list(packed_docstrings(ast.parse(source))) == [("Work", 1)]


@pytest.mark.parametrize(
    "message",
    [
        f"Fix the index\n\n{BODY}\n",
        "Fix the index\n\nThe problem.\n\n- a solution\n- tests\n\nReviewed-by: A <a@b>\n",
        "Fix the index\n\nOne paragraph that wraps at seventy-two characters and\n"
        "that is followed by another line, and then\nby a third one",
        "F" * 60 + f"\n\n{BODY}",
    ],
)
def test_a_short_subject_and_three_sentences_or_lines_are_accepted(message: str) -> None:
    assert not list(message_problems(message))


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("F" * 61 + f"\n\n{BODY}", "the subject has 61 characters; limit 60"),
        ("Fix the index", "the body does not state problem, solution and validation"),
        (
            "Fix the index\n\nOne. Two.\n\nSigned-off-by: A <a@b>",
            "the body does not state problem, solution and validation",
        ),
        (f"Fix the index\n{BODY}", "no empty line after the subject"),
    ],
)
def test_a_message_without_body_or_with_a_long_subject_is_refused(
    message: str, problem: str
) -> None:
    assert list(message_problems(message)) == [problem]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("time.sleep(1)", [False]),
        ("await asyncio.sleep(PAUSE_S)", [False]),
        ("# A comment.\ntime.sleep(1)", [False]),
        ("# Sleep:\ntime.sleep(1)", [False]),
        ("# Sleep: the pace.\n\ntime.sleep(1)", [False]),
        ("# Sleep: the pace.\ntime.sleep(1)\ntime.sleep(1)", [True, False]),
        ("# Sleep: the pace.\ntime.sleep(1)", [True]),
        ("# Sleep: the pace, in a text\n# of two lines.\ntime.sleep(1)", [True]),
        ("time.sleep(1)  # Sleep: the pace.", [True]),
        ("time.sleep(1)  # Sleep: the pace.\ntime.sleep(1)", [True, False]),
        ("await asyncio.sleep(0)", []),
        ("engine.sleep()", []),
        ("from tests.sim.loop import run\nawait asyncio.sleep(1)", []),
    ],
)
def test_a_sleep_of_a_test_states_its_reason_except_in_virtual_time(
    source: str, found: list[bool]
) -> None:
    assert [has_reason for _, has_reason in sleeps(source)] == found


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("while True:\n    await call.read()", True),
        ("while send().status == 200:\n    pass", True),
        ("while not ended:\n    time.sleep(1)", True),
        ("# Ends: the peer closes.\nwhile True:\n    await call.read()", False),
        ("while True:  # Ends: the peer closes.\n    await call.read()", False),
        ("# Ends:\nwhile True:\n    await call.read()", True),
        ("while time.monotonic() < end:\n    await call.read()", False),
        ("while True:\n    assert loop.time() < deadline\n    await call.read()", False),
        ("while queue:\n    queue.pop()", False),
        (
            "async def f():\n  async with asyncio.timeout(1):\n    while True:\n      await g()",
            False,
        ),
        (
            "async with asyncio.timeout(1):\n  async def f():\n    while True:\n      await g()",
            True,
        ),
        ("from tests.sim.loop import run\nwhile True:\n    await call.read()", False),
    ],
)
def test_a_loop_that_may_wait_has_a_bound_or_states_what_ends_it(
    source: str, is_found: bool
) -> None:
    assert bool(list(unbounded_loops(source))) == is_found


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", "-C", str(root), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(root: Path, message: str) -> str:
    git(root, "commit", "-q", "--allow-empty", "-m", message)
    return git(root, "rev-parse", "HEAD")


def test_commits_after_the_first_are_read_without_merges(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    first = commit(tmp_path, "Old")
    git(tmp_path, "checkout", "-q", "-b", "side")
    commit(tmp_path, f"Side\n\n{BODY}")
    git(tmp_path, "checkout", "-q", "main")
    commit(tmp_path, "Main")
    git(tmp_path, "merge", "-q", "--no-ff", "-m", "Merge", "side")

    commits = commits_since(first, tmp_path)

    assert commits is not None
    assert sorted(message.strip() for _, message in commits) == ["Main", f"Side\n\n{BODY}"]


def test_a_history_that_does_not_reach_the_first_commit_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, "No body")
    assert check_commits(tmp_path)
    assert "not checked" in capsys.readouterr().out


def test_a_folder_without_a_repository_passes(tmp_path: Path) -> None:
    assert check_commits(tmp_path)
