"""A model beside traffic of a known engine: pace, drift, TTFT, gauges, and a trace while it is written."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest

from sim.__main__ import main
from sim.latency.modelfile import Model, default_model, make_model, save_model
from sim.watch import modelwatch
from sim.watch import watch as command
from sim.watch.modelwatch import Bounds, Judgement, TtftRow, serve
from tracefile import BlockHash, Engine, InputError, Meta, Record, RequestId, TraceWriter, load_trace

BLOCK = 32
BLOCKS = 801


@pytest.fixture(autouse=True)
def _few_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelwatch, "MEMBERS", 2)
    monkeypatch.setattr(modelwatch, "EVERY_MS", 3.6e6)


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


def watched(
    folder: Path, trace: Path, model: Model, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, list[Judgement]]:
    save_model(model, folder / "model.json")
    code = main(["watch", str(trace), "--latency-model", str(folder / "model.json"), "--json", *flags])
    return code, [msgspec.json.decode(line, type=Judgement) for line in capsys.readouterr().out.splitlines()]


def test_the_own_model_of_an_engine_keeps_its_pace(
    tmp_path: Path, served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """319 of 320 requests: the last arrived when not all that were there had ended."""
    trace = write(tmp_path / "t.jsonl", *served)
    code, [found] = watched(tmp_path, trace, engine_model(), capsys)
    assert (code, found.requests, found.drifted, found.allowed) == (0, 319, False, (0.9524, 1.05))
    assert (found.pace, found.outside) == (Bounds(1.0, 1.0, 1.0), False)
    # A prompt of 2,629 tokens takes 93.575 ms cold and 19.95 ms behind 80 of its blocks; 8 of 319 were cold.
    assert [(row.level, row.seen, row.predicted.middle) for row in found.ttft] == [
        ("p50", 19.95, 19.95),
        ("p90", 19.95, 19.95),
        ("p99", 93.575, 93.575),
    ]
    assert found.notes == []


@pytest.mark.parametrize(
    ("low", "high", "uncertain"),
    [(0.98, 1.02, False), (0.9, 1.12, True), (None, None, True)],  # known to 2 % where 5 % counts; to 12 %; not at all
)
def test_a_pace_that_is_known_worse_than_its_range_shows_no_drift(
    low: float | None, high: float | None, uncertain: bool
) -> None:
    pace = None if low is None else Bounds(1.0, low, high)
    assert command.is_uncertain(Judgement(allowed=(0.9524, 1.05), pace=pace)) is uncertain


def test_a_band_wider_than_a_gates_limit_is_not_within() -> None:
    bands = (Bounds(100.0, 96.0, 104.0), Bounds(100.0, 50.0, 150.0), Bounds(80.0, 78.0, 82.0))
    rows = [TtftRow(level="p50", seen=100.0, predicted=band) for band in bands]
    *_, near, wide, far = command.describe(Judgement(allowed=(0.95, 1.05), ttft=rows))
    assert near.endswith("within")
    assert wide.endswith("too uncertain to say")
    assert far.endswith("outside")


def test_one_engine_of_several_is_judged_by_its_own_requests(
    tmp_path: Path, served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same load on two engines at once: one queue for both would serve the second behind the first's."""
    meta, records = served

    def went_to(upstream: str | None, record: Record, **changes: Any) -> Record:
        name = RequestId(f"{record.request_id}-{upstream}")
        return msgspec.structs.replace(record, request_id=name, upstream=upstream, **changes)

    both = [went_to(upstream, record) for record in records for upstream in ("http://a:1", "http://b:1")]
    refused = went_to(None, records[40], status="error", ttft_ms=None, itl_ms=[], itl_tokens=[], output_tokens=None)
    trace = write(tmp_path / "t.jsonl", meta, [*both[:81], refused, *both[81:]])
    with pytest.raises(InputError, match="requests of http://a:1 and http://b:1; expected --upstream"):
        watched(tmp_path, trace, engine_model(), capsys)
    code, [found] = watched(tmp_path, trace, engine_model(), capsys, "--upstream", "http://b:1")
    assert (code, found.requests, found.pace) == (0, 319, Bounds(1.0, 1.0, 1.0))
    assert [(row.level, row.seen, row.predicted.middle) for row in found.ttft][::2] == [
        ("p50", 19.95, 19.95),
        ("p99", 93.575, 93.575),
    ]


def test_a_model_that_is_too_slow_by_a_fifth_has_drifted(
    tmp_path: Path, served: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelwatch, "EVERY_MS", 50e3)
    code, judgements = watched(tmp_path, write(tmp_path / "t.jsonl", *served), engine_model(1.2), capsys)
    assert code == 1
    assert [one.drifted for one in judgements] == [False, False, True, True, True]
    last = judgements[-1]
    assert last.pace is not None
    assert last.outside
    assert last.pace.middle == pytest.approx(1 / 1.2, abs=1e-3)
    assert last.ttft[0].predicted.middle == pytest.approx(1.2 * 19.95, rel=0.02)
    assert "  the model has drifted since 00:00:50 UTC; scale it (sim fit --pace-from) or fit it again" in (
        command.describe(last)
    )


