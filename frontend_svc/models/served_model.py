"""A model as the frontend serves it: tokenizer, chat template and hashes, built from its card."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog
from tokenizers import Tokenizer

from common.errors import InvalidRequest
from common.kv.hashing import DEFAULT_BLOCK_SIZE, PrefixHasher
from common.registry.card import ModelCard
from common.request.preprocessed import RoutingHints, TokenIds
from frontend_svc.models.tokenizer_files import TriedTokenizer, load_tokenizer
from frontend_svc.prompts.control_tokens import ControlTokens
from frontend_svc.prompts.encoder import Encode, PieceEncoder
from frontend_svc.prompts.prompt import Prompt, TemplateError
from frontend_svc.prompts.template_process import TemplateProcess
from frontend_svc.text.detokenizer import Detokenizer, StreamDetokenizer, Vocabulary
from frontend_svc.tools.formats import FORMATS, CallFormat
from frontend_svc.tools.harmony import HARMONY, HARMONY_MARKERS
from frontend_svc.tools.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
)

# Texts above this length are encoded in a thread: they could block the event loop for > 5 ms.
ENCODE_INLINE_CHARS = 16_384
# So would more pairs of texts: each costs some time, however short it is.
PAIRS_INLINE_MAX = 32
# Of tokenizers in use: U+FDFA has 18 characters in the forms of compatibility, of up to four bytes.
EXPANSION_USUAL = 72
# Texts may grow more in other tokenizers, up to this length: 10 s in a thread, 1 GB.
EXPANDED_CHARS_MAX = 1 << 25
# One thread, because fastokens keeps a cache of words in each (about 80 MB): long texts take turns.
_FAST_ENCODING = ThreadPoolExecutor(1, thread_name_prefix="encode")
# The chat template may open or close the reasoning of a response in them.
PROMPT_END_TOKENS = 16

F = TypeVar("F")
R = TypeVar("R")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything that requests for one model or adapter need."""

    card: ModelCard

    checksum: str
    """Of the card."""

    created: int
    """Unix time, in seconds."""

    tokenizer: Tokenizer

    encode_text: Encode
    """See `encoder.py`."""

    encodes_fast: bool
    """Whether `encode_text` is fastokens."""

    expansion_max: float
    """How many times more characters a text may have inside of the tokenizer."""

    control_tokens: ControlTokens
    """Control tokens that are ordinary text in messages."""

    piece_encoder: PieceEncoder
    """See `encoder.py`."""

    vocabulary: Vocabulary | None
    """None for tokenizers that need the slow detokenizer."""

    vocab_size: int
    """Token ids are below it."""

    max_bytes_per_token: int | None
    """See `prompts/token_bound.py`."""

    template: TemplateProcess | None
    """None if the card has none."""

    hasher: PrefixHasher

    call_format: CallFormat | None
    """Form of tool calls; None if the card names none."""

    reasoning_format: ReasoningFormat | None
    """Form of the reasoning; None if the card names none."""

    parser_vocabulary: Vocabulary | None
    """As `vocabulary`, with a text for the markers of both formats."""

    is_harmony: bool
    """Whether the model writes harmony messages."""

    adapter: str = ""
    """Empty for the model itself; an adapter differs from its model only in name and hasher."""

    @property
    def name(self) -> str:
        return self.adapter or self.card.name

    @property
    def base(self) -> str:
        return self.card.name

    def adapter_model(self, adapter: str, *, created: int, mesh_key: bytes) -> ServedModel:
        """Returns the model under an adapter, with hashes of its own."""
        hasher = _hasher(self.card, mesh_key, adapter)
        return replace(self, adapter=adapter, created=created, hasher=hasher)

    def hasher_for(self, routing: RoutingHints | None) -> PrefixHasher:
        """Returns the hasher of a request's prompt."""
        salt = None if routing is None else routing.cache_salt
        return self.hasher.salted(salt) if salt else self.hasher

    def token_count_min(self, *texts: str) -> int:
        """Returns a lower bound of the token count of all texts, without tokenizing them."""
        bytes_max = self.max_bytes_per_token
        return (
            0 if bytes_max is None else -(-sum(len(text.encode()) for text in texts) // bytes_max)
        )

    @property
    def is_reasoning(self) -> bool:
        """Whether responses may begin with reasoning."""
        return self.is_harmony or self.reasoning_format is not None

    async def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Returns the token ids of a text; long texts are encoded in a thread."""
        if self._encodes_inline(len(text)):
            return self.encode_text(text, special_tokens)
        return await self._in_thread(lambda: self.encode_text(text, special_tokens))

    async def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of several texts, with special tokens; together long ones are
        encoded in a thread."""

        def encode_all() -> list[list[int]]:
            return [self.encode_text(text, True) for text in texts]

        if self._encodes_inline(sum(map(len, texts))):
            return encode_all()
        return await self._in_thread(encode_all)

    async def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], second_max: int | None = None
    ) -> list[list[int]]:
        """Returns the token ids of pairs of texts, joined as the tokenizer joins them; together
        long ones, and many, are encoded in a thread. second_max: the second texts are cut behind
        so many tokens; None: not."""
        chars = sum(len(first) + len(second) for first, second in pairs)
        if self._encodes_inline(chars) and len(pairs) <= PAIRS_INLINE_MAX:
            return self._encode_pairs(pairs, second_max)
        return await asyncio.to_thread(self._encode_pairs, pairs, second_max)

    def _encode_pairs(
        self, pairs: Sequence[tuple[str, str]], second_max: int | None
    ) -> list[list[int]]:
        """Encodes pairs one by one, which bounds the memory, and without the GIL, which `encode` of
        the tokenizer holds."""
        encode = self.tokenizer.encode_batch_fast
        cut = ((first, self._first_tokens(second, second_max)) for first, second in pairs)
        return [encode([pair])[0].ids for pair in cut]

    def _first_tokens(self, text: str, count: int | None) -> str:
        """Returns the text of the first `count` tokens of a text; None: all of it."""
        if count is None:
            return text
        # Unlike `encode_batch_fast`, it returns offsets.
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        return text[: encoding.offsets[count - 1][1]] if len(encoding.ids) > count else text

    async def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of a rendered prompt; the chat template writes the special tokens
        itself."""
        if prompt.pieces is None:
            return await self.encode(prompt.text, special_tokens=False)
        self._check_expansion(len(prompt.text))
        return await asyncio.to_thread(self.piece_encoder.encode, prompt.pieces)

    def _encodes_inline(self, chars: int) -> bool:
        """Returns whether texts are encoded in the event loop. Raises InvalidRequest if the
        tokenizer may expand them beyond its limit."""
        self._check_expansion(chars)
        return chars * max(self.expansion_max / EXPANSION_USUAL, 1.0) <= ENCODE_INLINE_CHARS

    def _check_expansion(self, chars: int) -> None:
        expanded = int(chars * self.expansion_max)
        if self.expansion_max > EXPANSION_USUAL and expanded > EXPANDED_CHARS_MAX:
            text = f"it may have {expanded} characters inside of the tokenizer of this model"
            raise InvalidRequest(f"the text is too long: {text}, at most {EXPANDED_CHARS_MAX}")

    async def _in_thread(self, encode: Callable[[], R]) -> R:
        executor = _FAST_ENCODING if self.encodes_fast else None
        return await asyncio.get_running_loop().run_in_executor(executor, encode)

    def detokenizer(
        self, *, for_parser: bool = False, skips_special: bool = True
    ) -> Detokenizer | StreamDetokenizer:
        """Returns the detokenizer of a response; it raises InternalError for an unknown id.
        for_parser: whether markers of calls and reasoning have a text. skips_special: False if all
        special tokens have one."""
        vocabulary = self.parser_vocabulary if for_parser else self.vocabulary
        if skips_special and vocabulary is not None:
            return Detokenizer(vocabulary, is_strict=True)
        return StreamDetokenizer(
            self.tokenizer,
            skip_special_tokens=skips_special and not for_parser,
            ids_below=self.vocab_size,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token, also of a special one; none for an unknown id."""
        if self.vocabulary is None:
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self.vocabulary.raw.get(token_id, b"")

    def reasoning_parser(self, prompt: TokenIds, *, is_guided: bool) -> ReasoningParser | None:
        """Returns the parser of a response to a prompt; None if the card names none. is_guided: a
        constraint on the text excludes reasoning that the prompt implies."""
        if self.reasoning_format is None:
            return None
        end = self.tokenizer.decode(
            prompt.array[-PROMPT_END_TOKENS:].tolist(), skip_special_tokens=False
        )
        starts_inside = not is_guided and self.reasoning_format.starts_inside(end)
        return ReasoningParser(self.reasoning_format, starts_inside=starts_inside)


