from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

import worker_svc
from frontend_svc.text.detokenizer import (
    Detokenizer,
    StreamDetokenizer,
    UnsupportedTokenizer,
    Vocabulary,
)

SIM_MODEL = Path(worker_svc.__file__).parent / "engines/sim/model"
SIM = Tokenizer.from_file(str(SIM_MODEL / "tokenizer.json"))
SIM_VOCABULARY = Vocabulary.from_tokenizer_json((SIM_MODEL / "tokenizer.json").read_bytes())
CORPUS = (SIM_MODEL / "corpus.txt").read_text("utf-8").splitlines()

BOS = 256


def fallback_tokenizer() -> Tokenizer:
    """Ids 0-255 are bytes, 256 is special, then complete characters and words."""
    words = ["<s>", "▁", "▁a", "▁▁b", "c", "é", "▁日本", "\ufffd", "<0x+A>", "<0xZZ>", "😀"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


FALLBACK = fallback_tokenizer()
FALLBACK_VOCABULARY = Vocabulary.from_tokenizer_json(FALLBACK.to_str())


def byte_level_tokenizer() -> Tokenizer:
    """Ids 0-255 are bytes; then added tokens inside and outside the byte alphabet."""
    single = {SIM_VOCABULARY.raw[i]: token for token, i in SIM.get_vocab().items()}
    vocab = {single[bytes([byte])]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("日本"), AddedToken("é¢")])
    return tokenizer


BYTES = byte_level_tokenizer()
BYTES_VOCABULARY = Vocabulary.from_tokenizer_json(BYTES.to_str())


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def decoder_spec(*steps: dict[str, Any]) -> str:
    decoder = {"type": "Sequence", "decoders": list(steps)}
    return json.dumps({"model": {"vocab": {"a": 0}}, "decoder": decoder})


