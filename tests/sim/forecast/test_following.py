"""A model beside traffic of a known engine: pace, drift, the alarm, and a trace while it is written."""

from collections.abc import Iterator
from dataclasses import replace
from math import exp, hypot, log, sqrt
from pathlib import Path
from typing import Any

import msgspec
import pytest

from report.grid.points import Span
from sim.__main__ import main
from sim.fit.pace import Pace
from sim.forecast import following
from sim.forecast.following import LEAST, Judgement, ModelWatch, allowed_reach, is_outside
from sim.latency.modelfile import Model, default_model, make_model, save_model
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Engine, Meta, Record, RequestId

BLOCK = 32
BLOCKS = 801


@pytest.fixture(autouse=True)
def _rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "EVERY_MS", 3.6e6)


def engine_model(speed: float = 1.0) -> Model:
    model = default_model()
    costs = {name: one.value * speed for name, one in model.parameters.items()}
    return make_model(costs, replace(model.engine, num_gpu_blocks=BLOCKS))


def asked(requests: int = 320) -> Iterator[Record]:
    """Requests on eight prefixes of 80 blocks in turn, 640 in all: a cache of 800 holds them, one of 400 none."""
    for number in range(requests):
        prefix = [BlockHash(1000 * (number % 8) + block) for block in range(80)]
        own = [BlockHash(10**6 + 100 * number + block) for block in range(2)]
        yield Record(
            request_id=RequestId(f"r{number}"),
            arrival_ms=number * 750.0,
            stream=True,
            prompt_tokens=82 * BLOCK + 5,
            output_tokens=20,
            block_hashes=prefix + own,
        )


def write(path: Path, meta: Meta, records: list[Record]) -> Path:
    with TraceWriter(path, meta) as writer:
        for record in records:
            writer.write(record)
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Meta, list[Record]]:
    """The requests as an engine of ``engine_model`` serves them, without noise, in the order of their ends."""
    folder = tmp_path_factory.mktemp("served")
    engine = Engine(name="vllm", block_size=BLOCK, num_gpu_blocks=BLOCKS)
    meta = Meta(source="tap", block_size=BLOCK, engine=engine, epoch_unix_ns=0)
    save_model(engine_model(), folder / "engine.json")
    argv = ["run", str(write(folder / "asked.jsonl", meta, list(asked()))), "--no-noise"]
    assert main([*argv, "--latency-model", str(folder / "engine.json"), "-o", str(folder / "served.jsonl")]) == 0
    predicted, records = load_trace(folder / "served.jsonl")
    ordered = sorted(records, key=lambda one: one.end_ms() or 0.0)
    return msgspec.structs.replace(predicted, source="tap", epoch_unix_ns=0), ordered


def watched(trace: Path, model: Model, upstream: str | None = None) -> list[Judgement]:
    """Judge a trace that is whole as it was judged while it grew, and once more at its end."""
    save_model(model, trace.with_name("model.json"))
    watch, found = ModelWatch(trace, trace.with_name("model.json"), {}, upstream), list[Judgement]()
    meta, records = load_trace(trace)
    for record in records:
        watch.take(record, meta)
        if watch.is_due:
            found.append(watch.judge())
    return [*found, watch.judge()]


def test_the_own_model_of_an_engine_keeps_its_pace(tmp_path: Path, served: Any) -> None:
    """319 of 320 requests: the last arrived when not all that were there had ended."""
    trace = write(tmp_path / "t.jsonl", *served)
    [found] = watched(trace, engine_model())
    assert (found.requests, found.drifted, found.allowed) == (319, False, (0.9524, 1.05))
    assert (found.pace, found.outside) == (Span(middle=1.0, low=1.0, high=1.0), False)
    assert found.notes == []


@pytest.mark.parametrize(
    ("low", "high", "uncertain"),
    [(0.98, 1.02, False), (0.9, 1.12, True), (None, None, True)],  # known to 2 % where 5 % counts; to 12 %; not at all
)
def test_a_pace_that_is_known_worse_than_its_range_shows_no_drift(
    low: float | None, high: float | None, uncertain: bool
) -> None:
    pace = None if low is None or high is None else Span(middle=1.0, low=low, high=high)
    assert following.is_uncertain(Judgement(allowed=(0.9524, 1.05), pace=pace)) is uncertain


