"""Other people's formats, told by content and read as ours."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tracefile import HashInfo, InputError, Record, TraceWriter, load_trace, open_trace

MOONCAKE = {"timestamp": 27, "input_length": 1030, "output_length": 5, "hash_ids": [0, 7, 9]}
VCR: dict[str, Any] = {"prompt_tokens": 40, "output_tokens": 4, "ttft_ms": 50.0}


def write_lines(path: Path, *objects: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(found) + "\n" for found in objects))
    return path


def read_vcr(path: Path, record: dict[str, Any], meta: dict[str, Any] | None = None) -> tuple[Record, list[str]]:
    write_lines(path, *([] if meta is None else [{"meta": meta}]), record)
    with open_trace(path) as reader:
        assert reader.format == "vllm-vcr"
        (read,) = reader
        return read, reader.warnings


def test_a_mooncake_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", MOONCAKE, MOONCAKE | {"input_length": 1536, "timestamp": 28})
    with open_trace(path) as reader:
        first, second = reader
        assert reader.format == "mooncake"
    assert reader.meta.block_size == 512
    assert reader.meta.hash == HashInfo(algorithm="mooncake")
    assert (first.request_id, first.arrival_ms, first.prompt_tokens, first.output_tokens) == ("mooncake-1", 27, 1030, 5)
    assert first.block_hashes == [0, 7]  # 1,030 = 2 × 512 + 6: the third id is a partial block's
    assert second.block_hashes == [0, 7, 9]  # exactly three full blocks
    assert (first.session_id, first.turn, first.ttft_ms, first.cached_tokens) == (None, None, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": [0]}, "hash_ids: 1 ids; expected 2"),
        ({"input_length": -1}, "input_length"),
        ({"timestamp": "now"}, "timestamp"),
    ],
)
def test_a_bad_mooncake_line_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_lines(tmp_path / "t", MOONCAKE, MOONCAKE | change)
    with pytest.raises(InputError, match=":2: .*" + message):
        load_trace(path)


def mooncake_file() -> Path:
    folder = os.environ.get("KVTAPE_DATA")
    if not folder or not (path := Path(folder) / "mooncake" / "conversation_trace.jsonl").exists():
        pytest.skip("KVTAPE_DATA names no folder with mooncake/conversation_trace.jsonl")
    return path


def test_the_published_mooncake_trace() -> None:
    meta, records = load_trace(mooncake_file())
    assert meta.block_size == 512
    assert len(records) == 12_031
    assert sum(record.prompt_tokens or 0 for record in records) == 144_793_823
    assert all(len(r.block_hashes or []) == (r.prompt_tokens or 0) // 512 for r in records)


def test_a_vcr_record_of_few_fields(tmp_path: Path) -> None:
    record, warnings = read_vcr(tmp_path / "t", {"prompt_tokens": 40})
    assert record.request_id == "vcr-1"
    # Absent is not a reported miss; nothing is known of blocks without a block size.
    assert (record.cached_tokens, record.block_hashes, record.e2e_ms, record.concurrency) == (None, None, None, 1)
    assert warnings == []


def test_a_vcr_record_of_all_fields(tmp_path: Path) -> None:
    full = VCR | {
        "cached_tokens": 0,
        "itl_ms": [5.0, 6.0],
        "itl_tokens": [1, 2],
        "concurrency": 3,
        "arrival_ms": 12.5,
        "itl_ctx": {"num_running": [1, 1], "prefill_tokens": [0, 0]},
        "block_hashes": [2**64 - 1, 3],
        "finish_reason": "stop",
    }
    meta = {"model": "m", "gpu": "H100", "tp": 2, "max_num_seqs": 8, "source": "tap", "block_size": 16}
    meta |= {"vllm_version": "0.32.0", "config_hash": "c", "ready_response_hex": "00", "mood": "good"}
    record, warnings = read_vcr(tmp_path / "t", full, meta)
    assert (record.cached_tokens, record.itl_ms, record.itl_tokens) == (0, [5.0, 6.0], [1, 2])
    assert record.e2e_ms == 61.0  # 50 to the first token, then 5 and 6
    assert (record.block_hashes, record.hash_source, record.finish_reason) == ([2**64 - 1, 3], "engine", "stop")
    assert (record.arrival_ms, record.concurrency, record.status, record.model) == (12.5, 3, "ok", "m")
    assert record.extra == {"itl_ctx": full["itl_ctx"]}
    assert warnings == []
    read = load_trace(tmp_path / "t")[0]
    assert (read.source, read.model, read.block_size) == ("tap", "m", 16)
    assert read.engine is not None
    assert (read.engine.name, read.engine.version, read.engine.max_num_seqs) == ("vllm", "0.32.0", 8)
    assert read.extra["gpu"] == "H100"
    assert read.extra["mood"] == "good"


def test_a_vcr_summary_is_that_many_equal_gaps(tmp_path: Path) -> None:
    record, _ = read_vcr(tmp_path / "t", VCR | {"itl_summary": {"mean_ms": 2.5, "count": 3}})
    assert (record.itl_ms, record.itl_tokens, record.e2e_ms) == ([2.5, 2.5, 2.5], [1, 1, 1], 57.5)


def test_no_hashes_means_no_full_block_where_the_prompt_is_shorter(tmp_path: Path) -> None:
    meta = {"block_size": 64}
    assert read_vcr(tmp_path / "t", VCR, meta)[0].block_hashes == []
    assert read_vcr(tmp_path / "t", VCR | {"prompt_tokens": 64}, meta)[0].block_hashes is None


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", "ok"), ("length", "ok"), ("repetition", "ok"), ("abort", "client_abort"), ("error", "error")],
)
def test_a_vcr_finish_reason_gives_the_status(tmp_path: Path, reason: str, status: str) -> None:
    assert read_vcr(tmp_path / "t", VCR | {"finish_reason": reason})[0].status == status


def test_content_is_dropped_with_a_warning_and_never_written_on(tmp_path: Path) -> None:
    record, warnings = read_vcr(tmp_path / "t", VCR | {"output_token_ids": [123454321] * 4})
    assert warnings == ["output_token_ids of 1 records dropped: they are the answers' text"]
    with TraceWriter(tmp_path / "out", load_trace(tmp_path / "t")[0]) as writer:
        writer.write(record)
    assert b"123454321" not in (tmp_path / "out").read_bytes()


def test_images_without_a_place_end_the_chain_before_it_begins(tmp_path: Path) -> None:
    record, warnings = read_vcr(tmp_path / "t", VCR | {"block_hashes": [1, 2], "mm_hashes": ["x"]}, {"block_size": 16})
    assert (record.block_hashes, record.hashable_blocks) == ([1, 2], 0)
    assert record.extra["mm_hashes"] == ["x"]
    assert len(warnings) == 1


def test_a_bad_vcr_line_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t", VCR, VCR | {"ttft_ms": "x"})
    with pytest.raises(InputError, match=":2: ttft_ms: Expected"):
        load_trace(path)


def test_a_gzipped_vcr_trace_cut_short_reads(tmp_path: Path) -> None:
    lines = b"".join(json.dumps(VCR | {"arrival_ms": i * 1.7}).encode() + b"\n" for i in range(500))
    (tmp_path / "t.gz").write_bytes(gzip.compress(lines)[:-200])
    with open_trace(tmp_path / "t.gz") as reader:
        count = sum(1 for _ in reader)
        assert 0 < count < 500
        assert len(reader.warnings) == 1
