#!/usr/bin/env python3
"""Check the language and the names of the repository; part of `make lint`.

usage: style.py             print the figures; exit status 1 if one is above its limit
       style.py --where     also print each place that counts
       style.py --diff REV  count only prose that was added since the commit REV

Checks:
- Figurative words per 1,000 words of prose (comments, docstrings, Markdown), of message strings and
  of test names: at most LIMIT for each group of PATTERNS.
- Log events are snake_case.
- One public class name is defined once in each service.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1.0
PATTERNS = {
    "who/whom/whose": r"\b(who|whom|whoever|whose)\b",
    "nobody/somebody": r"\b(nobody|somebody|anybody|everybody|no one)\b",
    "tell/hear/say": r"\b(tells?|telling|told|hears?|heard|says?|said)\b",
    "wish/want": r"\b(wish\w*|wants?|wanted)\b",
    "archaic": (r"\b(anew|lest|hence|thereof|seldom|for ever|thereby|upon|likewise|wholly|amid)\b"),
}
SERVICES = ("common", "frontend_svc", "router_svc", "indexer_svc", "worker_svc", "meshctl")
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
LOGGERS = {"log", "LOG", "logger"}
EVENT = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
MESSAGE_WORDS_MIN = 3


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose. kind: "prose", "messages" or "test names"."""

    kind: str
    path: str
    line: int
    text: str


def tracked_files(*patterns: str) -> list[str]:
    """Tracked files that match the patterns, without generated code."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", *patterns], capture_output=True, text=True, check=True
    )
    return [name for name in done.stdout.splitlines() if "_pb2" not in name]


def markdown_texts(path: str) -> Iterator[Text]:
    """Each line of a Markdown file, without code."""
    text = re.sub(
        r"```.*?```|`[^`\n]*`",
        lambda code: "\n" * code[0].count("\n"),
        (ROOT / path).read_text("utf-8"),
        flags=re.S,
    )
    for number, line in enumerate(text.splitlines(), 1):
        yield Text("prose", path, number, line)


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, ast.Constant]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:  # a string after an attribute documents the attribute
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, statement.value


def python_texts(path: str) -> Iterator[Text]:
    """Comments, docstrings and message strings of product code; the test names of test code."""
    source = (ROOT / path).read_text("utf-8")
    tree = ast.parse(source)
    if path.startswith("tests/"):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
                "test_"
            ):
                yield Text("test names", path, node.lineno, node.name[5:].replace("_", " "))
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text("prose", path, token.start[0], token.string.lstrip("# "))
    documented = set()
    for line, constant in _docstrings(tree):
        documented.add(id(constant))
        if isinstance(constant.value, str):
            yield Text("prose", path, line, re.sub(r"`[^`]*`", " ", constant.value))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documented
            and len(node.value.split()) >= MESSAGE_WORDS_MIN
        ):
            yield Text("messages", path, node.lineno, node.value)


def all_texts() -> Iterator[Text]:
    """The texts of all tracked files."""
    for path in tracked_files("*.md"):
        yield from markdown_texts(path)
    for path in tracked_files("*.py"):
        if path != "tools/style.py":
            yield from python_texts(path)


def added_texts(revision: str) -> Iterator[Text]:
    """The texts of all tracked files on lines added since `revision`."""
    diff = subprocess.run(
        ["git", "-C", str(ROOT), "diff", "-U0", revision, "--", "*.py", "*.md"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    added: dict[str, set[int]] = defaultdict(set)
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            path = line[6:]
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            added[path].update(range(first, first + count))
    for text in all_texts():
        last = text.line + text.text.count("\n")
        if not added[text.path].isdisjoint(range(text.line, last + 1)):
            yield text


def check_words(texts: Iterable[Text], where: bool) -> bool:
    """Print the figures; True if each is within the limit."""
    words: dict[str, int] = defaultdict(int)
    hits: dict[str, dict[str, list[Text]]] = defaultdict(lambda: defaultdict(list))
    for text in texts:
        words[text.kind] += len(re.findall(r"[A-Za-z']+", text.text))
        for name, pattern in PATTERNS.items():
            hits[text.kind][name] += [text] * len(re.findall(pattern, text.text, re.I))
    passed = True
    for kind in sorted(words):
        print(f"{kind}: {words[kind]} words")
        for name in PATTERNS:
            found = hits[kind][name]
            rate = 1000 * len(found) / max(1, words[kind])
            is_over = rate > LIMIT
            passed = passed and not is_over
            verdict = f"  above the limit of {LIMIT}" if is_over else ""
            print(f"  {name:16s} {len(found):5d}  {rate:5.2f} per 1,000 words{verdict}")
            for text in found if where or is_over else ():
                print(f"      {text.path}:{text.line}: {' '.join(text.text.split())[:100]}")
    return passed


def check_log_events() -> bool:
    """True if each log event of product code is snake_case."""
    wrong = [
        f"{path}:{node.lineno}: log event is not snake_case: {node.args[0].value!r}"
        for path in tracked_files(*(f"{service}/*.py" for service in SERVICES))
        for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LOG_METHODS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in LOGGERS
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and not EVENT.fullmatch(str(node.args[0].value))
    ]
    print("\n".join(wrong) or "log events: all snake_case")
    return not wrong


def check_class_names() -> bool:
    """True if no public class name is defined in two modules of one service."""
    wrong = []
    for service in SERVICES:
        places: dict[str, list[str]] = defaultdict(list)
        for path in tracked_files(f"{service}/*.py"):
            for node in ast.parse((ROOT / path).read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(path)
        wrong += [
            f"{service}: class {name} is defined in {', '.join(paths)}"
            for name, paths in sorted(places.items())
            if len(paths) > 1
        ]
    print("\n".join(wrong) or "class names: each once in its service")
    return not wrong


def main() -> int:
    """Run the checks of the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="style.py", description="Check language and names.")
    parser.add_argument("--where", action="store_true", help="print each place that counts")
    parser.add_argument("--diff", metavar="REV", help="count only prose added since REV")
    args = parser.parse_args()
    texts = added_texts(args.diff) if args.diff else all_texts()
    checks = [check_words(texts, args.where), check_log_events(), check_class_names()]
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
