"""Hash to tokens to bytes, pinned: what one machine replays, every other does, on any Python and numpy.

``data/expansion.json`` was written once and is never written again: a change that makes these tests fail makes another
workload of every trace. The oracle beside it is the definition in plain integers, slow and without numpy.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core.bodies import encode_ids
from loadgen.core.draws import PIECE, expand_tokens
from loadgen.core.vocabulary import Vocabulary
from replay.expansion import Expansion
from tracefile.records.schema import BlockHash, RequestId

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "expansion.json").read_text())
MASK = (1 << 64) - 1


def mixed(value: int) -> int:
    """The splitmix64 finaliser."""
    value &= MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def key_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def tokens_of_key(key: int, count: int, low: int, high: int) -> list[int]:
    drawn = (mixed(key + number * 0x9E3779B97F4A7C15) >> 32 for number in range(1, count + 1))
    return [low + (bits * (high - low) >> 32) for bits in drawn]


def prompt_of(case: dict[str, Any]) -> list[int]:
    """All of a case's tokens: its blocks, then its tail."""
    low, high = case["vocabulary"]
    request_key = key_of(f"{case['nonce']}\0{case['request_id']}")
    salt = request_key if case["cold"] else key_of(case["nonce"])
    tokens = [
        token
        for block_hash in map(int, case["hashes"])
        for token in tokens_of_key(mixed(block_hash ^ salt), case["block_size"], low, high)
    ]
    return tokens + tokens_of_key(mixed(request_key ^ 0x7461696C), case["tail"], low, high)


def json_of(tokens: list[int]) -> bytes:
    """Right-aligned in five places, in six from the first id on that needs them, not aligned at all beyond."""
    if max(tokens) >= 1_000_000:
        return ("[" + ",".join(map(str, tokens)) + "]").encode()
    shorts = next((index for index, token in enumerate(tokens) if token >= 100_000), len(tokens))
    return ("[" + ",".join(f"{token:{5 if at < shorts else 6}d}" for at, token in enumerate(tokens)) + "]").encode()


def expanded(case: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The same as ``prompt_of``, by the code that replays."""
    expansion = Expansion(case["block_size"], case["nonce"], Vocabulary(*case["vocabulary"]), cold=case["cold"])
    request_id = RequestId(case["request_id"])
    blocks = expansion.blocks([BlockHash(int(block_hash)) for block_hash in case["hashes"]], request_id)
    return np.concatenate([blocks.ravel(), expansion.tail(case["tail"], request_id)])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_expansion_equals_the_golden_file(case: dict[str, Any]) -> None:
    tokens = expanded(case)
    assert tokens[: len(case["first_tokens"])].tolist() == case["first_tokens"]
    assert sha256(tokens.astype("<u4").tobytes()) == case["tokens_sha256"]
    body = encode_ids(tokens)
    assert body.startswith(case["first_bytes"].encode())
    assert sha256(body) == case["bytes_sha256"]
    assert json.loads(body) == tokens.tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["name"]))
def test_golden_file_matches_the_definition(case: dict[str, Any]) -> None:
    tokens = prompt_of(case)
    assert tokens[: len(case["first_tokens"])] == case["first_tokens"]
    assert sha256(struct.pack(f"<{len(tokens)}I", *tokens)) == case["tokens_sha256"]
    assert sha256(json_of(tokens)) == case["bytes_sha256"]


@given(
    st.lists(st.integers(0, MASK), min_size=1, max_size=6),
    st.sampled_from([0, 1, 2, 16, 511, PIECE // 2 + 1]),
    st.integers(0, 999_990),
    st.integers(1, 1 << 31),
)
def test_draws_are_independent_of_chunks(keys: list[int], count: int, low: int, span: int) -> None:
    high = min(low + span, 1 << 31)
    made = expand_tokens(np.array(keys, dtype=np.uint64), count, Vocabulary(low, high))
    assert made.shape == (len(keys), count)
    for row, key in zip(made, keys, strict=True):
        assert row[:3].tolist() == tokens_of_key(key, min(3, count), low, high)
        assert row[-1:].tolist() == tokens_of_key(key, count, low, high)[-1:]


@given(st.lists(st.sampled_from([0, 9, 10, 99_999, 100_000, 999_999, 1_000_000, (1 << 31) - 1]), min_size=1))
def test_ids_of_any_size_are_json(ids: list[int]) -> None:
    assert encode_ids(np.array(ids, dtype=np.uint32)) == json_of(ids)


@given(st.lists(st.sampled_from([0, 99_999, 100_000, 999_999]), min_size=1), st.integers(0, 999_999))
def test_prompts_that_share_ids_share_their_bytes(ids: list[int], further: int) -> None:
    """Routers know a prompt by its bytes: a long id of a later turn must not move those before it."""
    short, longer = (encode_ids(np.array(ids_list, dtype=np.uint32)) for ids_list in (ids, [*ids, further]))
    assert longer.startswith(short[:-1] + b",")
