"""Figurative words: at most LIMIT per 1,000 words for each group of PATTERNS.

They are counted in prose (comments, docstrings, Markdown), in message strings and in test names.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tools.style.sources import ROOT, git, tracked_files

LIMIT = 1.0
PATTERNS = {
    "who/whom/whose": r"\b(who|whom|whoever|whose)\b",
    "nobody/somebody": r"\b(nobody|somebody|anybody|everybody|no one)\b",
    "tell/hear/say": r"\b(tells?|telling|told|hears?|heard|says?|said)\b",
    "wish/want": r"\b(wish\w*|wants?|wanted)\b",
    "archaic": (r"\b(anew|lest|hence|thereof|seldom|for ever|thereby|upon|likewise|wholly|amid)\b"),
}
MESSAGE_WORDS_MIN = 3


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose."""

    kind: str
    """ "prose", "messages" or "test names"."""
    path: str
    line: int
    text: str


def markdown_texts(path: str) -> Iterator[Text]:
    """Yields each line of a Markdown file, without code."""
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
    """Yields comments, docstrings and messages of product code, and the test names of tests."""
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
    """Yields the texts of all tracked files."""
    for path in tracked_files("*.md"):
        yield from markdown_texts(path)
    for path in tracked_files("*.py"):
        if path != "tools/style/words.py":
            yield from python_texts(path)


def added_texts(revision: str) -> Iterator[Text]:
    """Yields the texts of all tracked files on lines added since `revision`."""
    diff = git("diff", "-U0", revision, "--", "*.py", "*.md")
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
    """Prints the figures. Returns whether each is within the limit."""
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