def build_model(
    card: ModelCard, *, created: int, mesh_key: bytes, tried: TriedTokenizer
) -> ServedModel:
    """Returns the model of a card whose tokenizer has passed its trial. Raises InvalidRequest with
    the unusable artifact as field."""
    config = _json_artifact(card, "tokenizer_config.json")
    raw = _artifact(card, "tokenizer.json")
    allows_control = card.control_tokens_in_text
    control_tokens = ControlTokens(() if allows_control else tried.control_tokens)
    # Before the tokenizer, whose memory is not free again if the template is unusable.
    template = _template(card, config, control_tokens)
    parts = load_tokenizer(raw)
    tokenizer, vocabulary = parts.tokenizer, parts.vocabulary
    if parts.slow_detokenizer_reason:
        log.info("slow_detokenizer", model=card.name, reason=parts.slow_detokenizer_reason)
    if parts.slow_encoder_reason:
        log.info("slow_encoder", model=card.name, reason=parts.slow_encoder_reason)
    call_format = _format_of("tool_call_parser", card.tool_call_parser, FORMATS)
    is_harmony = HARMONY in (card.tool_call_parser, card.reasoning_parser)
    reasoning_name = None if card.reasoning_parser == HARMONY else card.reasoning_parser
    reasoning = _format_of("reasoning_parser", reasoning_name, REASONING_FORMATS)
    markers = () if call_format is None else call_format.markers
    markers += HARMONY_MARKERS if is_harmony else ()
    if reasoning is not None:
        markers += (reasoning.begin, reasoning.end)
    return ServedModel(
        card=card,
        checksum=card.checksum,
        created=created,
        tokenizer=tokenizer,
        encode_text=parts.encode_text,
        encodes_fast=not parts.slow_encoder_reason,
        expansion_max=tried.expansion_max,
        control_tokens=control_tokens,
        piece_encoder=PieceEncoder(raw, control_tokens),
        vocabulary=vocabulary,
        vocab_size=parts.vocab_size,
        max_bytes_per_token=parts.max_bytes_per_token,
        template=template,
        hasher=_hasher(card, mesh_key),
        call_format=call_format,
        reasoning_format=reasoning,
        is_harmony=is_harmony,
        parser_vocabulary=None if vocabulary is None else vocabulary.showing(markers),
    )


