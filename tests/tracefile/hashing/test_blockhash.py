"""Block hashes: the definition written out again, known answers, and what thinning a chain must keep."""

import hashlib
import itertools
import os
import re
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tracefile.hashing.blockhash import BlockHasher, keyed_id
from tracefile.hashing.downsampling import downsample
from tracefile.hashing.hashkey import HashKey, load_key
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Record, RequestId

KEY = HashKey(bytes(range(32)))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
algorithms = st.sampled_from(["xxh3_64", "blake2b"])

KNOWN = {
    "xxh3_64": [0x9E76C58C959D78D5, 0x4B94AE895D7F98E7],
    "blake2b": [0x6DFC19930939F642, 0x9B9642361B0FB2A6],
}
"""Tokens 0 … 39 under KEY, model "m", blocks of 16: fixed for good, or two captures are no longer comparable."""


@pytest.mark.parametrize("algorithm", ["xxh3_64", "blake2b"])
def test_known_answers(algorithm: Literal["xxh3_64", "blake2b"]) -> None:
    assert BlockHasher(KEY, algorithm, 16, model="m").hash_blocks(range(40)) == KNOWN[algorithm]
    assert KEY.key_id == "3cf7051b19e69b5f"
    assert keyed_id(KEY, "session", "a") == "e57b9796e9ea57a6e5a851d7"


@given(tokens, st.integers(1, 9), algorithms)
def test_chain_equals_its_definition(ids: list[int], block_size: int, algorithm: Literal["xxh3_64", "blake2b"]) -> None:
    def h(data: bytes) -> bytes:
        if algorithm == "blake2b":
            return hashlib.blake2b(data, digest_size=8, key=KEY.secret, person=b"block hash").digest()
        seed = hashlib.blake2b(key=KEY.secret, digest_size=8, person=b"xxh3 seed").digest()
        return xxhash.xxh3_64(data, seed=int.from_bytes(seed, "little")).digest()

    previous = h(struct.pack("<I", 32) + KEY.secret + struct.pack("<I", 1) + b"m" + b"\xff" * 8)
    expected = []
    for at in range(0, len(ids) - block_size + 1, block_size):
        previous = h(previous + struct.pack(f"<{block_size}I", *ids[at : at + block_size]))
        expected.append(int.from_bytes(previous, "big"))
    hasher = BlockHasher(KEY, algorithm, block_size, model="m")
    assert hasher.hash_blocks(ids) == expected
    assert hasher.hash_blocks(np.array(ids, dtype=np.uint32)) == expected


@given(tokens, st.integers(0, 8))
def test_extend_equals_hashing_the_complete_prompt(ids: list[int], blocks: int) -> None:
    hasher = BlockHasher(KEY, block_size=4)
    complete = hasher.hash_blocks(ids)
    blocks = min(blocks, len(complete))
    assert hasher.extend(complete[blocks - 1] if blocks else None, ids[4 * blocks :]) == complete[blocks:]


@given(tokens, tokens)
def test_chains_are_equal_exactly_up_to_the_shared_prefix(first: list[int], second: list[int]) -> None:
    hasher = BlockHasher(KEY, block_size=2)
    agree = [a == b for a, b in zip(first, second, strict=False)]
    shared = [*agree, False].index(False) // 2
    for i, (a, b) in enumerate(zip(hasher.hash_blocks(first), hasher.hash_blocks(second), strict=False)):
        assert (a == b) == (i < shared)


def test_every_field_of_the_root_changes_the_hash() -> None:
    other = HashKey(bytes(32))
    roots = [
        BlockHasher(KEY, model="m"),
        BlockHasher(other, model="m"),
        BlockHasher(KEY, "blake2b", model="m"),
        BlockHasher(KEY, model="ml", lora="x"),
        BlockHasher(KEY, model="m", lora="lx"),
        BlockHasher(KEY, model="m", lora=""),
        BlockHasher(KEY, model="m", cache_salt=""),
        BlockHasher(KEY, model="m", cache_salt="s"),
        BlockHasher(KEY, model="m", lora="s"),
    ]
    first_hashes = {hasher.hash_blocks(range(16))[0] for hasher in roots}
    assert len(first_hashes) == len(roots)


