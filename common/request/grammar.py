"""Compiles the constraints of guided decoding with llguidance. Pure.

The frontend checks a constraint before it requests a worker; the sim engine masks tokens with the
compiled constraint. JSON is compact: no white space between its tokens, unless a whitespace_pattern
allows it. Keywords of JSON Schema that the library does not implement are refused, never ignored.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.request.preprocessed import GuidedDecoding

# Size of a constraint as llguidance receives it.
GRAMMAR_BYTES_MAX: Final = 262_144
_MESSAGE_CHARS_MAX: Final = 240
# Bytes of a text that are matched at once.
_MATCH_BYTES: Final = 64
# Output of a check.
_WALK_TOKENS: Final = 256
_OUTPUT_BYTES: Final = range(0x21, 0x7F)
# Free text outside structural tags consists of words, since the sim engine's output does: an engine
# may restrict free text further.
_FREE_TEXT: Final = "/( [A-Za-z]+)+/"
# The first mask of an adversarial expression takes about half a second with these limits.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=20_000, verbose_errors=False
)


class ConstraintError(ValueError):
    """A constraint is malformed, too large or too complex, or uses a feature that the library does
    not have."""


def compile_constraint(tokenizer: LLTokenizer, guided: GuidedDecoding) -> LLMatcher:
    """Returns the matcher at the start of the output. Raises ConstraintError."""
    matcher = LLMatcher(tokenizer, _grammar_of(guided), log_level=0, limits=_LIMITS)
    next_mask(matcher)  # most of the work is done for the first token
    return matcher


def next_mask(matcher: LLMatcher) -> bytes:
    """Returns a bit per token id: whether it may be next. Raises ConstraintError, also if a limit
    of the library is exceeded in the middle of an output."""
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
    if matcher.is_error():
        # On one line, without a quotation of the whole grammar.
        raise ConstraintError(" ".join(matcher.get_error().split())[:_MESSAGE_CHARS_MAX])
    return mask


def check_constraint(guided: GuidedDecoding) -> None:
    """Compiles a constraint for a vocabulary of single bytes, and computes the masks of an output.
    Takes time and memory that the constraint decides: a trial (`common/trials`) runs it, so that a
    constraint with masks that take too long exceeds the trial's limit. Raises ConstraintError."""
    matcher = compile_constraint(_byte_tokenizer(), guided)
    # An engine that exceeds a limit of the library later ends that output only.
    with contextlib.suppress(ConstraintError):
        _walk(matcher)


def _walk(matcher: LLMatcher) -> None:
    """Computes the masks of an output that avoids white space, which may repeat without end."""
    rng = Random(0)
    for _ in range(_WALK_TOKENS):
        bits = int.from_bytes(next_mask(matcher), "little")
        allowed = [byte for byte in _OUTPUT_BYTES if bits >> byte & 1]
        if not allowed or not matcher.consume_token(rng.choice(allowed)):
            return


def prepare_checks() -> None:
    """Builds what all checks share."""
    _byte_tokenizer()


def matches_constraint(guided: GuidedDecoding, text: str, is_late: Callable[[], bool]) -> bool:
    """Returns whether a whole text matches a constraint, with any white space between the tokens of
    JSON unless a whitespace_pattern is set. is_late: returns whether the time for it is used up.
    Raises ConstraintError if a limit is exceeded."""
    grammar = _grammar_of(guided)
    if guided.json is not None and guided.whitespace_pattern is None:
        options: Any = {"whitespace_flexible": True, "lenient": False}
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(guided.json), overrides=options)
        text = text.strip()
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=_LIMITS)
    data = list(text.encode("utf-8", "replace"))
    for start in range(0, len(data), _MATCH_BYTES):
        # A mask restores the budget of the library. It also raises if the text did not match
        # because that was used up. Other threads run meanwhile.
        next_mask(matcher)
        if is_late():
            raise ConstraintError(f"only {start} of {len(data)} bytes were matched in time")
        part = data[start : start + _MATCH_BYTES]
        if matcher.try_consume_tokens(part) != len(part):
            next_mask(matcher)
            return False
    return matcher.is_accepting()


