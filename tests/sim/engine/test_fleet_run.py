"""``sim run`` with a fleet."""

from pathlib import Path

import pytest

from sim.__main__ import main
from sim.latency.modelfile import default_model, save_model
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError

TRACE = str(Path(__file__).parents[1] / "data" / "six_requests.jsonl")


@pytest.fixture
def model(tmp_path: Path) -> str:
    save_model(default_model(), tmp_path / "model.json")
    return str(tmp_path / "model.json")


def run(model: str, output: Path, *flags: str) -> bytes:
    assert main(["run", TRACE, "--latency-model", model, "-o", str(output), "--overwrite", *flags]) == 0
    return output.read_bytes()


def test_single_replica_equals_no_fleet(model: str, tmp_path: Path) -> None:
    assert run(model, tmp_path / "a.jsonl") == run(model, tmp_path / "b.jsonl", "--replicas", "1")


def test_fleet_run_is_reproducible(model: str, tmp_path: Path) -> None:
    flags = ("--replicas", "3", "--route", "prefix", "--replay-sessions")
    first = run(model, tmp_path / "a.jsonl", *flags)
    assert first == run(model, tmp_path / "b.jsonl", *flags)
    meta, records = load_trace(tmp_path / "a.jsonl")
    assert meta.extra["fleet"]["route"] == "prefix"
    assert {record.upstream for record in records} <= {"0", "1", "2"}
    assert len(records) == len(load_trace(Path(TRACE))[1])


def test_captured_route(model: str, tmp_path: Path) -> None:
    run(model, tmp_path / "a.jsonl", "--replicas", "3", "--route", "session")
    capture = tmp_path / "a.jsonl"
    flags = ["--latency-model", model, "-o", str(tmp_path / "b.jsonl"), "--route", "captured"]
    assert main(["run", str(capture), *flags]) == 0
    before, after = (
        {record.request_id: record.upstream for record in load_trace(path)[1]}
        for path in (capture, tmp_path / "b.jsonl")
    )
    assert before == after


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--route", "prefix"], "--route: without --replicas; expected both"),
        (["--route", "captured"], "names no upstream"),
    ],
)
def test_fleet_flags_without_a_fleet(model: str, tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        main(["run", TRACE, "--latency-model", model, "-o", str(tmp_path / "x.jsonl"), *flags])
    assert message in str(caught.value)
    assert not (tmp_path / "x.jsonl").exists()