@pytest.mark.parametrize("ids", [[-1] * 16, [2**32] * 16, [1.5] * 16, np.array([-1] * 16), np.array([2**32] * 16)])
def test_token_ids_outside_u32_are_rejected(ids: list[int]) -> None:
    with pytest.raises(InputError, match="token ids"):
        BlockHasher(KEY).hash_blocks(ids)


def test_key_is_never_printed(tmp_path: Path) -> None:
    key = load_key(tmp_path / "key")
    shown = f"{key} {key!r} {key.key_id} {BlockHasher(key).info}"
    assert key.secret.hex() not in shown
    assert not re.search(re.escape(repr(key.secret)), shown)


def test_keyed_ids_differ_by_kind_and_key() -> None:
    kinds = [("session", "a"), ("request", "a"), ("session", "b"), ("sessiona", ""), ("sessio", "na")]
    ids = [keyed_id(key, *kind) for key, kind in itertools.product([KEY, HashKey(bytes(32))], kinds)]
    assert len(set(ids)) == len(ids)


def test_key_is_created_once_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: load_key(path), range(32)))
    assert len(keys) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [result.name for result in path.parent.iterdir()] == ["key"]  # nothing is left aside


def test_key_file_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTAPE_KEY_FILE", str(tmp_path / "named"))
    assert load_key() == load_key(tmp_path / "named")
    monkeypatch.delenv("KVTAPE_KEY_FILE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_key() == load_key(tmp_path / ".config" / "kvtape" / "key")


@pytest.mark.parametrize("content", ["", "xyz", "00" * 31, "00" * 33, "é", "00" * 32, "a5" * 32, "0123" * 16])
def test_invalid_key_file_is_rejected(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(str(path))):
        load_key(path)


@pytest.mark.parametrize(
    ("mode", "warned"),
    [(0o600, None), (0o400, None), (0o640, "its group"), (0o644, "all users"), (0o604, "all users")],
)
def test_key_readable_by_other_users_gives_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, warned: str | None
) -> None:
    path = tmp_path / "key"
    key = load_key(path)
    path.chmod(mode)
    assert load_key(path) == key
    message = capsys.readouterr().err
    assert message == (f"warning: {path}: {warned} can read this secret key; expected mode 0600\n" if warned else "")


def test_group_readable_key_of_another_user_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o440)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    load_key(tmp_path / "key")
    assert capsys.readouterr().err == ""


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 5), st.integers(1, 4), st.data())
def test_downsampled_chain_shares_the_prefixes_of_the_larger_block_size(
    prompt: int, output: int, block_size: int, factor: int, data: st.DataObject
) -> None:
    """Two requests with a common beginning: coarse hashes agree where the thinned ones do, and are as many."""
    common = data.draw(st.integers(0, prompt + output))
    fine, coarse = ([], [])  # type: tuple[list[Record], list[Record]]
    for tail in (1, 2):
        ids = [0] * common + [tail] * (prompt + output - common)
        fine.append(downsample(hashed(ids, prompt, output, block_size), block_size, factor))
        coarse.append(hashed(ids, prompt, output, block_size * factor))
    for field in ("block_hashes", "output_block_hashes"):
        thin, true = [[getattr(r, field) for r in pair] for pair in (fine, coarse)]
        assert [len(x) for x in thin] == [len(x) for x in true]
        assert [a == b for a, b in zip(*thin, strict=True)] == [a == b for a, b in zip(*true, strict=True)]


def hashed(ids: list[int], prompt: int, output: int, block_size: int) -> Record:
    """A record as the schema defines its two chains: the last output token's KV is never computed."""
    chain = BlockHasher(KEY, block_size=block_size).hash_blocks(ids)
    computed = max(prompt, prompt + output - 1)
    return Record(
        request_id=RequestId("a"),
        prompt_tokens=prompt,
        output_tokens=output,
        block_hashes=chain[: prompt // block_size],
        output_block_hashes=chain[prompt // block_size : computed // block_size],
    )


def test_downsampling_drops_output_hashes_after_missing_prompt_hashes() -> None:
    record = Record(
        request_id=RequestId("a"),
        prompt_tokens=8,
        block_hashes=[BlockHash(1)],
        output_block_hashes=[BlockHash(9)],
    )
    assert downsample(record, 2, 2).output_block_hashes is None
