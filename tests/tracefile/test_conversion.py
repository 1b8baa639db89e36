"""Traces made from traces: a time range, anonymized, on one clock."""

import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tracefile.hashing.tokenwise import tokenwise
from tracefile.__main__ import main
from tracefile.analysis.anonymity import Pseudonyms, anonymize
from tracefile.analysis.checking import check_trace
from tracefile.files.reading import load_trace, open_trace
from tracefile.files.writing import TraceWriter
from tracefile.hashing.branches import tail_key
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Engine, HashInfo, Meta, Record, RequestId, SessionId

META = Meta(
    source="tap",
    block_size=4,
    hash=HashInfo(algorithm="blake2b", key_id="k"),
    epoch_unix_ns=10**18,
    model="secret-model",
    engine=Engine(name="vllm", version="secret-1", num_gpu_blocks=64, extra={"host": "secret"}),
    extra={"note": "secret"},
)


def record(name: str, arrival_ms: float, session: str | None = None, **more: Any) -> Record:
    return Record(
        request_id=RequestId(name),
        session_id=None if session is None else SessionId(session),
        arrival_ms=arrival_ms,
        **more,
    )


def trace(path: Path, *records: Record, meta: Meta = META) -> str:
    with TraceWriter(path, meta) as writer:
        for result in records:
            writer.write(result)
    return str(path)


def names(path: Path) -> list[str]:
    return [result.request_id for result in load_trace(path)[1]]


def test_time_range_keeps_complete_sessions(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "t",
        record("a1", 100.0, "a"),
        record("b1", 1200.0, "b"),
        record("a2", 1300.0, "a"),
        record("c", 1500.0),
        record("b2", 9000.0, "b"),
    )
    out = tmp_path / "o"
    assert main(["convert", path, str(out), "--from", "1s", "--until", "2s"]) == 0
    assert names(out) == ["b1", "c", "b2"]


def test_anonymized_trace_preserves_lengths_and_shared_prefixes_only(tmp_path: Path) -> None:
    first = record(
        "secret-a",
        1005.25,
        "secret-s",
        first_byte_ms=18.0,
        ttft_ms=18.5,
        itl_ms=[3.4, 9.9],
        itl_tokens=[1, 1],
        e2e_ms=44.5,
        prompt_tokens=9,
        output_tokens=3,
        block_hashes=[BlockHash(5), BlockHash(6)],
        model="secret-model",
        upstream="http://secret",
        headers={"x": "secret"},
        extra={"y": "secret"},
    )
    second = record("b", 1099.0, "secret-s", parent_id=RequestId("secret-a"), turn=2, think_ms=49.25,
                    prompt_tokens=8, block_hashes=[BlockHash(5), BlockHash(7)])  # fmt: skip
    out = tmp_path / "o"
    assert main(["convert", trace(tmp_path / "t", first, second), str(out), "--anonymize"]) == 0
    assert "secret" not in out.read_text()
    meta, (item, two) = load_trace(out)
    assert meta == Meta(
        source="tap", block_size=4, hash=HashInfo(algorithm="anonymized"), engine=Engine(num_gpu_blocks=64)
    )
    assert (item.arrival_ms, item.ttft_ms, item.itl_ms, item.e2e_ms) == (0.0, 10.0, [10.0, 10.0], 40.0)
    assert (two.arrival_ms, two.think_ms, two.parent_id, two.session_id) == (
        90.0,
        40.0,
        item.request_id,
        item.session_id,
    )
    assert item.block_hashes is not None
    assert two.block_hashes is not None
    assert item.block_hashes[0] == two.block_hashes[0] != item.block_hashes[1]
    assert len({*item.block_hashes, *two.block_hashes, 5, 6, 7}) == 6
    with open_trace(out) as reader:
        assert list(check_trace(reader)) == []


def test_anonymized_branches_refer_to_the_same_blocks() -> None:
    """Sharing to the token is as it was: of a full block, and of another request's unfilled last block."""
    full = record("a", 0.0, prompt_tokens=9, output_tokens=1, block_hashes=[BlockHash(5), BlockHash(6)])
    tail = tail_key([BlockHash(5), BlockHash(6)], RequestId("a"))
    result = [
        full,
        record("b", 1.0, prompt_tokens=8, output_tokens=1, block_hashes=[BlockHash(5), BlockHash(7)],
               branch_tokens=6, branch_hash=BlockHash(6)),
        record("c", 2.0, prompt_tokens=13, output_tokens=1, block_hashes=[BlockHash(5), BlockHash(6), BlockHash(8)],
               branch_tokens=9, branch_hash=tail),
    ]  # fmt: skip
    pseudonyms = Pseudonyms()
    for item in result:
        pseudonyms.learn(item)
    made = list(anonymize(result, pseudonyms, 0.0, 1.0))
    assert made[1].branch_hash != BlockHash(6)
    for before, after in zip(tokenwise(result, 4), tokenwise(made, 4), strict=True):
        assert before.block_hashes is not None
        assert after.block_hashes is not None
        assert len(before.block_hashes) == len(after.block_hashes)
    shared = [[_common(item, other) for other in tokenwise(result, 4)] for item in tokenwise(result, 4)]
    assert shared == [[_common(item, other) for other in tokenwise(made, 4)] for item in tokenwise(made, 4)]
    assert (shared[0][1], shared[0][2]) == (6, 9)


