"""The simulated model's answers: the formula, by golden vector and by a second implementation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_svc.engines.sim.token_oracle import TokenOracle

WORDS = range(100, 900)
EOS = 2
U64 = 0xFFFFFFFFFFFFFFFF

token_ids = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def truth() -> TokenOracle:
    return TokenOracle(WORDS, EOS)


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & U64
    return x ^ x >> 31


def state_by_the_docstring(tokens: list[int]) -> int:
    """The sum of the formula, term by term."""
    base, n = 0x9E6C63D0876A9A63, len(tokens)
    terms = [(token + 1) * base ** (n - 1 - i) for i, token in enumerate(tokens)]
    state: int = (0x243F6A8885A308D3 * base**n + sum(terms)) & U64
    return state


def test_the_golden_vector_never_changes(truth: TokenOracle) -> None:
    answer = truth.continue_tokens([1, 2, 3], 1000)

    assert truth.state_of([]) == 0x243F6A8885A308D3
    assert truth.state_of([1, 2, 3]) == 0x673E13BC429CC060
    assert answer[:12] == [237, 690, 389, 592, 404, 243, 164, 822, 270, 571, 708, 617]
    assert len(answer) == 92
    assert truth.continue_tokens([1, 2, 3], 95, ignore_eos=True)[:92] == answer


@given(st.lists(token_ids, max_size=40))
@settings(max_examples=50)
def test_the_documented_formula_gives_the_same_tokens(tokens: list[int]) -> None:
    state = state_by_the_docstring(tokens)
    x = mix(state)
    word = WORDS[(x % 2**32 * len(WORDS)) >> 32]

    assert TokenOracle(WORDS, EOS).state_of(tokens) == state
    assert TokenOracle(WORDS, EOS).next_token(state) == (EOS if (x >> 32) % 96 == 0 else word)
    assert TokenOracle(WORDS, EOS).next_token(state, can_end=False) == word


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 9000])
def test_the_vectorised_state_equals_the_incremental_state(truth: TokenOracle, length: int) -> None:
    tokens = [(7919 * i) % 2**32 for i in range(length)]
    state = truth.state_of([])
    for token in tokens:
        state = truth.advance(state, token)

    assert truth.state_of(tokens) == state


@given(st.lists(token_ids, min_size=1, max_size=30), st.data())
@settings(max_examples=50)
def test_output_continued_on_another_worker_equals_uninterrupted_output(
    prompt: list[int], data: st.DataObject
) -> None:
    truth = TokenOracle(WORDS, EOS)
    whole = truth.continue_tokens(prompt, 64)
    cut = data.draw(st.integers(0, len(whole)))

    assert whole[:cut] + truth.continue_tokens(prompt + whole[:cut], 64 - cut) == whole


@given(st.lists(token_ids, min_size=1, max_size=30), st.data())
@settings(max_examples=50)
def test_every_earlier_token_affects_the_next(prompt: list[int], data: st.DataObject) -> None:
    truth = TokenOracle(WORDS, EOS)
    place = data.draw(st.integers(0, len(prompt) - 1))
    changed = [*prompt]
    changed[place] = data.draw(token_ids.filter(lambda token: token != prompt[place]))

    assert truth.state_of(changed) != truth.state_of(prompt)
    assert truth.state_of([0, *prompt]) != truth.state_of(prompt)


def test_output_ends_by_itself_about_once_in_96_tokens(truth: TokenOracle) -> None:
    lengths = [len(truth.continue_tokens([seed], 10_000)) for seed in range(200)]

    assert 80 < sum(lengths) / len(lengths) < 112


def test_below_min_tokens_a_word_replaces_eos() -> None:
    truth = TokenOracle(WORDS, EOS, eos_one_in=8)
    prompt = next([seed] for seed in range(100) if len(truth.continue_tokens([seed], 5)) < 5)
    ignored = truth.continue_tokens(prompt, 20, ignore_eos=True)
    held = truth.continue_tokens(prompt, 20, min_tokens=5)

    assert len(ignored) == 20
    assert 5 <= len(held) <= 20
    assert held == ignored[: len(held)]


def test_with_one_in_zero_output_never_ends_by_itself() -> None:
    assert len(TokenOracle(WORDS, EOS, eos_one_in=0).continue_tokens([1], 2000)) == 2000


@pytest.mark.parametrize(
    ("words", "eos", "one_in", "name"),
    [
        ([], 2, 96, "word_ids"),
        ([2**32], 2, 96, "word_ids"),
        ([5], -1, 96, "eos_id"),
        ([5, 2], 2, 96, "eos_id"),
        ([5], 2, -1, "eos_one_in"),
    ],
)
def test_an_invalid_vocabulary_is_rejected_by_name(
    words: list[int], eos: int, one_in: int, name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        TokenOracle(words, eos, eos_one_in=one_in)
