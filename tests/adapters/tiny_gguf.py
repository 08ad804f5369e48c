"""A small model for llama-server: a Llama of two layers with random weights, in one GGUF file."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

CONTEXT_LENGTH = 8192
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 64, 128, 2, 4, 2
# Of the output matrix: the likeliest token is clear, so that greedy responses are stable.
_SHARPNESS = 3.0
# llama-server finds out from it that calls of tools are JSON between marks.
_TEMPLATE = """\
{%- if tools %}system: Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{% endif %}
{%- for one in messages %}{{ one.role }}: {% if one.content %}{{ one.content }}{% endif %}
{%- for call in one.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor %}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

Matrix = npt.NDArray[np.float32]


def _words() -> list[str]:
    """Returns the words; the first one is a space."""
    syllables = product("bdfgklmnprstvz", ("a", "e", "i", "o", "u", "ai"))
    return ["\u2581", *(f"\u2581{a}{b}" for a, b in syllables)]


def _vocabulary() -> list[str]:
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    return ["<unk>", "<s>", "</s>", *in_bytes, *_words()]


def write_tokenizer(folder: Path) -> None:
    """Writes the tokenizer of the model as Hugging Face's: without merges, as the words have no
    parts that are tokens."""
    from tokenizers import Tokenizer, models, normalizers, processors

    ids = {token: at for at, token in enumerate(_vocabulary())}
    model = models.BPE(ids, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def write_tiny_gguf(path: Path, seed: int = 0) -> None:
    """Writes the model. Its words are syllables; equal seeds give equal weights."""
    # Not a requirement of KVMesh: installed with SGLang.
    from gguf import GGUFWriter, TokenType  # type: ignore[import-not-found]

    vocabulary, words = _vocabulary(), _words()
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(words)
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(vocabulary)
    writer.add_token_scores([-float(at) for at in range(len(vocabulary))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    # Grammars begin with the end of the prompt, which must be text without a space before it.
    writer.add_add_space_prefix(False)
    writer.add_chat_template(_TEMPLATE)
    for name, matrix in _weights(len(vocabulary), len(words), seed).items():
        writer.add_tensor(name, matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(vocabulary: int, words: int, seed: int) -> dict[str, Matrix]:
    rng = np.random.default_rng(seed)
    std = 1.6 / np.sqrt(_HIDDEN)
    head = _HIDDEN // _HEADS

    def matrix(*shape: int) -> Matrix:
        return rng.normal(0.0, std, shape).astype(np.float32)

    norm = np.ones(_HIDDEN, np.float32)
    output = _SHARPNESS * matrix(vocabulary, _HIDDEN)
    # Only words are likely: bytes need not be text.
    output[:-words] = 0.0
    found = {"token_embd.weight": matrix(vocabulary, _HIDDEN)}
    for layer in range(_LAYERS):
        parts = {
            "attn_norm": norm,
            "attn_q": matrix(_HIDDEN, _HIDDEN),
            "attn_k": matrix(_KV_HEADS * head, _HIDDEN),
            "attn_v": matrix(_KV_HEADS * head, _HIDDEN),
            "attn_output": matrix(_HIDDEN, _HIDDEN),
            "ffn_norm": norm,
            "ffn_gate": matrix(_INNER, _HIDDEN),
            "ffn_up": matrix(_INNER, _HIDDEN),
            "ffn_down": matrix(_HIDDEN, _INNER),
        }
        found |= {f"blk.{layer}.{name}.weight": part for name, part in parts.items()}
    return found | {"output_norm.weight": norm, "output.weight": output}
