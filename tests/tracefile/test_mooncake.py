"""Other people's formats, written: literal lines, and what comes back when they are read again."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefile.__main__ import main
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import BlockHash, HashInfo, Meta, Record, RequestId, SessionId

EPOCH_NS = 1_763_769_600 * 10**9


def record(name: str, arrival_ms: float, prompt: int, output: int, blocks: list[int], **more: Any) -> Record:
    return Record(
        request_id=RequestId(name),
        arrival_ms=arrival_ms,
        prompt_tokens=prompt,
        output_tokens=output,
        block_hashes=[BlockHash(block) for block in blocks],
        **more,
    )


FIRST = record("a", 1000.5, 40, 7, [11, 12], session_id=SessionId("s"), turn=1, ttft_ms=20.0, e2e_ms=90.25)
SECOND = record(
    "b", 3000.0, 64, 5, [11, 12, 13, 14], session_id=SessionId("s"), turn=2, parent_id=RequestId("a"), think_ms=1909.25
)
OTHER = record("c", 500.0, 16, 1, [21], session_id=SessionId("o"), turn=1, cached_tokens=0, finish_reason="stop")


def trace(path: Path, *records: Record, meta: Meta | None = None) -> str:
    header = meta or Meta(block_size=16, hash=HashInfo(algorithm="xxh3_64"), epoch_unix_ns=EPOCH_NS, model="m")
    with TraceWriter(path, header) as writer:
        for result in records:
            writer.write(result)
    return str(path)


def exported(
    tmp_path: Path, target: str, *flags: str, records: tuple[Record, ...] = (FIRST, SECOND, OTHER)
) -> list[Any]:
    out = tmp_path / f"{target}.out"
    assert main(["convert", trace(tmp_path / f"{target}.jsonl", *records), str(out), "--to", target, *flags]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_mooncake_is_in_arrival_order_with_ids_of_partial_blocks(tmp_path: Path) -> None:
    assert exported(tmp_path, "mooncake", "--block-size", "16") == [
        {"timestamp": 500, "input_length": 16, "output_length": 1, "hash_ids": [5]},
        {"timestamp": 1000, "input_length": 40, "output_length": 7, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 64, "output_length": 5, "hash_ids": [0, 1, 3, 4]},
    ]


def test_round_trip_loses_only_the_named_fields(tmp_path: Path) -> None:
    exported(tmp_path, "mooncake")
    kept = ("prompt_tokens", "output_tokens")
    _, records = load_trace(tmp_path / "mooncake.out")
    back = sorted(tuple(str(getattr(result, name)) for name in kept) for result in records)
    assert back == sorted(tuple(str(getattr(result, name)) for name in kept) for result in (FIRST, SECOND, OTHER))


@given(
    prompts=st.lists(st.lists(st.sampled_from("abc"), max_size=6), min_size=1, max_size=8),
    rest=st.integers(0, 3),
)
def test_ids_are_equal_for_equal_prefixes(
    prompts: list[list[str]], rest: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("t")
    chains = [[hash(tuple(prompt[: n + 1])) % 2**64 for n in range(len(prompt))] for prompt in prompts]
    records = [record(f"r{n}", n, 4 * len(chain) + rest + 1, 1, chain) for n, chain in enumerate(chains)]
    meta = Meta(block_size=4, hash=HashInfo(algorithm="xxh3_64"), epoch_unix_ns=EPOCH_NS)
    path = trace(folder / "t.jsonl", *records, meta=meta)
    assert main(["convert", path, str(folder / "o"), "--to", "mooncake", "--block-size", "4"]) == 0
    lines = [json.loads(line) for line in (folder / "o").read_text().splitlines()]
    ids = [line["hash_ids"] for line in lines]
    for item, local in zip(prompts, ids, strict=True):
        tokens = 4 * len(item) + rest + 1
        assert len(local) == -(-tokens // 4)
        for other, remaining in zip(prompts, ids, strict=True):
            common = next(
                (n for n, (a, b) in enumerate(zip(item, other, strict=False)) if a != b), min(len(item), len(other))
            )
            assert [a == b for a, b in zip(local[: len(item)], remaining[: len(other)], strict=False)] == [
                n < common for n in range(min(len(item), len(other)))
            ]
