"""The responses of sim workers, computed from the files of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tokenizers import Tokenizer

from frontend_svc.prompts.prompt import ChatTemplate
from worker_svc.engines.sim.config import SIM_MODEL_DIR, load_sim_model
from worker_svc.engines.sim.token_oracle import TokenOracle


@dataclass(frozen=True, slots=True)
class ExpectedResponse:
    """The exact response of the sim model; the counts are those of `usage`."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class Oracle:
    """Computes the responses of sim workers from the files of the model."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(SIM_MODEL_DIR / "tokenizer.json"))
        config = json.loads((SIM_MODEL_DIR / "tokenizer_config.json").read_text())
        self._template = ChatTemplate(
            config["chat_template"], bos_token=None, eos_token=config["eos_token"]
        )
        model = load_sim_model(SIM_MODEL_DIR)
        self._token_oracle = TokenOracle(model.word_ids, model.eos_ids[0])

    def chat(self, content: str, max_tokens: int, *, stop: str = "") -> ExpectedResponse:
        """Returns the response to one user message."""
        messages = [{"role": "user", "content": content}]
        return self.conversation(messages, max_tokens, stop=stop)

    def conversation(
        self, messages: Sequence[Mapping[str, str]], max_tokens: int, *, stop: str = ""
    ) -> ExpectedResponse:
        """Returns the response to a conversation."""
        text = self._template.render(list(messages), now=datetime.now(UTC))
        return self._expected_response(self.encode(text, special_tokens=False), max_tokens, stop)

    def completion(
        self, prompt: str | Sequence[int], max_tokens: int, *, ignore_eos: bool = False
    ) -> ExpectedResponse:
        """Returns the continuation of a text or of token ids."""
        if isinstance(prompt, str):
            prompt = self.encode(prompt, special_tokens=True)
        return self._expected_response(prompt, max_tokens, ignore_eos=ignore_eos)

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Returns the ids that continue `prompt` if EOS is ignored."""
        return self._token_oracle.continue_tokens(prompt, max_tokens, ignore_eos=True)

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Returns the token ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids."""
        text: str = self._tokenizer.decode(tokens)
        return text

    def _expected_response(
        self, prompt: Sequence[int], max_tokens: int, stop: str = "", *, ignore_eos: bool = False
    ) -> ExpectedResponse:
        tokens = self._token_oracle.continue_tokens(prompt, max_tokens, ignore_eos=ignore_eos)
        finish_reason = "length" if len(tokens) == max_tokens else "stop"
        text = self._tokenizer.decode(tokens)
        if stop and stop in text:
            # The token that completes the stop string is the last one that counts.
            count = next(
                n for n in range(1, len(tokens) + 1) if stop in self._tokenizer.decode(tokens[:n])
            )
            return ExpectedResponse(text[: text.index(stop)], "stop", len(prompt), count)
        return ExpectedResponse(text, finish_reason, len(prompt), len(tokens))