def _common(item: Record, other: Record) -> int:
    pairs = zip(item.block_hashes or [], other.block_hashes or [], strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(
        len(item.block_hashes or []), len(other.block_hashes or [])))  # fmt: skip


@given(
    ttft_ms=st.floats(0, 500),
    gaps_ms=st.lists(st.floats(0, 100), max_size=6),
    tail_ms=st.floats(0, 50),
    rounding_ms=st.sampled_from([0.1, 1.0, 10.0, 250.0]),
)
def test_rounded_times_stay_in_order(ttft_ms: float, gaps_ms: list[float], tail_ms: float, rounding_ms: float) -> None:
    e2e_ms = ttft_ms + sum(gaps_ms) + tail_ms
    result = record("a", 5.0, ttft_ms=ttft_ms, itl_ms=gaps_ms, itl_tokens=[1] * len(gaps_ms), e2e_ms=e2e_ms)
    (made,) = anonymize([result], Pseudonyms(), 5.0, rounding_ms)
    assert made.ttft_ms is not None
    assert made.e2e_ms is not None
    assert min([0.0, *made.itl_ms]) >= 0
    last_ms = made.ttft_ms + sum(made.itl_ms)
    assert last_ms <= made.e2e_ms + 1e-3
    assert abs(last_ms - (ttft_ms + sum(gaps_ms))) <= rounding_ms + 1e-3


def test_joined_traces_are_on_the_clock_of_the_first(tmp_path: Path) -> None:
    item = trace(tmp_path / "1", record("a", 0.0, e2e_ms=100.0), record("b", 3000.0, e2e_ms=100.0))
    later = msgspec.structs.replace(META, epoch_unix_ns=10**18 + 1_500_000_000)
    two = trace(tmp_path / "2", record("a", 0.0, e2e_ms=100.0, scheduled_ms=0.0), meta=later)
    out = tmp_path / "o"
    with pytest.raises(InputError, match="given twice; expected each trace once"):
        main(["convert", item, two, item, str(out)])
    assert main(["convert", item, two, str(out)]) == 0
    meta, records = load_trace(out)
    assert meta.epoch_unix_ns == 10**18
    assert [(result.request_id, result.arrival_ms, result.scheduled_ms) for result in records] == [
        ("a", 0.0, None),
        ("a~2", 1500.0, 1500.0),
        ("b", 3000.0, None),
    ]


def test_conversion_steps_combine(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "t",
        record("a1", 0.0, "a", prompt_tokens=8, output_tokens=1, block_hashes=[BlockHash(5), BlockHash(6)]),
        record("b1", 1200.0, "b", prompt_tokens=8, output_tokens=1, block_hashes=[BlockHash(5), BlockHash(7)]),
        record("b2", 1500.0, "b", prompt_tokens=8, output_tokens=1, block_hashes=[BlockHash(5), BlockHash(7)]),
    )
    out = tmp_path / "o"
    assert main(["convert", path, str(out), "--from", "1s", "--block-size", "8", "--anonymize"]) == 0
    meta, (item, other) = load_trace(out)
    assert (meta.block_size, meta.hash and meta.hash.algorithm) == (8, "anonymized")
    assert item.block_hashes == other.block_hashes != [BlockHash(7)]
    assert (len(item.block_hashes or ()), item.session_id) == (1, other.session_id)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_output_has_no_more_permissions_than_its_inputs(tmp_path: Path, mode: int) -> None:
    """And one in place of a file that is there has that file's permissions."""
    umask = os.umask(0o022)
    try:
        source, there = (
            trace(tmp_path / "t.jsonl", Record(request_id=RequestId("a"), arrival_ms=0.0)),
            tmp_path / "d.jsonl",
        )
        os.chmod(source, mode)
        there.touch(mode=0o604)
        for name, *flags in (("a.jsonl",), ("b.jsonl.zst", "--anonymize")):
            out = tmp_path / name
            assert main(["convert", source, str(out), *flags]) == 0
            assert stat.S_IMODE(out.stat().st_mode) == mode
        assert main(["convert", source, str(there), "--overwrite"]) == 0
    finally:
        os.umask(umask)
    assert stat.S_IMODE(there.stat().st_mode) == 0o604
