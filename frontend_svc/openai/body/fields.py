"""Types of the fields of request bodies (pure): ranges, unions, refusals by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, LiteralString, NoReturn, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

STOP_STRINGS_MAX = 32
# Text up to the length of the longest stop string is withheld from the client.
STOP_CHARS_MAX = 1024
STOP_TOKEN_IDS_MAX = 256
MODEL_CHARS_MAX = 512
TAINTS_MAX = 64
WORKER_IDS_MAX = 1024
ANNOTATIONS_MAX = 64
TAINT_CHARS_MAX = 256
SESSION_ID_CHARS_MAX = 256
METADATA_PAIRS_MAX = 16
GUIDED_CHOICES_MAX = 1024
N_MAX = 128
# Choices of a response: prompts times n.
CHOICES_MAX = 256
# Of all prompts of a request, together.
PROMPT_TOKENS_MAX = 2**20
TOOLS_MAX = 128
MESSAGES_MAX = 4096
# Of a message: parts of its content, and calls.
PARTS_MAX = 4096
CALLS_MAX = 1024
BIASES_MAX = 1024
CACHE_SALT_CHARS_MAX = 256
CACHE_KEY_CHARS_MAX = 1024
# A day, the longest request.
TARGET_MS_MAX = 86_400_000
# Unknown keys of an object. Without a limit, one body could cause millions of error reports.
KEYS_MAX = 64
_EXPECTED_TEMPLATE: LiteralString = "{expected}"
_DECIMAL_PATTERN = "^[0-9]{1,20}$"
_DECIMAL = re.compile(_DECIMAL_PATTERN)


# Compared by identity: typing caches Annotated by its equal arguments, and False equals 0.
@dataclass(frozen=True, slots=True, eq=False)
class Refusal:
    """Annotation of a field that has no effect: refuses all values by name but null and
    `no_op_values`, which become None."""

    message: str
    no_op_values: tuple[object, ...]

    def check(self, value: object) -> None:
        accepted = self.no_op_values
        if value is None or any(
            type(value) is type(no_op) and value == no_op for no_op in accepted
        ):
            return
        raise unsupported(self.message)

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, _handler: GetJsonSchemaHandler
    ) -> dict[str, object]:
        return {"enum": [None, *self.no_op_values]}


def refuse(message: str, *no_op_values: object) -> Refusal:
    return Refusal(message, no_op_values)


def unsupported(message: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{message}", {"message": message})


NO_FUNCTIONS = "use tools and tool_choice"
NO_AUDIO = "only text is available"
NO_RETENTION = "engines evict the blocks used longest ago, and keep none for a time"
NO_THINKING_LIMIT = "no engine can limit the tokens of the reasoning"

U32: TypeAlias = Annotated[int, Field(ge=0, le=2**32 - 1)]
U64: TypeAlias = Annotated[int, Field(ge=0, le=2**64 - 1)]
I32: TypeAlias = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
I64: TypeAlias = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Priority: TypeAlias = Annotated[int, Field(ge=-(2**31) + 1, le=2**31 - 1)]
AtLeastOne: TypeAlias = Annotated[int, Field(ge=1, le=2**32 - 1)]
CacheSalt: TypeAlias = Annotated[str, Field(min_length=1, max_length=CACHE_SALT_CHARS_MAX)]
StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]
CacheKey: TypeAlias = Annotated[str, Field(max_length=CACHE_KEY_CHARS_MAX)]
Taint: TypeAlias = Annotated[str, Field(min_length=1, max_length=TAINT_CHARS_MAX)]
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
Factor: TypeAlias = Annotated[float, Field(ge=0)]
Target: TypeAlias = Annotated[float, Field(gt=0, le=TARGET_MS_MAX)]
Timestamp: TypeAlias = Annotated[float, Field(ge=0, le=1e15)]
Weight: TypeAlias = Annotated[float, Field(ge=-1000, le=1000)]
FunctionName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
GuidedChoices: TypeAlias = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=GUIDED_CHOICES_MAX, fail_fast=True),
]
UnsupportedField: TypeAlias = Annotated[object, refuse("this server has no such feature")]

# Tags of the branches of a union. pydantic puts them into the path of an error, from which
# `validation_errors` removes them; the NUL distinguishes them from keys that a client sends.
TAG_PREFIX = "\0"
TEXT, OBJECT, LIST, TOKEN_IDS, MANY_PROMPTS, WRONG_TYPE = (
    "\0text",
    "\0object",
    "\0list",
    "\0ids",
    "\0many",
    "\0neither",
)


def text_or_list(value: object) -> str:
    match value:
        case str():
            return TEXT
        case list():
            return LIST
    return WRONG_TYPE


def text_or_object(value: object) -> str:
    match value:
        case str():
            return TEXT
        case dict() | BaseModel():  # a model: of a body that was translated
            return OBJECT
    return WRONG_TYPE


def prompt_kind(value: object) -> str:
    match value:
        case str():
            return TEXT
        case [int(), *_]:
            return TOKEN_IDS
        case [list(), *_]:
            return MANY_PROMPTS
        case list():
            return LIST
    return WRONG_TYPE


def wrong_type(expected: str) -> AfterValidator:
    def raise_wrong_type(value: object) -> NoReturn:
        raise PydanticCustomError("expected_type", _EXPECTED_TEMPLATE, {"expected": expected})

    return AfterValidator(raise_wrong_type)


def unexpected_value(expected: str) -> PydanticCustomError:
    return PydanticCustomError("expected_value", _EXPECTED_TEMPLATE, {"expected": expected})


def check_pair_count(value: object) -> object:
    if isinstance(value, dict) and len(value) > METADATA_PAIRS_MAX:
        raise unexpected_value(f"at most {METADATA_PAIRS_MAX} pairs")
    return value


def _check_bias_keys(value: object) -> object:
    if isinstance(value, dict):
        if len(value) > BIASES_MAX:
            raise unexpected_value(f"at most {BIASES_MAX} tokens")
        if not all(_DECIMAL.fullmatch(key) for key in value):
            raise unexpected_value("token ids as keys")
    return value


def _parse_worker_id(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not _DECIMAL.fullmatch(value):
        raise unexpected_value("a decimal number")
    return int(value)


# The keys are token ids in decimal, as JSON requires.
LogitBias: TypeAlias = Annotated[
    dict[Annotated[str, Field(pattern=_DECIMAL_PATTERN)], Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_check_bias_keys),
]
# Logs and `/health` show ids as text; programs that can represent the number may send that.
WorkerId: TypeAlias = Annotated[
    U64, BeforeValidator(_parse_worker_id, json_schema_input_type=U64 | str)
]


class StrictModel(BaseModel):
    """A JSON object without unknown keys."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _check_key_count(cls, value: object) -> object:
        if (
            isinstance(value, dict)
            and len(value) > KEYS_MAX
            and len(value.keys() - cls.model_fields.keys()) > KEYS_MAX
        ):
            raise unexpected_value(f"at most {KEYS_MAX} keys")
        return value