def _format_of(field: str, name: str | None, formats: Mapping[str, F]) -> F | None:
    if name is None:
        return None
    if name not in formats:
        text = f"{field}: {name!r} is not one of {', '.join(formats)}"
        raise InvalidRequest(text, field)
    return formats[name]


def _hasher(card: ModelCard, mesh_key: bytes, adapter: str = "") -> PrefixHasher:
    return PrefixHasher(
        mesh_key=mesh_key,
        model=card.name,
        block_size=card.kv_block_size or DEFAULT_BLOCK_SIZE,
        lora_name=adapter,
    )


def _artifact(card: ModelCard, name: str) -> bytes:
    artifact = card.artifacts.get(name)
    if artifact is None or artifact.inline is None:
        raise InvalidRequest(f"the card of {card.name!r} has no {name}", f"artifacts.{name}")
    return artifact.inline


def _json_artifact(card: ModelCard, name: str) -> Mapping[str, Any]:
    try:
        value = json.loads(_artifact(card, name))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", f"artifacts.{name}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is not a JSON object", f"artifacts.{name}")
    return value


def _template(
    card: ModelCard, config: Mapping[str, Any], control: ControlTokens
) -> TemplateProcess | None:
    source = config.get("chat_template")
    if "chat_template.jinja" in card.artifacts:
        try:
            source = _artifact(card, "chat_template.jinja").decode()
        except UnicodeDecodeError as error:
            text = f"chat_template.jinja is not UTF-8: {error}"
            raise InvalidRequest(text, "artifacts.chat_template.jinja") from error
    if not source:
        return None
    if not isinstance(source, str):
        text = f"chat_template must be one template as text, not a {type(source).__name__}"
        raise InvalidRequest(text, "artifacts.tokenizer_config.json")
    try:
        bos_token, eos_token = _text(config, "bos_token"), _text(config, "eos_token")
        return TemplateProcess(source, bos_token=bos_token, eos_token=eos_token, control=control)
    except TemplateError as error:
        text = f"chat_template: {error}"
        raise InvalidRequest(text, "artifacts.tokenizer_config.json") from error


def _text(config: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if value is None or isinstance(text, str):
        return text
    raise InvalidRequest(
        f"tokenizer_config.json: {name} must be text, or an object with text as its content, "
        f"not {str(value)[:80]!r}",
        "artifacts.tokenizer_config.json",
    )
