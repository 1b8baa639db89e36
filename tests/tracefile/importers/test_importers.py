"""Other people's formats, told by content and read as ours."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tracefile import HashInfo, InputError, load_trace, open_trace

MOONCAKE = {"timestamp": 27, "input_length": 1030, "output_length": 5, "hash_ids": [0, 7, 9]}


def write_lines(path: Path, *objects: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(found) + "\n" for found in objects))
    return path


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
