"""The encoder: fastokens gives exactly the ids of the Hugging Face tokenizer, or is not used."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from frontend_svc.prompts.encoder import CORPUS, build_encoder
from worker_svc.engines.sim.config import SIM_MODEL_DIR

RAW = (SIM_MODEL_DIR / "tokenizer.json").read_bytes()
REFERENCE = Tokenizer.from_buffer(RAW)
ENCODE, REASON = build_encoder(RAW, REFERENCE)
SPECIAL = [token.content for token in REFERENCE.get_added_tokens_decoder().values()]
PIECES = st.one_of(
    st.text(max_size=12),
    st.text(alphabet=" \t\n\r'\u2019.,0123456789aAéß中🙂\u200d\u0301", max_size=20),
    st.sampled_from(SPECIAL),
    st.sampled_from(CORPUS),
)


def expected(text: str, special_tokens: bool) -> list[int]:
    ids: list[int] = REFERENCE.encode(text, add_special_tokens=special_tokens).ids
    return ids


def test_the_model_of_make_run_uses_fastokens() -> None:
    assert REASON == ""


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(PIECES, max_size=8), special_tokens=st.booleans())
@example(pieces=[" ".join(SPECIAL)], special_tokens=True)
def test_ids_equal_those_of_the_hugging_face_tokenizer(
    pieces: list[str], special_tokens: bool
) -> None:
    text = "".join(pieces)
    assert ENCODE(text, special_tokens) == expected(text, special_tokens)
    assert ENCODE(text, special_tokens) == expected(text, special_tokens), "from the segment cache"


def test_a_long_text_has_the_same_ids() -> None:
    text = "The quick brown fox, 12345 jumps over the lazy dog.\n\n" * 20_000
    assert ENCODE(text, False) == expected(text, False)


@pytest.mark.parametrize("normalizer", ["NFKC", "BertNormalizer"])
def test_a_tokenizer_that_fastokens_refuses_is_encoded_by_the_hugging_face_tokenizer(
    normalizer: str,
) -> None:
    changed = json.loads(RAW)
    changed["normalizer"] = {
        "NFKC": {"type": "NFKC"},
        "BertNormalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
    }[normalizer]
    raw = json.dumps(changed).encode()
    reference = Tokenizer.from_buffer(raw)
    encode, reason = build_encoder(raw, reference)
    assert normalizer in reason
    assert encode("Ŀ ﬁ Text", True) == reference.encode("Ŀ ﬁ Text", add_special_tokens=True).ids


def test_a_tokenizer_with_other_ids_is_not_replaced() -> None:
    changed = json.loads(RAW)
    vocab = changed["model"]["vocab"]
    vocab["!"], vocab["W"] = vocab["W"], vocab["!"]
    reference = Tokenizer.from_buffer(json.dumps(changed).encode())
    encode, reason = build_encoder(RAW, reference)
    assert reason.startswith("other token ids for ")
    assert encode("Why!", False) == reference.encode("Why!", add_special_tokens=False).ids