def chunked(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    return [ids[start:end] for start, end in pairwise(edges)]


def streamed(
    detokenizer: Detokenizer | StreamDetokenizer, ids: Sequence[int], cuts: Sequence[int] = ()
) -> str:
    pieces: list[str] = []
    for chunk in chunked(ids, cuts):
        fed = detokenizer.feed(chunk)
        assert len(fed) == len(chunk)
        pieces += fed
    return "".join(pieces) + detokenizer.finish()


def expected_fallback(ids: Sequence[int]) -> str:
    """The tokenizer's decoding, with complete characters before a run's first invalid byte."""
    parts: list[str] = []
    run = b""
    for token_id in [*ids, None]:
        token = None if token_id is None else FALLBACK.id_to_token(token_id)
        if token_id is not None and (token is None or token_id == BOS):
            continue
        byte = 10 if token == "<0x+A>" else token_id
        if byte is not None and byte < 256:
            run += bytes([byte])
            continue
        whole = codecs.utf_8_decode(run, "ignore", False)[0]
        while not run.startswith(whole.encode()):
            whole = whole[:-1]
        parts += [whole, "\ufffd" * (len(run) - len(whole.encode()))]
        parts.append("" if token is None else token.replace("▁", " "))
        run = b""
    return "".join(parts).removeprefix(" ")


positions = st.lists(st.integers(0, 40), max_size=6)
broken_bytes = st.binary(max_size=12) | st.text(max_size=6).map(str.encode)
sim_ids = st.lists(st.integers(0, 4200) | st.integers(0, 260), max_size=40)
byte_ids = st.lists(
    broken_bytes.map(list) | st.lists(st.integers(250, 265), max_size=3), max_size=8
).map(lambda parts: [token_id for part in parts for token_id in part])
fallback_ids = st.lists(
    broken_bytes.map(list) | st.lists(st.integers(250, 270), max_size=3), max_size=8
).map(lambda parts: [token_id for part in parts for token_id in part])


@settings(max_examples=200)
@given(ids=sim_ids, cuts=positions)
def test_joined_pieces_equal_the_decoding_of_the_sim_tokenizer(
    ids: list[int], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(SIM_VOCABULARY)

    assert streamed(detokenizer, ids, cuts) == SIM.decode(ids)


@settings(max_examples=200)
@given(ids=byte_ids, cuts=positions)
def test_invalid_utf8_is_replaced_like_in_the_byte_level_decoder(
    ids: list[int], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(BYTES_VOCABULARY)

    assert streamed(detokenizer, ids, cuts) == BYTES.decode(ids)


@settings(max_examples=200)
@given(raw=st.lists(st.sampled_from(b"\x00A\x80\x8f\x90\xbf\xc0\xc2\xe0\xed\xef\xf0\xf4\xff")))
def test_python_and_the_tokenizer_agree_on_every_maximal_invalid_part(raw: list[int]) -> None:
    assert BYTES.decode(raw) == bytes(raw).decode("utf-8", "replace")
    assert streamed(Detokenizer(BYTES_VOCABULARY), raw, range(len(raw))) == BYTES.decode(raw)


@settings(max_examples=200)
@given(ids=fallback_ids, cuts=positions)
def test_byte_fallback_equals_the_tokenizer_except_for_characters_already_sent(
    ids: list[int], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(FALLBACK_VOCABULARY)

    assert streamed(detokenizer, ids, cuts) == expected_fallback(ids)


@settings(max_examples=200)
@given(
    parts=st.lists(
        st.text(max_size=5).map(lambda text: list(text.encode()))
        | st.lists(st.integers(256, 270), max_size=3)
        | st.lists(st.sampled_from(b"\x80\xbf\xff\xc0"), max_size=4).map(lambda run: [260, *run]),
        max_size=8,
    ),
    cuts=positions,
)
def test_byte_fallback_is_exact_unless_a_run_becomes_invalid_after_a_complete_character(
    parts: list[list[int]], cuts: list[int]
) -> None:
    ids = [token_id for part in parts for token_id in [*part, 260]]
    detokenizer = Detokenizer(FALLBACK_VOCABULARY)

    assert streamed(detokenizer, ids, cuts) == FALLBACK.decode(ids)


def test_characters_before_the_first_invalid_byte_of_a_run_are_kept() -> None:
    euro_then_wrong = [0xE2, 0x82, 0xAC, 0xFF, 0x41]

    assert FALLBACK.decode(euro_then_wrong) == "\ufffd" * 5
    assert streamed(Detokenizer(FALLBACK_VOCABULARY), euro_then_wrong) == "€\ufffd\ufffd"


@pytest.mark.parametrize("line", [line for line in CORPUS if not line.isascii()])
def test_every_non_ascii_line_of_the_corpus_round_trips(line: str) -> None:
    ids = SIM.encode(line).ids

    assert streamed(Detokenizer(SIM_VOCABULARY), ids, range(len(ids))) == line


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    smile = list("😀".encode())

    assert Detokenizer(BYTES_VOCABULARY).feed([65, *smile, 66]) == ["A", "", "", "", "😀", "B"]
    assert Detokenizer(FALLBACK_VOCABULARY).feed([260, *smile, 260]) == ["c", "", "", "", "😀", "c"]


def test_a_token_that_ends_one_character_and_starts_the_next_has_the_first() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"Ã": 0, "©Ã": 1, "©": 2}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary = Vocabulary.from_tokenizer_json(tokenizer.to_str())

    assert Detokenizer(vocabulary).feed([0, 1, 2]) == ["", "é", "é"]


def test_a_skipped_special_token_does_not_end_the_character_around_it() -> None:
    end = id_of(BYTES, "<end>")

    assert Detokenizer(BYTES_VOCABULARY).feed([0xC3, end, 0xA9]) == ["", "", "é"]
    assert Detokenizer(FALLBACK_VOCABULARY).feed([0xC3, BOS, 0xA9]) == ["", "", "é"]


def test_unknown_ids_have_no_text_and_no_bytes() -> None:
    assert Detokenizer(SIM_VOCABULARY).feed([999_999, -1, 2**32 - 1]) == ["", "", ""]
    assert Detokenizer(FALLBACK_VOCABULARY).feed([0xC3, 999_999, 0xA9]) == ["", "", "é"]
    assert SIM_VOCABULARY.raw.get(999_999) is None


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    byte_level = Detokenizer(BYTES_VOCABULARY)
    fallback = Detokenizer(FALLBACK_VOCABULARY)

    assert byte_level.feed([0xE2, 0x82]) == ["", ""]
    assert byte_level.finish() == "\ufffd"  # one for the part, as in from_utf8_lossy
    assert byte_level.finish() == ""
    assert fallback.feed([0xE2, 0x82]) == ["", ""]
    assert fallback.finish() == "\ufffd\ufffd"  # one per byte


def test_the_leading_space_is_removed_once_and_only_at_the_start() -> None:
    assert Detokenizer(FALLBACK_VOCABULARY).feed([258, 258]) == ["a", " a"]
    assert Detokenizer(FALLBACK_VOCABULARY).feed([257, 258]) == ["", " a"]
    assert Detokenizer(FALLBACK_VOCABULARY).feed([BOS, 0x20, 258]) == ["", "", " a"]


def test_the_vocabulary_has_bytes_special_ids_and_a_size() -> None:
    end = id_of(SIM, "<|im_end|>")

    assert len(SIM_VOCABULARY.raw) == SIM.get_vocab_size()
    assert SIM_VOCABULARY.special_ids == {0, 1, 2}
    assert SIM_VOCABULARY.raw[end] == b"<|im_end|>"
    assert SIM_VOCABULARY.raw[id_of(SIM, "Ġthe")] == b" the"
    assert FALLBACK_VOCABULARY.raw[0xC3] == b"\xc3"


def test_added_tokens_have_the_ids_of_the_library() -> None:
    spec = json.loads(BYTES.to_str())
    spec["added_tokens"].append(spec["added_tokens"][-1] | {"id": 4000, "content": "late"})
    library = Tokenizer.from_str(json.dumps(spec))
    vocabulary = Vocabulary.from_tokenizer_json(json.dumps(spec))

    assert set(vocabulary.raw) == set(library.get_vocab().values())
    assert vocabulary.raw[id_of(library, "late")] == b"late"


def test_ids_of_a_unigram_vocabulary_are_list_indices() -> None:
    pieces = [("<unk>", 0.0), ("▁hi", -1.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    vocabulary = Vocabulary.from_tokenizer_json(tokenizer.to_str())
    ids = [1, 2 + 0xC3, 2 + 0xA9, 1]

    assert streamed(Detokenizer(vocabulary), ids) == tokenizer.decode(ids) == " hié hi"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"model": {"vocab": {}}}', "missing"),
        ('{"model": {"vocab": {}}, "decoder": null}', "missing"),
        (decoder_spec(), "empty"),
        (decoder_spec({"type": "WordPiece"}), "WordPiece"),
        (decoder_spec({"type": "Metaspace"}), "Metaspace"),
        (decoder_spec({"type": "Fuse"}, {"type": "ByteLevel"}), "Fuse ByteLevel"),
        (decoder_spec({"type": "ByteFallback"}, {"type": "Strip"}), "ByteFallback Strip"),
        (
            decoder_spec(
                {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""},
                {"type": "ByteFallback"},
            ),
            "Regex",
        ),
        (
            decoder_spec(
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 0, "stop": 1},
            ),
            "end of the text",
        ),
        (
            decoder_spec({"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip"}),
            "without a character",
        ),
        ('{"decoder": {"type": "ByteLevel"}}', "model.vocab"),
        ("[" * 99_999, "not JSON"),
        (
            '{"model": {"vocab": {"\\ud800": 1}}, "decoder": {"type": "ByteLevel"}}',
            "surrogates not allowed",
        ),
        ('{"model": {"vocab": [1]}, "decoder": {"type": "ByteLevel"}}', "vocab or added_tokens"),
    ],
)
def test_an_unsupported_decoder_is_refused_with_the_reason(raw: str, reason: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=reason):
        Vocabulary.from_tokenizer_json(raw)


def wordpiece_tokenizer() -> Tokenizer:
    vocab = {"[UNK]": 0, "hello": 1, "##ing": 2, "world": 3, ",": 4, "[SEP]": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 6), max_size=20), cuts=positions)