def test_one_engine_of_several_is_judged_by_its_own_requests(tmp_path: Path, served: Any) -> None:
    """The same load on two engines at once: one queue for both would serve the second behind the first's."""
    meta, records = served

    def went_to(upstream: str | None, record: Record, **changes: Any) -> Record:
        name = RequestId(f"{record.request_id}-{upstream}")
        return msgspec.structs.replace(record, request_id=name, upstream=upstream, **changes)

    both = [went_to(upstream, record) for record in records for upstream in ("http://a:1", "http://b:1")]
    refused = went_to(None, records[40], status="error", ttft_ms=None, itl_ms=[], itl_tokens=[], output_tokens=None)
    trace = write(tmp_path / "t.jsonl", meta, [*both[:81], refused, *both[81:]])
    with pytest.raises(InputError, match="requests of http://a:1 and http://b:1; expected --upstream"):
        watched(trace, engine_model())
    [found] = watched(trace, engine_model(), "http://b:1")
    assert (found.requests, found.pace) == (319, Span(middle=1.0, low=1.0, high=1.0))


def test_a_model_that_is_too_slow_by_a_fifth_has_drifted(
    tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "EVERY_MS", 50e3)
    judgements = watched(write(tmp_path / "t.jsonl", *served), engine_model(1.2))
    assert [one.drifted for one in judgements] == [False, False, True, True, True]
    last = judgements[-1]
    assert last.pace is not None
    assert last.outside
    assert last.pace.middle == pytest.approx(1 / 1.2, abs=1e-3)
    assert "  the model has drifted; scale it (sim calibrate --pace-from) or fit it again" in following.describe(last)


@pytest.mark.parametrize(
    "case",
    [
        ({"cached_tokens": None}, {}, "cached tokens: most records have none; nothing is judged (tap --inject usage)"),
        ({"itl_ms": [], "itl_tokens": []}, {}, " intervals between tokens; expected 100 for a pace, of "),
        ({}, {"max_num_seqs": 64}, "of another engine than the trace (max_num_seqs 64, fitted under 32)"),
    ],
)
def test_what_cannot_be_told_is_a_note(
    tmp_path: Path, served: Any, case: tuple[dict[str, Any], dict[str, Any], str]
) -> None:
    (meta, records), (changes, engine, note) = served, case
    meta = msgspec.structs.replace(meta, engine=msgspec.structs.replace(meta.engine, **engine))
    records = [msgspec.structs.replace(record, **changes) for record in records[:60]]
    [found] = watched(write(tmp_path / "t.jsonl", meta, records), engine_model())
    assert note in "".join(found.notes)


def test_a_trace_is_followed_while_it_grows(
    tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the requests are there at first, half come while it waits; then its parent goes away."""
    meta, records = served
    waits: list[float] = []
    with TraceWriter(tmp_path / "t.jsonl.zst", meta) as writer:

        def add(count: int) -> None:
            for record in records[len(waits) * 160 :][:count]:
                writer.write(record)
            writer.flush()

        def wait(seconds: float) -> bool:
            waits.append(seconds)
            if len(waits) == 1:
                add(160)
            return len(waits) < 2

        add(160)
        monkeypatch.setattr(following, "wait_for_more", wait)
        monkeypatch.setattr("os.nice", lambda by: by)
        monkeypatch.setattr(following, "EVERY_MS", 60e3)
        save_model(engine_model(), tmp_path / "model.json")
        model = ["--latency-model", str(tmp_path / "model.json")]
        assert main(["validate", str(tmp_path / "t.jsonl.zst"), *model, "--follow", "--json"]) == 0
    judgements = [msgspec.json.decode(line, type=Judgement) for line in capsys.readouterr().out.splitlines()]
    assert [one.requests for one in judgements] == [159, 319]


@pytest.mark.parametrize(
    ("log_sd", "freedom", "score"),
    [(0.03, 0, 1.959964), (0.03, 1, 12.706205), (0.03, 4, 2.776445)],
)
def test_a_models_range_is_students_t_of_its_captures(log_sd: float, freedom: int, score: float) -> None:
    model = msgspec.structs.replace(default_model(), drift_log_sd=log_sd, drift_freedom=freedom)
    assert allowed_reach(model) == pytest.approx(score * log_sd, rel=1e-6)


def test_a_drift_below_five_per_cent_is_never_told() -> None:
    assert allowed_reach(default_model()) == LEAST == log(1.05)


@pytest.mark.parametrize(("beyond", "outside"), [(0.999, False), (1.001, True)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_pace_is_outside_by_more_than_range_and_measurement_together(
    beyond: float, sign: int, *, outside: bool
) -> None:
    """Eight blocks of spread 0.04: the mean's error is t(7) · 0.04 / 3."""
    measured = 2.364624 * 0.04 / sqrt(9)
    factor = exp(sign * beyond * hypot(0.1, measured))
    assert is_outside(Pace(factor, 0.04, 7, 1_000), 0.1) is outside
