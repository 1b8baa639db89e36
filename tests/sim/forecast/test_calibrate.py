"""``sim calibrate`` as a command: fit and validation in one go, on captures of an engine whose parameters are known."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sim.__main__ import main
from sim.latency.modelfile import default_model, load_model
from sim.latency.verdicts import read_verdicts
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import Engine, Meta

STEP = ("--max-num-seqs", "256", "--max-num-batched-tokens", "2048", "--no-async-scheduling")
QUICK = ("--bootstrap", "20", "--members", "6")


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory, synthetic: ModuleType) -> Path:
    """Two captures of one engine."""
    folder = tmp_path_factory.mktemp("calibrate")
    model = default_model()
    recorded = Engine(name="vllm", version="0.9", block_size=32, num_gpu_blocks=4096, enable_prefix_caching=True)
    for name, seed in (("fit", 1), ("gate", 2)):
        records = synthetic.capture(synthetic.calibration(seed, prompts=30, mixed=60), model, seed=seed)
        with TraceWriter(folder / f"{name}.jsonl", Meta(source="tap", block_size=32, engine=recorded)) as writer:
            for record in records:
                writer.write(record)
    return folder


def shape(folder: Path) -> tuple[str, str]:
    (folder / "shape.toml").write_text('[sim.calibrate]\napi-server = "parallel"\nterm = ["none"]\n')
    return "--config", str(folder / "shape.toml")


def calibrate(captures: Path, output: Path, *flags: str) -> int:
    return main(["calibrate", str(captures / "fit.jsonl"), "-o", str(output), *STEP, *QUICK, *shape(captures), *flags])


def test_calibrate_fits_then_validates(captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, gate = tmp_path / "model.json", captures / "gate.jsonl"
    calibrate(captures, model, "--against", str(gate), "--json")
    printed = capsys.readouterr()
    result: dict[str, Any] = json.loads(printed.out)[str(gate)]
    assert result["pairs"]["predicted"]["joined"] == 120
    assert result["pairs"]["predicted"]["cohorts"]["all"]["cached"]["exact_share"] == 1.0
    assert result["forecasts"]["predicted"]["members"] == 6
    assert "validated on" in printed.err
    assert len(printed.err.splitlines()) <= 40
    assert max(len(line) for line in printed.err.splitlines() if str(model) not in line) <= 100
    fitted = load_model(model)
    assert fitted.diagnostics["engine"] == {"name": "vllm", "version": "0.9"}
    assert [trace.digest for trace in fitted.fitted_on] == [trace_digest(captures / "fit.jsonl")]
    (kept,) = read_verdicts(model, fitted)
    assert (kept.trace, kept.trace_digest, kept.gates) == (
        "gate.jsonl",
        trace_digest(gate),
        len(result["gates"]) - len(kept.untested),
    )
    sums = [len(kept.failed), len(kept.uncertain)]
    assert sums == [sum(not row["passed"] and row["uncertain"] == open_ for row in result["gates"]) for open_ in (0, 1)]
    # A fit alone and sim validate give the same.
    alone = tmp_path / "alone.json"
    fit_flags, gate_flags = (*QUICK[:2], *shape(captures)), QUICK[2:]
    assert main(["calibrate", str(captures / "fit.jsonl"), "-o", str(alone), *STEP, *fit_flags]) == 0
    assert alone.read_bytes() == model.read_bytes()
    capsys.readouterr()
    engine = (*STEP, "--bootstrap", "20", "--json")
    main(["validate", str(gate), "--latency-model", str(alone), *engine, *gate_flags])
    assert json.loads(capsys.readouterr().out) == result


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--against", "fit.jsonl"), "--against fit.jsonl: the model was fitted on this trace"),
        (("--against", "gate.jsonl", "again.jsonl", "--html", "p.html"), "--html: one page is of one capture"),
        (("--against", "gate.jsonl", "--members", "0"), "--members 0: expected 1 or more"),
    ],
)
def test_rejected_input(captures: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], message: str) -> None:
    monkeypatch.chdir(captures)
    with pytest.raises(InputError, match=message):
        main(["calibrate", "-o", "never.json", "fit.jsonl", *flags])
    assert not Path("never.json").exists()


def test_part_of_a_fitted_capture_cannot_validate(captures: Path, tmp_path: Path) -> None:
    meta, records = load_trace(captures / "fit.jsonl")
    with TraceWriter(tmp_path / "part.jsonl", meta) as writer:
        for record in records[40:60]:
            writer.write(record)
    with pytest.raises(
        InputError, match=r"--against .*part\.jsonl: has requests of fit\.jsonl, a trace of the model's fit"
    ):
        calibrate(captures, tmp_path / "model.json", "--against", str(tmp_path / "part.jsonl"))