@pytest.mark.parametrize(
    "case",
    [
        ({"cached_tokens": None}, {}, "cached tokens: most records have none; nothing is judged (tap --inject usage)"),
        ({"itl_ms": [], "itl_tokens": []}, {}, " intervals between tokens; expected 100 for a pace, of "),
        ({}, {"max_num_seqs": 64}, "of another engine than the trace (max_num_seqs 64, fitted under 32)"),
    ],
)
def test_what_cannot_be_told_is_a_note(
    tmp_path: Path, served: Any, case: tuple[dict[str, Any], dict[str, Any], str], capsys: pytest.CaptureFixture[str]
) -> None:
    (meta, records), (changes, engine, note) = served, case
    meta = msgspec.structs.replace(meta, engine=msgspec.structs.replace(meta.engine, **engine))
    records = [msgspec.structs.replace(record, **changes) for record in records[:60]]
    _, [found] = watched(tmp_path, write(tmp_path / "t.jsonl", meta, records), engine_model(), capsys)
    assert note in "".join(found.notes)


def test_after_a_pause_the_traffic_before_it_is_forgotten(
    tmp_path: Path, served: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modelwatch, "EVERY_MS", 1e9)
    meta, records = served
    later = [
        msgspec.structs.replace(one, request_id=RequestId(f"{one.request_id}b"), arrival_ms=one.arrival_ms + 3.6e6)
        for one in records[:100]
    ]
    trace = write(tmp_path / "t.jsonl", meta, [*records, *later])
    _, [found] = watched(tmp_path, trace, engine_model(), capsys)
    assert found.requests == 99
    assert found.from_ms == pytest.approx(3.6e6)


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
        monkeypatch.setattr(command, "wait_for_more", wait)
        monkeypatch.setattr("os.nice", lambda by: by)
        monkeypatch.setattr(command, "REST", 0.0)
        monkeypatch.setattr(modelwatch, "EVERY_MS", 60e3)
        code, judgements = watched(tmp_path, tmp_path / "t.jsonl.zst", engine_model(), capsys, "--follow")
    assert (code, [one.requests for one in judgements]) == (0, [159, 319])


def test_the_last_judgement_is_gauges(free_port: int) -> None:
    gauges = serve(f"127.0.0.1:{free_port}")

    def told() -> list[str]:
        with urlopen(f"http://127.0.0.1:{free_port}/metrics") as answer:
            return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]

    assert told() == []
    rows = [TtftRow(level="p50", seen=20.0, predicted=Bounds(25.0, 24.0, None))]
    pace = Bounds(0.8, 0.79, 0.81)
    gauges.judgement = Judgement(allowed=(0.95, 1.05), pace=pace, drifted=True, requests=319, ttft=rows)
    assert told() == [
        "kvtape_watch_drifted 1.0",
        'kvtape_watch_pace{bound="middle"} 0.8',
        'kvtape_watch_pace{bound="low"} 0.79',
        'kvtape_watch_pace{bound="high"} 0.81',
        'kvtape_watch_allowed_pace{bound="low"} 0.95',
        'kvtape_watch_allowed_pace{bound="high"} 1.05',
        "kvtape_watch_requests 319.0",
        'kvtape_watch_ttft_seconds{bound="seen",quantile="p50"} 0.02',
        'kvtape_watch_ttft_seconds{bound="middle",quantile="p50"} 0.025',
        'kvtape_watch_ttft_seconds{bound="low",quantile="p50"} 0.024',
    ]
    with pytest.raises(InputError, match=f"--metrics 127.0.0.1:{free_port}: .*; expected HOST:PORT, free on this"):
        serve(f"127.0.0.1:{free_port}")
    with pytest.raises(InputError, match="--metrics 9105x: "):
        serve("9105x")


def test_bad_input_is_one_line(tmp_path: Path, served: Any, capsys: pytest.CaptureFixture[str]) -> None:
    meta, records = served
    other = msgspec.structs.replace(meta, block_size=48)
    with pytest.raises(InputError, match="block size 32: not a multiple of the trace's 48"):
        watched(tmp_path, write(tmp_path / "t.jsonl", other, records[:40]), engine_model(), capsys)


def test_a_trace_of_requests_without_an_end_is_no_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t.jsonl", Meta(source="tap", block_size=BLOCK), list(asked(2)))
    with pytest.raises(InputError, match=r"t\.jsonl: no request with an arrival and an end; expected a capture"):
        watched(tmp_path, trace, engine_model(), capsys)
