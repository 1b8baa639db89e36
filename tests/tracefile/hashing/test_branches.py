"""Branches: what two chains share is known to the token, as a comparison of the tokens themselves says."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tracefile.hashing.tokenwise import tokenwise
from tracefile.__main__ import main
from tracefile.files.reading import load_trace, open_trace
from tracefile.files.writing import new_writer
from tracefile.hashing.blockhash import BlockHasher
from tracefile.hashing.branches import BranchFinder
from tracefile.hashing.hashkey import HashKey
from tracefile.hashing.tokenchains import Branches
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, HashInfo, Meta, Record, RequestId

KEY = HashKey(bytes(range(32)))
SIZE = 4


def captured(finder: BranchFinder, prompt: list[int], output: list[int] | None, number: int = 1) -> Record:
    """The record of a request as the tap makes it; of the output, the last token has no KV."""
    hasher = BlockHasher(KEY, block_size=SIZE)
    request_id = RequestId(f"r{number}")
    hashes = hasher.hash_blocks(prompt)
    computed = [] if output is None else output[:-1]
    more = hasher.extend(hashes[-1] if hashes else None, [*prompt[len(hashes) * SIZE :], *computed])
    branch = finder.add(hasher.root, [*hashes, *more], prompt, computed, request_id)
    return Record(
        request_id=request_id,
        prompt_tokens=len(prompt),
        output_tokens=0 if output is None else len(output),
        block_hashes=hashes,
        output_block_hashes=None if output is None else more,
        branch_tokens=None if branch is None else branch.tokens,
        branch_hash=None if branch is None else branch.block,
    )


def common(item: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(item, other)) if a != b), min(len(item), len(other)))  # noqa: B905


few_tokens = st.lists(st.integers(0, 2), max_size=14)


@given(st.lists(st.tuples(few_tokens, st.none() | few_tokens.filter(bool)), min_size=1, max_size=12))
def test_token_chains_share_as_many_keys_as_tokens(requests: list[tuple[list[int], list[int] | None]]) -> None:
    finder = BranchFinder(SIZE)
    records = [captured(finder, prompt, output, number) for number, (prompt, output) in enumerate(requests)]
    finder.check_integrity()
    seen: list[tuple[Sequence[int], Sequence[int]]] = []
    for record, (prompt, output) in zip(tokenwise(records, SIZE), requests, strict=True):
        assert len(record.block_hashes or ()) == len(prompt)
        keys = [*(record.block_hashes or ()), *(record.output_block_hashes or ())]
        tokens = [*prompt, *(output or [])[:-1]]
        assert len(keys) == len(tokens)
        for other_keys, other_tokens in seen:
            assert common(keys, other_keys) == common(tokens, other_tokens)
        seen.append((keys, tokens))


@given(st.lists(few_tokens, min_size=1, max_size=20), st.integers(1, 40))
def test_branch_finder_evicts_the_least_recent_chain_and_never_overestimates(
    prompts: list[list[int]], most: int
) -> None:
    finder = BranchFinder(SIZE, max_tokens=most)
    records = []
    for number, prompt in enumerate(prompts):
        records.append(captured(finder, prompt, None, number))
        finder.check_integrity()
    seen: list[tuple[Sequence[int], Sequence[int]]] = []
    for record, prompt in zip(tokenwise(records, SIZE), prompts, strict=True):
        keys = list(record.block_hashes or ())
        for other_keys, other_tokens in seen:
            reported, true = common(keys, other_keys), common(prompt, other_tokens)
            assert true // SIZE * SIZE <= reported <= true
        seen.append((keys, prompt))


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst"])
def test_branches_round_trip(tmp_path: Path, suffix: str) -> None:
    finder = BranchFinder(SIZE)
    records = [captured(finder, [1, 2, 3, 4, 5, number], None, number) for number in range(3)]
    records[2] = msgspec.structs.replace(records[2], branch_hash=2**64 - 1)
    meta = Meta(source="tap", block_size=SIZE, hash=HashInfo(algorithm="xxh3_64", branches=True))
    with new_writer(str(tmp_path / f"t.{suffix}"), meta, inputs=[]) as writer:
        for record in records:
            writer.write(record)
    with open_trace(tmp_path / f"t.{suffix}") as reader:
        assert list(reader) == records
    for item, other in pairwise(tokenwise(records[:2], SIZE)):
        assert common(list(item.block_hashes or ()), list(other.block_hashes or ())) == 5


def test_block_size_must_be_a_multiple(tmp_path: Path) -> None:
    finder = BranchFinder(SIZE)
    records = [
        captured(finder, prompt, None, number) for number, prompt in enumerate(([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 0]))
    ]
    meta = Meta(source="tap", block_size=SIZE, hash=HashInfo(algorithm="xxh3_64", branches=True))
    with new_writer(str(tmp_path / "t.jsonl"), meta, inputs=[]) as writer:
        for record in records:
            writer.write(record)
    for size, shared in ((4, 0), (8, 0)):
        out = tmp_path / f"{size}.jsonl"
        assert main(["convert", str(tmp_path / "t.jsonl"), str(out), "--block-size", str(size)]) == 0
        new, (item, other) = load_trace(out)
        assert (new.block_size, new.hash) == (size, HashInfo(algorithm="xxh3_64"))
        assert (len(item.block_hashes or ()), item.branch_tokens) == (7 // size, None)
        assert common(list(item.block_hashes or ()), list(other.block_hashes or ())) == shared
        assert main(["check", str(out)]) == 0
    with pytest.raises(InputError, match="--block-size 6: expected a multiple of the trace's block size \\(4\\)"):
        main(["convert", str(tmp_path / "t.jsonl"), str(tmp_path / "o"), "--block-size", "6"])


def test_cyclic_branches_terminate() -> None:
    branches = Branches(SIZE)
    for number, (local, other) in enumerate([(7, 8), (8, 7), (9, 9)]):
        branches.learn(
            Record(
                request_id=RequestId(f"r{number}"),
                prompt_tokens=4,
                block_hashes=[BlockHash(local)],
                branch_tokens=2,
                branch_hash=BlockHash(other),
            )
        )
    assert list(branches.ancestors(BlockHash(8))) == [(8, SIZE)]
    assert list(branches.ancestors(BlockHash(7))) == [(7, SIZE), (8, 2)]
    assert list(branches.ancestors(BlockHash(9))) == [(9, SIZE)]
