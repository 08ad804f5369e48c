"""Options of generation: when it stops, how tokens are chosen, what is returned. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from common.errors import InvalidRequest
from common.request.preprocessed.codecs import I32, I64, SKIP, U32, JsonValue, no_op

PENALTY_PREFIX: Final = "sampling_options.prefix_tokens"
"""The field by which penalties count the output of another worker."""

CONSTRAINT_PREFIX: Final = "sampling_options.guided_decoding.prefix_tokens"
"""The field by which a constraint continues after the output of another worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """The first to hold ends generation; the response excludes a hidden stop token only."""

    max_tokens: U32 | None = None
    stop: tuple[str, ...] = field(default=(), metadata=SKIP)
    stop_token_ids_hidden: tuple[U32, ...] = field(default=(), metadata=SKIP)
    stop_token_ids_visible: tuple[U32, ...] = field(default=(), metadata=SKIP)
    min_tokens: U32 | None = field(default=None, metadata=no_op(0))
    ignore_eos: bool | None = field(default=None, metadata=no_op(False))
    max_thinking_tokens: U32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecoding:
    """Exactly one constraint on the text; InvalidRequest for more, none or an empty choice.

    prefix_tokens: the last this many tokens of the prompt are output under the constraint.
    best_effort: an engine may ignore the constraint.
    """

    json: JsonValue = field(default=None, metadata={"proto": "json_schema_json"})
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: JsonValue = None
    backend: str | None = None
    whitespace_pattern: str | None = None
    prefix_tokens: U32 | None = field(default=None, metadata=no_op(0))
    best_effort: bool | None = field(default=None, metadata=no_op(False))

    def __post_init__(self) -> None:
        constraints = (self.json, self.regex, self.choice, self.grammar, self.structural_tag)
        if sum(constraint is not None for constraint in constraints) != 1:
            raise InvalidRequest(
                "guided decoding needs exactly one of json, regex, choice, grammar, structural_tag",
                "sampling_options.guided_decoding",
            )
        if self.choice == ():
            raise InvalidRequest(
                "guided decoding by choice needs at least one text",
                "sampling_options.guided_decoding.choice",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen; None selects the engine's default.

    prefix_tokens: the last this many tokens of the prompt are output, which penalties count.
    """

    n: U32 | None = field(default=None, metadata=no_op(1))
    best_of: U32 | None = field(default=None, metadata=no_op(1))
    presence_penalty: float | None = field(default=None, metadata=no_op(0))
    frequency_penalty: float | None = field(default=None, metadata=no_op(0))
    repetition_penalty: float | None = field(default=None, metadata=no_op(1))
    temperature: float | None = None
    top_p: float | None = field(default=None, metadata=no_op(1))
    top_k: I32 | None = field(default=None, metadata=no_op(-1, 0))
    min_p: float | None = field(default=None, metadata=no_op(0))
    use_beam_search: bool | None = field(default=None, metadata=no_op(False))
    length_penalty: float | None = field(default=None, metadata=no_op(1))
    seed: I64 | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, metadata=SKIP)
    guided_decoding: GuidedDecoding | None = None
    prefix_tokens: U32 | None = field(default=None, metadata=no_op(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Content of the response besides token ids; logprobs: number of alternatives, may be 0."""

    logprobs: U32 | None = None
    prompt_logprobs: U32 | None = None
    skip_special_tokens: bool | None = field(default=None, metadata=no_op(True))
    formatted_prompt: bool | None = field(default=None, metadata=no_op(False))
    include_stop_str_in_output: bool | None = field(default=None, metadata=no_op(False))
    return_tokens_as_token_ids: bool | None = field(default=None, metadata=no_op(False))