# Tools that a server of the vendor runs, without data of the caller: the start of their type. Some
# agents send them with each request.
OPENAI_HOSTED_TOOLS = ("web_search", "image_generation", "tool_search")
ANTHROPIC_HOSTED_TOOLS = ("web_search_", "web_fetch_", "tool_search_tool_")
HOSTED = "\0hosted"


def tool_tag(kind: object, hosted: tuple[str, ...]) -> str:
    """Returns the tag of a tool by its type: HOSTED if that begins as one of `hosted`, else
    OBJECT."""
    return HOSTED if isinstance(kind, str) and kind.startswith(hosted) else OBJECT


class HostedTool(StrictModel):
    """A tool that a server of the vendor runs, with any settings. A response header names its type
    if it is left out."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,64}$")]


class GuidedFields(StrictModel):
    """Constraints on the text of a response, under the names of vLLM.

    guided_json: a JSON schema. guided_grammar: EBNF in the form of llama.cpp (GBNF)."""

    guided_json: dict[str, Any] | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    guided_choice: GuidedChoices | None = None
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None
    guided_whitespace_pattern: str | None = None


# A JSON schema, as an object or as JSON text.
JsonSchema: TypeAlias = Annotated[
    Annotated[str, Tag(TEXT)]
    | Annotated[dict[str, Any], Tag(OBJECT)]
    | Annotated[Any, wrong_type("a JSON schema, or its text"), Tag(WRONG_TYPE)],
    Discriminator(text_or_object),
]


class StructuredOutputs(StrictModel):
    """The constraints of the guided_ fields, under the names of newer releases of vLLM."""

    # `json` is a method of pydantic's models.
    json_schema: Annotated[JsonSchema | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: GuidedChoices | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    json_object: bool | None = None
    """true: any JSON object."""
    whitespace_pattern: str | None = None

    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Annotated[
        object, refuse("set additionalProperties in the schema", False)
    ] = None
    structural_tag: Annotated[object, refuse("use tools")] = None


class ConstraintFields(StrictModel):
    """Other names of the guided_ fields: those of newer releases of vLLM, and of SGLang."""

    structured_outputs: StructuredOutputs | None = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    ebnf: Annotated[str, Field(min_length=1)] | None = None
    json_schema: JsonSchema | None = None
