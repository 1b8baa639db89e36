"""``sim calibrate`` as a command: fit and validation in one go, on captures of an engine whose parameters are known."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from sim.__main__ import main
from sim.forecast.calibrate import held_out_rows
from sim.latency.modelfile import default_model, load_model
from sim.latency.verdicts import read_verdicts
from tracefile import Engine, InputError, Meta, TraceWriter, load_trace, trace_digest

STEP = ("--max-num-seqs", "256", "--max-num-batched-tokens", "2048", "--no-async-scheduling")
QUICK = ("--api-server", "parallel", "--term", "none", "--bootstrap", "20", "--members", "6")


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory, synthetic: ModuleType) -> Path:
    """Two captures of one engine."""
    folder = tmp_path_factory.mktemp("calibrate")
    model = default_model()
    told = Engine(name="vllm", version="0.9", block_size=32, num_gpu_blocks=4096, enable_prefix_caching=True)
    for name, seed in (("fit", 1), ("gate", 2)):
        records = synthetic.capture(synthetic.calibration(seed, prompts=30, mixed=60), model, seed=seed)
        with TraceWriter(folder / f"{name}.jsonl", Meta(source="tap", block_size=32, engine=told)) as writer:
            for record in records:
                writer.write(record)
    return folder


def calibrate(captures: Path, output: Path, *flags: str) -> int:
    return main(["calibrate", str(captures / "fit.jsonl"), "-o", str(output), *STEP, *QUICK, *flags])


def test_it_fits_and_then_validates_on_the_gate(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, gate = tmp_path / "model.json", captures / "gate.jsonl"
    calibrate(captures, model, "--against", str(gate), "--json")
    printed = capsys.readouterr()
    result: dict[str, Any] = json.loads(printed.out)[str(gate)]
    assert result["pairs"]["predicted"]["joined"] == 120
    assert result["pairs"]["predicted"]["cohorts"]["all"]["cached"]["exact_share"] == 1.0
    assert result["forecasts"]["predicted"]["members"] == 6
    assert "TTFT of predicted against captured" in printed.err
    fitted = load_model(model)
    assert fitted.diagnostics["engine"] == {"name": "vllm", "version": "0.9"}
    assert [one.digest for one in fitted.fitted_on] == [trace_digest(captures / "fit.jsonl")]
    (kept,) = read_verdicts(model, fitted)
    assert (kept.trace, kept.trace_digest, kept.gates) == (
        "gate.jsonl",
        trace_digest(gate),
        len(result["gates"]) - len(kept.untested),
    )
    told = [len(kept.failed), len(kept.uncertain)]
    assert told == [sum(not one["passed"] and one["uncertain"] == open_ for one in result["gates"]) for open_ in (0, 1)]
    # The two commands that it stands for give the same.
    alone = tmp_path / "alone.json"
    fit_flags, gate_flags = QUICK[:6], QUICK[6:]
    assert main(["fit", str(captures / "fit.jsonl"), "-o", str(alone), *STEP, *fit_flags]) == 0
    assert alone.read_bytes() == model.read_bytes()
    capsys.readouterr()
    engine = (*STEP, "--bootstrap", "20", "--json")
    main(["validate", str(gate), "--latency-model", str(alone), *engine, *gate_flags])
    assert json.loads(capsys.readouterr().out) == result


def test_one_capture_alone_lends_a_third_of_its_sessions(
    captures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = captures / "fit.jsonl", tmp_path / "model.json"
    calibrate(captures, model, "--json", "--seed", "3")
    printed = capsys.readouterr()
    rows = held_out_rows(path, 3)
    assert f"{len(rows)} requests of {path}, a third of its sessions, which the fit left out" in printed.err
    assert "a weaker test than another capture (--against)" in printed.err
    pair = json.loads(printed.out)[str(path)]["pairs"]["predicted"]
    assert (pair["joined"], pair["unmatched_truth"], pair["unmatched_other"]) == (len(rows), 0, 0)
    assert pair["cohorts"]["all"]["cached"]["exact_share"] == 1.0
    fitted = load_model(model)
    assert (fitted.fitted_on[0].digest, fitted.fitted_on[0].requests) == (trace_digest(path), 120 - len(rows))
    assert fitted.diagnostics["requests"] == 120 - len(rows)
    for name, parameter in default_model().parameters.items():
        got = fitted.parameters[name]
        near = got.value == pytest.approx(parameter.value, rel=0.05)
        assert near or (got.low or 0.0) <= parameter.value <= (got.high or 0.0), name
    with pytest.raises(InputError, match="fitted on this very trace"):
        main(["validate", str(path), "--latency-model", str(model)])


def test_what_is_held_out_follows_from_the_seed_and_keeps_sessions_whole(captures: Path) -> None:
    path = captures / "fit.jsonl"
    rows = held_out_rows(path, 0)
    assert (rows == held_out_rows(path, 0)).all()
    assert not np.array_equal(rows, held_out_rows(path, 1))
    _, records = load_trace(path)
    inside, outside = ({records[row].session_id for row in some} for some in (rows, set(range(120)) - set(rows)))
    assert not inside & outside
    assert 0.2 < len(inside) / len(inside | outside) < 0.47


def test_times_of_held_out_requests_teach_nothing(captures: Path, tmp_path: Path) -> None:
    """Twice as long gaps of a held-out request alone leave the parameters as they were."""
    meta, records = load_trace(captures / "fit.jsonl")
    rows = held_out_rows(captures / "fit.jsonl", 0)
    last = max(rows, key=lambda row: records[row].arrival_ms or 0.0)
    slow = msgspec.structs.replace(
        records[last], itl_ms=[*records[last].itl_ms[:-1], 2.0 * records[last].itl_ms[-1]], e2e_ms=1e6
    )
    with TraceWriter(tmp_path / "fit.jsonl", meta) as writer:
        for place, record in enumerate(records):
            writer.write(slow if place == last else record)
    for folder, name in ((captures, "a"), (tmp_path, "b")):
        calibrate(folder, tmp_path / f"{name}.json", "--no-default-gates")
    one, other = (load_model(tmp_path / f"{name}.json").parameters for name in "ab")
    assert one == other


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--against", "fit.jsonl"), "--against fit.jsonl: the same trace as one to fit"),
        (("gate.jsonl",), "--against: not given; expected a capture to validate on, or one CAPTURE alone"),
        (("--against", "gate.jsonl", "again.jsonl", "--html", "p.html"), "--html: one page is of one capture"),
        (("--against", "gate.jsonl", "--members", "0"), "--members 0: expected 1 or more"),
    ],
)
def test_refusals(captures: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], said: str) -> None:
    monkeypatch.chdir(captures)
    with pytest.raises(InputError, match=said):
        main(["calibrate", "-o", "never.json", "fit.jsonl", *flags])
    assert not Path("never.json").exists()


def test_a_part_of_a_capture_to_fit_is_no_capture_to_validate_on(captures: Path, tmp_path: Path) -> None:
    meta, records = load_trace(captures / "fit.jsonl")
    with TraceWriter(tmp_path / "part.jsonl", meta) as writer:
        for record in records[40:60]:
            writer.write(record)
    with pytest.raises(InputError, match=r"--against .*part\.jsonl: has requests of .*fit\.jsonl, one to fit"):
        calibrate(captures, tmp_path / "model.json", "--against", str(tmp_path / "part.jsonl"))


def test_too_few_sessions_to_hold_some_out_are_refused(captures: Path, tmp_path: Path) -> None:
    meta, records = load_trace(captures / "fit.jsonl")
    with TraceWriter(tmp_path / "fit.jsonl", meta) as writer:
        for record in records:
            writer.write(msgspec.structs.replace(record, session_id="only"))
    with pytest.raises(InputError, match="too few sessions to hold some out"):
        calibrate(tmp_path, tmp_path / "model.json")
