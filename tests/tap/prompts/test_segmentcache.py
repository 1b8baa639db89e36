"""Token ids by cached segment equal the token ids of the complete text, at the cost of a turn."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tap.prompts.tokenizer import SegmentCache, cutting_tokens
from tests.fakes.vocabularies import byte_letters, write_model

tokenizers = pytest.importorskip("tokenizers")

CHATML = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    "</tools><|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}"
    "<｜end▁of▁sentence｜>{% else %}{{ m.content }}{% endif %}{% endfor %}<｜Assistant｜>"
)


def added(content: str, number: int, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content, **plain, **flags}


@pytest.fixture(scope="module", params=["deepseek", "qwen"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory: a real vocabulary with a chat template that writes tools."""
    template = {"deepseek": DEEPSEEK, "qwen": CHATML}[request.param]
    return write_model(request.param, tmp_path_factory.mktemp(request.param), template)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    from engines.tokenizer import load_tokenizer
    from tap.prompts.tokenizer import TransformersTokenizer

    return TransformersTokenizer(load_tokenizer(model_folder))


@pytest.fixture(scope="module")
def complete(model_folder: Path) -> Callable[[str], list[int]]:
    """Oracle: the tokenizers library encodes the complete text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


MARKS = (
    "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|endoftext|>", "<｜User｜>", "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<|im_", "<｜", "｜>", "<", "<|EOT|>", "<｜tool▁call▁begin｜>",
)  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["the sea ", " sails", "\n", "\n\n", "  ", " \t ", "1234567", "it's", "é", "e\u0301", "船", "🙂"]),
)
TEXT = st.lists(st.one_of(st.sampled_from(MARKS), TEXTS), max_size=14).map("".join)


@settings(deadline=None, max_examples=60)
@given(text=TEXT)
def test_cached_encoding_equals_uncached_encoding(model: Any, complete: Callable[[str], list[int]], text: str) -> None:
    assert model.segments is not None
    for _ in range(2):  # the second time from what is kept
        assert list(model.encode_text(text, add_special_tokens=False)) == complete(text)
    assert list(model.encode_text(text, add_special_tokens=True)) == list(model._encode_uncached(text, special=True))
    model.segments.recent.check_integrity()


CALL = {"id": "1", "type": "function", "function": {"name": "sail", "arguments": '{"to": "the sea"}'}}
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": TEXT}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXT, "tool_calls": st.just([CALL])}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXT}),
)
TOOLS = [{"type": "function", "function": {"name": "sail", "description": "Go <|im_end|> out.", "parameters": {}}}]


@settings(deadline=None, max_examples=60)
@given(messages=st.lists(MESSAGE, min_size=1, max_size=6), tools=st.sampled_from([None, TOOLS]))
def test_chat_token_ids_equal_its_rendered_text(
    model: Any, complete: Callable[[str], list[int]], messages: list[dict[str, Any]], tools: Any
) -> None:
    body = {"messages": messages, "tools": tools}
    assert list(model.encode_chat(body)) == complete(model.render(body))


def test_chat_turns_tokenize_only_new_text(model: Any, complete: Callable[[str], list[int]]) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a patient sailor. " * 200}]
    model.segments.encoded_chars = 0
    encoded_uncached = 0
    for turn in range(20):
        messages.append({"role": "user", "content": f"Turn {turn}: and what of the ships? " * 20})
        rendered = model.render({"messages": messages, "tools": TOOLS})
        assert list(model.encode_chat({"messages": messages, "tools": TOOLS})) == complete(rendered)
        encoded_uncached += len(rendered)
        messages.append({"role": "assistant", "content": f"They sail, for the {turn}th time. " * 30})
    new_text = len(model.render({"messages": messages, "tools": TOOLS}))
    assert model.segments.encoded_chars <= new_text, "each piece once"
    assert encoded_uncached > 8 * new_text, "what it would have cost otherwise"


def small_tokenizer(**stages: Any) -> Any:
    """A byte-level vocabulary without merges, with what a test wants to see added."""
    letters = sorted(byte_letters().values())
    vocab = {letter: at for at, letter in enumerate(letters)} | {"▁": 256}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": [],
    }  # fmt: skip
    parts = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model}
    return tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], **parts, **stages}))


METASPACE = {"type": "Metaspace", "replacement": "▁", "split": True}
LOWER = {"type": "Lowercase"}
STAGES: list[tuple[dict[str, Any], bool]] = [
    ({"added_tokens": [added("<a>", 300)]}, True),
    ({"added_tokens": [added("<a>", 300), added("<a><a>", 301)]}, True),
    ({"added_tokens": [added("<a>", 300), added("<A>", 301, normalized=True)], "normalizer": LOWER}, True),
    ({"added_tokens": [added("<a>", 300, normalized=True), added("<A>", 301)]}, True),
    ({"added_tokens": [added("<a>", 300)], "pre_tokenizer": {**METASPACE, "prepend_scheme": "always"}}, True),
    ({"added_tokens": [added("<a>", 300)], "pre_tokenizer": {**METASPACE, "prepend_scheme": "never"}}, True),
    (
        {
            "added_tokens": [added("<a>", 300)],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        },
        True,
    ),
    (
        {
            "added_tokens": [added("<a>", 300)],
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
        },
        True,
    ),
    ({"added_tokens": [added("<a>", 300)], "pre_tokenizer": {**METASPACE, "prepend_scheme": "first"}}, False),
    ({"added_tokens": [added("<a>", 300, lstrip=True)]}, False),
    ({"added_tokens": [added("<a>", 300, rstrip=True)]}, False),
    ({"added_tokens": [added("a", 300, single_word=True)]}, False),
]


@settings(deadline=None, max_examples=40)
@given(text=st.lists(st.sampled_from(["<a>", "<A>", "<", "a", "b ", " ", "  ", "B", "\n"]), max_size=10).map("".join))
@pytest.mark.parametrize(("stages", "exact"), STAGES)
def test_tokenizer_with_rules_across_cuts_has_no_cuts(stages: dict[str, Any], exact: bool, text: str) -> None:
    tokenizer = small_tokenizer(**stages)
    cut = cutting_tokens(tokenizer.to_str())
    assert (cut is not None) is exact
    if cut is not None:
        cache = SegmentCache(cut, lambda piece: tokenizer.encode(piece, add_special_tokens=False).ids)
        assert cache.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_unknown_stages_and_dropout_have_no_cuts() -> None:
    fields: dict[str, Any] = {"added_tokens": [added("<a>", 1)], "normalizer": None, "pre_tokenizer": None, "model": {}}
    assert cutting_tokens(json.dumps(fields)) is not None
    for broken in ({"normalizer": {"type": "New"}}, {"pre_tokenizer": {"type": "New"}}, {"model": {"dropout": 0.1}}):
        assert cutting_tokens(json.dumps({**fields, **broken})) is None


def test_least_recently_used_segments_are_evicted() -> None:
    cut = cutting_tokens(json.dumps({"added_tokens": [added("|", 9)], "model": {}}))
    assert cut is not None
    cache = SegmentCache(cut, lambda piece: [ord(letter) for letter in piece], max_ids=2 * (50 + 4))
    for text, encoded in (("aaaa|bbbb", 8), ("aaaa", 8), ("cccc", 12), ("aaaa|cccc", 12), ("bbbb", 16)):
        assert cache.encode(text) == [9 if letter == "|" else ord(letter) for letter in text]
        assert cache.encoded_chars == encoded, text
        cache.recent.check_integrity()
