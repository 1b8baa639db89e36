"""``sim run`` as a command: files in, files out, refusals."""

import json
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from sim.__main__ import main
from sim.latency.fittraces import FitTrace
from sim.latency.modelfile import Model, default_model, model_digest, save_model
from sim.latency.noise import LEVELS, Noise
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, Meta, Record

NOISE = Noise(
    step_log_ratio=(tuple(0.05 * (position - 7) for position in range(len(LEVELS))),),
    frontend_log_ratio=tuple(0.05 * (position - 7) for position in range(len(LEVELS))),
)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    model = msgspec.structs.replace(default_model(), noise=NOISE)
    save_model(model, tmp_path / "model.json")
    return model


@pytest.fixture
def trace(tmp_path: Path, model: Model, synthetic: ModuleType) -> Path:
    records = synthetic.capture(synthetic.calibration(1, prompts=15, mixed=20), model)
    return write(tmp_path / "trace.jsonl", records)


def write(path: Path, records: list[Record], meta: Meta | None = None) -> Path:
    with TraceWriter(path, meta or Meta(source="tap", block_size=32, model="tiny")) as writer:
        for record in records:
            writer.write(record)
    return path


def run(trace: Path, *flags: str, output: str = "predicted.jsonl") -> tuple[Meta, list[Record]]:
    target = trace.with_name(output)
    arguments = ["run", str(trace), "--latency-model", str(trace.with_name("model.json")), "-o", str(target), *flags]
    assert main(arguments) == 0
    return load_trace(target)


def test_prediction_is_a_trace_of_the_requests(trace: Path, model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    meta, predicted = run(trace)
    _, captured = load_trace(trace)
    assert {record.request_id for record in predicted} == {record.request_id for record in captured}
    ends = [record.end_ms() or 0.0 for record in predicted]
    assert ends == sorted(ends)
    assert meta.source == "sim"
    assert meta.model == "tiny"
    assert meta.workload is not None
    assert meta.workload.source_digest == trace_digest(trace)
    assert meta.extra["model_digest"] == model_digest(model)
    assert meta.extra["settings"]["enable_prefix_caching"]
    assert meta.engine is not None
    assert meta.engine.num_gpu_blocks == model.engine.num_gpu_blocks
    shapes = {record.request_id: record for record in captured}
    for record in predicted:
        assert record.cached_tokens == shapes[record.request_id].cached_tokens
        assert record.session_id == shapes[record.request_id].session_id
    assert "turns 2+" in capsys.readouterr().out


def test_equal_seeds_give_equal_files(trace: Path) -> None:
    for output, flags in (("a", ("--seed", "3")), ("b", ("--seed", "3")), ("c", ("--seed", "4"))):
        run(trace, *flags, output=f"{output}.jsonl")
    a, b, c = (trace.with_name(f"{name}.jsonl").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_cold_prompts_have_no_hits(trace: Path) -> None:
    _, warm = run(trace)
    meta, cold = run(trace, "--cold-prompts", output="cold.jsonl")
    assert sum(record.cached_tokens or 0 for record in warm) > 0
    assert {record.cached_tokens for record in cold} == {0}
    assert meta.workload is not None
    assert meta.workload.cold_prompts is True
    assert all(record.block_hashes is None for record in cold)


def test_sessions_are_inferred(trace: Path) -> None:
    _, captured = load_trace(trace)
    anonymous = [
        msgspec.structs.replace(record, session_id=None, parent_id=None, turn=None, think_ms=None)
        for record in captured
    ]
    path = write(trace.with_name("anonymous.jsonl"), anonymous)
    _, predicted = run(path, "--replay-sessions", output="inferred.jsonl")
    hashed = {record.request_id: record.parent_id for record in captured}
    assert sum(record.parent_id is not None for record in predicted) > 5
    assert all(hashed[record.request_id] == record.parent_id for record in predicted if record.parent_id)


def test_too_large_request_is_an_error(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, predicted = run(trace, "--num-gpu-blocks", "100", "--json")
    failed = [record for record in predicted if record.status == "error"]
    assert failed
    assert {record.error for record in failed} == {"exceeds_engine"}
    assert all((record.prompt_tokens or 0) + (record.output_tokens or 0) > 3000 for record in failed)
    summary = json.loads(capsys.readouterr().out)
    assert summary["not_ok"] == summary["unservable"] == len(failed)
    assert summary["requests"] == len(predicted)
    assert 0.0 < summary["hit_rate"] < 1.0


def test_engine_without_served_requests_is_exit_code_1(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = trace.with_name("nobody.jsonl")
    arguments = ["run", str(trace), "--latency-model", str(trace.with_name("model.json")), "-o", str(output)]
    assert main([*arguments, "--num-gpu-blocks", "2"]) == 1
    _, predicted = load_trace(output)
    assert {record.status for record in predicted} == {"error"}
    assert f"{len(predicted)} too long for this engine" in capsys.readouterr().out


def test_fitted_trace_is_rejected(trace: Path, model: Model, tmp_path: Path) -> None:
    hashed = FitTrace(digest=trace_digest(trace), name="capture.jsonl", requests=50)
    save_model(msgspec.structs.replace(model, fitted_on=[hashed]), tmp_path / "model.json")
    with pytest.raises(InputError, match="fitted on this trace"):
        run(trace)
    assert not trace.with_name("predicted.jsonl").exists()


@pytest.mark.parametrize("fact", ["sliding_window", "kv_cache_groups"])
def test_unsupported_attention_is_rejected(fact: str, trace: Path, tmp_path: Path) -> None:
    meta, records = load_trace(trace)
    printed = msgspec.structs.replace(meta, engine=Engine(name="vllm", extra={fact: 4096}))
    path = write(tmp_path / "window.jsonl", records, printed)
    with pytest.raises(InputError, match=rf"meta.engine.{fact}: 4096; expected .*full attention"):
        run(path)
    with pytest.raises(InputError, match="full attention"):
        main(["pool", str(path)])
