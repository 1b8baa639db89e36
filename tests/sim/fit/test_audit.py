"""``sim audit``: reported cached tokens against the rules, and causes that are found by trying."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from librt.vecs import vec
from mypy_extensions import i64

from sim.__main__ import main
from sim.engine.simulatedrequest import SimulatedRequest
from sim.fit import audit
from sim.fit.schedule import Reconstruction
from tests.sim import captured_loads
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, Record

SEED = 5


@pytest.fixture
def truth() -> list[Record]:
    """What an engine of exactly the rules reports."""
    engine = captured_loads.random_engine(SEED)
    records: list[Record] = captured_loads.captured(captured_loads.RandomLoad(SEED).records(40), engine)
    return records


class Auditor:
    """Audits records as a trace of the engine of ``SEED``."""

    def __init__(self, directory: Path) -> None:
        self.trace = directory / "trace.jsonl"
        self._meta = captured_loads.META
        engine = captured_loads.random_engine(SEED)
        self._flags = [
            *("--num-gpu-blocks", str(engine.num_gpu_blocks), "--max-num-seqs", str(engine.max_num_seqs)),
            *("--max-num-batched-tokens", str(engine.max_num_batched_tokens), "--no-async-scheduling"),
        ]

    def set_engine(self, engine: Engine) -> None:
        self._meta = msgspec.structs.replace(self._meta, engine=engine)

    def run(self, records: list[Record], *flags: str) -> int:
        with TraceWriter(self.trace, self._meta, overwrite=True) as writer:
            for record in records:
                writer.write(record)
        return main(["audit", str(self.trace), *self._flags, *flags])


@pytest.fixture
def auditor(tmp_path: Path) -> Auditor:
    return Auditor(tmp_path)


def audited(auditor: Auditor, records: list[Record], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert auditor.run(records, "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_engine_with_vllms_rules_agrees(
    auditor: Auditor, truth: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    assert auditor.run(truth, "--min-exact-share", "1") == 0
    assert "40 of 40 requests (100.0%) have the cached tokens that the rules give them" in capsys.readouterr().out


def test_failed_audit_gate(auditor: Auditor, truth: list[Record], capsys: pytest.CaptureFixture[str]) -> None:
    assert auditor.run([changed(truth[0], 17), *truth[1:]], "--min-exact-share", "1") == 1
    assert "reported is no multiple of 32: another block size" in capsys.readouterr().out


def test_cache_filled_before_the_capture(
    auditor: Auditor, truth: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    """A first request on blocks that nobody else has: whatever it hit is not of this trace."""
    alone = max(
        (record for record in truth if record.block_hashes),
        key=lambda record: sum(1 for key in record.block_hashes or () if everyone(truth).count(key) == 1),
    )
    warm = 32 * len(alone.block_hashes or ())
    audit = audited(auditor, [changed(original, warm) if original is alone else original for original in truth], capsys)
    causes = {difference["request_id"]: difference["cause"] for difference in audit["differences"]}
    assert causes == {alone.request_id: "cached before the capture, or part of an output whose ids are unknown"}


def test_request_too_large_for_the_settings(
    auditor: Auditor, truth: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    largest = max(record.prompt_tokens or 0 for record in truth)
    assert auditor.run(truth, "--json", "--max-model-len", str(largest)) == 0
    audit = json.loads(capsys.readouterr().out)
    assert "never served under these settings" in {difference["cause"] for difference in audit["differences"]}


def test_trace_without_cached_tokens_is_rejected(auditor: Auditor, truth: list[Record]) -> None:
    silent = [msgspec.structs.replace(record, cached_tokens=None) for record in truth]
    with pytest.raises(InputError, match="cached_tokens: no record has any"):
        auditor.run(silent)


def test_sglang_trace_is_rejected(auditor: Auditor, truth: list[Record]) -> None:
    auditor.set_engine(Engine(name="sglang"))
    with pytest.raises(InputError, match="of SGLang; expected sim pool --engine sglang, which compares the hits"):
        auditor.run(truth)


def everyone(records: list[Record]) -> list[int]:
    return [key for record in records for key in (*(record.block_hashes or ()), *(record.output_block_hashes or ()))]


def changed(record: Record, cached_tokens: int) -> Record:
    return msgspec.structs.replace(record, cached_tokens=cached_tokens)


def admitted(hashes: list[int], cached: int) -> SimulatedRequest:
    request = SimulatedRequest("r", 4 * len(hashes) + 1, 1, vec[i64](hashes), num_keys=len(hashes))
    request.has_arrived, request.cached_tokens = True, cached
    return request


def test_hit_of_the_complete_chain() -> None:
    """Two blocks of four tokens were reported: all that the trace has of this request, and another one has them too."""
    for other_hashes, reported, cause in (
        ([1, 2, 3], 8, None),
        ([1, 3], 8, "cached before the capture, or part of an output whose ids are unknown"),
        ([1, 2, 3], 12, "reported reaches beyond the hashes that the trace has of it"),
        ([1, 2, 3], 7, "reported is no multiple of 4: another block size"),
        ([9], 4, None),
    ):
        requests = [admitted([1, 2], 4), admitted(other_hashes, 0)]
        reconstruction = Reconstruction(requests, [0, 0], 0, 0, 0, [])
        assert audit._beyond_the_trace(requests[0], reported, reconstruction, 4) == cause
