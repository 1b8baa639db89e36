"""Keys of a prompt's start: shared as far as the prompts are, whatever stands before them."""

import json
from itertools import pairwise

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tap.proxy.routing import BLOCK_BYTES, prefix_block_keys

MOST = 4096


def body(text: str, **before: object) -> bytes:
    return json.dumps({**before, "messages": [{"role": "user", "content": text}], "max_tokens": 8}).encode()


def shared(first: list[int], second: list[int]) -> int:
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count


@given(st.binary(max_size=2500), st.integers(0, 2500), st.lists(st.integers(0, 2500), max_size=4))
def test_prefix_keys_do_not_depend_on_reads(data: bytes, most: int, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reads = [data[start:end] for start, end in pairwise(edges)]
    seen = data[:most]
    key, expected = 0, []
    for at in range(len(seen) // BLOCK_BYTES):
        key = xxhash.xxh3_64_intdigest(seen[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES], key)
        expected.append(key)
    if b'"' not in data:
        assert prefix_block_keys(reads, most) == expected


def test_prompts_share_prefix_keys_as_far_as_bytes() -> None:
    common = "x" * 2000
    first, second = (
        prefix_block_keys([body(common + "a" * 1500)], MOST),
        prefix_block_keys([body(common + "b" * 1500)], MOST),
    )
    assert shared(first, second) == (2000 + len('"messages": [{"role": "user", "content": "')) // BLOCK_BYTES == 3
    assert not set(first[3:]) & set(second[3:]), "each key depends on all before it"


def test_prefix_keys_depend_on_the_model_only() -> None:
    text = "y" * 3000
    item = prefix_block_keys([body(text, model="m", temperature=0.1, user="ann")], MOST)
    assert item[:5] == prefix_block_keys([body(text, model="m", max_completion_tokens=99)], MOST)[:5]
    assert not set(item) & set(prefix_block_keys([body(text, model="adapter")], MOST))
