"""Small traces, written as a test says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.dialect import DialectName
from loadgen.core.job import UNSHARDED, Shard
from replay.config import ReplayConfig
from replay.job import OpenReplay, ReplayJob
from replay.survey import survey_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import BlockHash, HashInfo, Meta, Record, RequestId

BLOCK = 4


def written(path: Path, records: Sequence[Record], block_size: int | None = BLOCK) -> Path:
    """A trace of these records."""
    with TraceWriter(path, Meta(source="tap", block_size=block_size, hash=HashInfo(algorithm="xxh3_64"))) as writer:
        for record in records:
            writer.write(record)
    return path


def request(name: str, **fields: Any) -> Record:
    """One of 9 prompt tokens (two blocks and one more) and 2 output tokens, ended after 5 ms."""
    shape: dict[str, Any] = {"prompt_tokens": 9, "output_tokens": 2, "e2e_ms": 5.0}
    hashes = [BlockHash(1), BlockHash(2)]
    return Record(request_id=RequestId(name), **{"arrival_ms": 0.0, "block_hashes": hashes, **shape, **fields})


def config(source: Path, **flags: Any) -> ReplayConfig:
    """A replay of a trace to nowhere."""
    shape: dict[str, Any] = {"nonce": "n", **flags}
    return ReplayConfig(source=source, url="http://127.0.0.1:1", trace=source.with_suffix(".out"), **shape)


def opened(source: Path, shard: Shard = UNSHARDED, dialect: DialectName = "vllm", **flags: Any) -> OpenReplay:
    """A trace's replay, ready to be sent."""
    settings = config(source, **flags)
    return ReplayJob(settings, survey_trace(source, settings.selection), "m", dialect).open(shard)
