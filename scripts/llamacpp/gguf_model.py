"""Write a small GGUF model with random weights: a llama with the vocabulary of a Hugging Face tokenizer.

    python gguf_model.py TOKENIZER_DIR CHAT_TEMPLATE_FILE OUT.gguf

Runs in llama.cpp's environment, with its packages gguf and numpy. Equal arguments give equal bytes. The model
generates complete characters only, like trained models in most cases: llama.cpp omits ids of tokens within a character.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN = 128
LAYERS = 2
HEAD = 64  # dimensions of an attention head
VOCABULARY = 129_280  # DeepSeek's, including unused ids
CONTEXT_TOKENS = 65_536
# Byte-level BPE represents each byte of a token by a character: printable bytes unchanged, the rest from U+0100.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(UNPRINTABLE)}


def vocabulary(tokenizer: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Return tokens and their types, by token id."""
    tokens = [f"[PAD{number}]" for number in range(VOCABULARY)]
    types = [gguf.TokenType.UNUSED] * VOCABULARY
    for word, number in tokenizer["model"]["vocab"].items():
        tokens[number], types[number] = word, gguf.TokenType.NORMAL
    for entry in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if entry["special"] else gguf.TokenType.USER_DEFINED
        tokens[entry["id"]], types[entry["id"]] = entry["content"], kind
    return tokens, types


def add_settings(writer: gguf.GGUFWriter, chat_template: str) -> None:
    """Write the shape of the model, and its chat template."""
    writer.add_name("tiny-random")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(3 * HIDDEN)
    writer.add_head_count(HIDDEN // HEAD)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_chat_template(chat_template)


def add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str], types: list[int], merges: list[str | list[str]]) -> None:
    """Write the tokenizer of the model."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("deepseek-v3")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def is_text(token: str, kind: int) -> bool:
    """Return whether a token is text of complete characters."""
    if kind != gguf.TokenType.NORMAL:
        return False
    try:
        bytes(BYTES[letter] for letter in token).decode()
    except UnicodeDecodeError:
        return False
    return True


def add_weights(writer: gguf.GGUFWriter, generated: list[bool]) -> None:
    """Write random matrices, and norms of 1; ``generated``: tokens that can be sampled."""
    random = np.random.default_rng(1)
    matrices = {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}
    norms = ["output_norm"]
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        norms += [block + "attn_norm", block + "ffn_norm"]
        matrices |= {block + name: (HIDDEN, HIDDEN) for name in ("attn_q", "attn_output")}
        matrices |= {block + name: (HEAD, HIDDEN) for name in ("attn_k", "attn_v")}
        matrices |= {block + name: (3 * HIDDEN, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        matrices[block + "ffn_down"] = (HIDDEN, 3 * HIDDEN)
    for name, shape in matrices.items():
        weights = (random.standard_normal(shape) * 0.05).astype(np.float16)
        if name == "output":
            weights[~np.array(generated)] = 0  # a logit of 0 is far below the largest of 100,000
        writer.add_tensor(f"{name}.weight", weights)
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))


def main(tokenizer_directory: str, chat_template: str, out: str) -> None:
    tokenizer = json.loads((Path(tokenizer_directory) / "tokenizer.json").read_text())
    partial = Path(out + ".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    tokens, types = vocabulary(tokenizer)
    add_settings(writer, Path(chat_template).read_text())
    add_tokenizer(writer, tokens, types, tokenizer["model"]["merges"])
    add_weights(writer, [is_text(token, kind) for token, kind in zip(tokens, types, strict=True)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