def _grammar_of(guided: GuidedDecoding) -> str:
    try:
        grammar = _to_grammar(guided)
        size = len(grammar.encode())  # JSON can contain lone surrogates, which have no encoding
    except RecursionError:
        raise ConstraintError("it is nested too deeply") from None
    except ConstraintError:
        raise
    except Exception as error:  # gbnf_to_lark raises plain Exception
        raise ConstraintError(str(error)[:_MESSAGE_CHARS_MAX]) from error
    if size > GRAMMAR_BYTES_MAX:
        raise ConstraintError(f"it has {size}/{GRAMMAR_BYTES_MAX} bytes")
    return grammar


def _to_grammar(guided: GuidedDecoding) -> str:
    size = max(len(text or "") for text in (guided.regex, guided.grammar))
    if size > GRAMMAR_BYTES_MAX:  # before the conversion, which takes longer
        raise ConstraintError(f"it has {size}/{GRAMMAR_BYTES_MAX} characters")
    if guided.regex is not None:
        return LLMatcher.grammar_from_regex(guided.regex)
    if guided.choice is not None:
        return "start: " + " | ".join(map(_quote, guided.choice))
    if guided.grammar is not None:
        return gbnf_to_lark(guided.grammar)
    if guided.structural_tag is not None:
        rules: list[str] = []
        tag: Any = guided.structural_tag
        start = _format_expression(tag["format"], rules)
        return "\n".join(("%llguidance {}", f"start: {start}", *rules, f"TEXT: {_FREE_TEXT}"))
    options = _json_options(guided.whitespace_pattern)
    return LLMatcher.grammar_from_json_schema(json.dumps(guided.json), overrides=options)


# Any: llguidance does not export the type.
def _json_options(whitespace_pattern: str | None) -> Any:
    if whitespace_pattern is None:
        return {"whitespace_flexible": False, "lenient": False}
    return {"whitespace_pattern": whitespace_pattern, "lenient": False}


# Any, here and below: JSON.
def _format_expression(form: Any, rules: list[str]) -> str:
    """Returns a format of a structural tag as an expression; its rules are appended to `rules`."""
    match form["type"]:
        case "json_schema":
            return _add_rule(_json_expression(form["json_schema"]), rules)
        case "or":
            branches = [_format_expression(branch, rules) for branch in form["elements"]]
            return f"({' | '.join(branches)})"
        case "triggered_tags":
            return _tags_expression(form, rules)
    raise ValueError(f"structural tags have no format {form['type']!r}")


def _tags_expression(form: Any, rules: list[str]) -> str:
    tags = [
        _add_rule(
            f"{_quote(tag['begin'])} {_format_expression(tag['content'], rules)}"
            f" {_quote(tag['end'])}",
            rules,
        )
        for tag in form["tags"]
    ]
    group = f"({' | '.join(tags)})"
    is_single = form.get("stop_after_first", False)
    if form.get("at_least_one", False):
        return group if is_single else f"{group}+"
    calls = f"{group}?" if is_single else f"{group}*"
    return f"(TEXT {calls} | {group if is_single else f'{group}+'})"  # never empty


def _add_rule(expression: str, rules: list[str]) -> str:
    name = f"rule_{len(rules)}"
    rules.append(f"{name}: {expression}")
    return name


def _json_expression(schema: Any) -> str:
    # A schema of `true` accepts all JSON, and `%json` needs an object.
    options = {"x-guidance": _json_options(None)}
    return f"%json {json.dumps((schema if isinstance(schema, dict) else {}) | options)}"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Bytes:
    """A vocabulary of single bytes, in the interface of llguidance."""

    eos_token_id = 256
    bos_token_id = None
    tokens: Sequence[bytes] = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))