def test_any_other_tokenizer_decodes_through_the_library(ids: list[int], cuts: list[int]) -> None:
    tokenizer = wordpiece_tokenizer()
    # A continuation at the start keeps its prefix; no tokenizer generates one there.
    ids = [1, *ids]

    assert streamed(StreamDetokenizer(tokenizer), ids, cuts) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [SIM, FALLBACK], ids=["byte-level", "byte-fallback"])
def test_decoding_through_the_library_keeps_real_text(tokenizer: Tokenizer) -> None:
    text = "a c 日本é 😀\n\nc" if tokenizer is FALLBACK else CORPUS[-1]
    ids = (
        [258, 257, 260, 262, 261, 257, 266, 10, 10, 260]
        if tokenizer is FALLBACK
        else SIM.encode(text).ids
    )

    assert streamed(StreamDetokenizer(tokenizer), ids, range(len(ids))) == tokenizer.decode(ids)


def test_decoding_through_the_library_returns_the_tail_and_withholds_few_tokens() -> None:
    cut_off = StreamDetokenizer(BYTES)
    assert cut_off.feed([65, 0xE2, 0x82]) == ["A", "", ""]
    assert cut_off.finish() == "\ufffd"
    assert cut_off.finish() == ""

    broken = StreamDetokenizer(BYTES)
    assert "".join(broken.feed([0xFF] * 8)) == "\ufffd" * 8
