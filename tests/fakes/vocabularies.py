"""Two real vocabularies as a model's files, with templates like those of their models: DeepSeek's and Qwen's."""

import base64
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] -%}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
    "{%- endfor -%}{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{%- endif -%}"
)
"""Like Qwen's: the opening of an answer is not what stands before an old one."""
DEEPSEEK = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ message.content }}"
    "{%- elif message.role == 'user' -%}{{ '<｜User｜>' + message.content }}"
    "{%- elif message.role == 'tool' -%}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}"
    "{%- else -%}{{ '<｜Assistant｜>' + message.content + '<｜end▁of▁sentence｜>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}"
)
"""Like DeepSeek's; it has no room for calls."""

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


QWEN_TOKENS = 65_536
"""Of 151,643: the commonest, and all that they are merged from. The others would cost each user two seconds of CPU."""


def package_folder(name: str) -> Path:
    """Folder of a tokenizer's package, not imported: DeepSeek's would load its vocabulary. Skips without it."""
    spec = find_spec(f"{name}_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip(f"{name}-tokenizer is not installed")
    return Path(spec.origin).parent


def write_model(name: str, folder: Path, chat_template: str | None = None) -> Path:
    """A directory that transformers loads; ``name``: deepseek or qwen."""
    source = package_folder(name)
    folder.mkdir(exist_ok=True)
    if name == "deepseek":
        (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
        config = json.loads((source / "tokenizer_config.json").read_text())
        config["chat_template"] = chat_template or DEEPSEEK
    else:
        (folder / "tokenizer.json").write_text(qwen_json(source))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        config["chat_template"] = chat_template or CHATML
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def qwen_json(source: Path) -> str:
    """Qwen's file of ranks as a ``tokenizer.json``: two tokens merge by the rank of what they make."""
    lines = (source / "resources" / "qwen.tiktoken").read_bytes().splitlines()[:QWEN_TOKENS]
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    letters = byte_letters()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(ranks[left], left, right) for left, right in halves if left in ranks and right in ranks]
        merges += [[written(left), written(right)] for _, left, right in sorted(known)]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    return json.dumps({
        "version": "1.0",
        "added_tokens": [
            {"id": len(ranks) + at, "content": name, **plain, "special": at < 3} for at, name in enumerate(specials)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
            "vocab": {written(token): rank for token, rank in ranks.items()}, "merges": merges,
        },
    })  # fmt: skip


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte, in which byte-level vocabularies are written."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(rest)}
