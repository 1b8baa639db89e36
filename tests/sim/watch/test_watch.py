"""A model beside traffic of a known engine: pace, drift, hits by size, and a trace while it is written."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from measure.modelstate import (
    Estimate,
    LivePace,
    ModelState,
    TtftRow,
    decode_state,
    drift_sentence,
    is_pace_uncertain,
)
from sim.__main__ import main
from sim.latency.modelfile import Model, default_model, make_model, save_model
from sim.watch import watch as command
from sim.watch.modelwatch import ModelWatch, WatchConfig
from tracefile import BlockHash, Engine, InputError, Meta, Record, RequestId, TraceWriter, load_trace

BLOCK = 32
BLOCKS = 801


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


def watched(folder: Path, trace: Path, model: Model, *flags: str) -> tuple[int, ModelState]:
    save_model(model, folder / "model.json")
    state = folder / "state.json"
    argv = ["watch", str(trace), "--latency-model", str(folder / "model.json"), "--members", "2", "-o", str(state)]
    code = main([*argv, *(flags or ("--every", "1h"))])
    return code, decode_state(state.read_bytes())


def test_the_own_model_of_an_engine_keeps_its_pace(tmp_path: Path, served: Any) -> None:
    """319 of 320 requests: the last arrived when not all that were there had ended."""
    code, state = watched(tmp_path, write(tmp_path / "t.jsonl", *served), engine_model())
    assert (code, state.requests, state.drifted, state.allowed) == (0, 319, False, (0.9524, 1.05))
    assert state.pace is not None
    assert (state.pace.factor, state.pace.low, state.pace.high, state.pace.outside) == (1.0, 1.0, 1.0, False)
    # A prompt of 2,629 tokens takes 93.575 ms cold and 19.95 ms behind 80 of its blocks; 8 of 319 were cold.
    seen = {(row.cohort, row.level): (row.n, row.seen_ms, row.predicted.middle) for row in state.ttft}
    assert seen["all", "p50"] == (319, 19.95, 19.95)
    assert seen["all", "p99"] == (319, 93.575, 93.575)
    assert seen["warm", "p99"] == (311, 19.95, 19.95)
    assert ("cold", "p50") not in seen  # of 8 requests nothing is judged


@pytest.mark.parametrize(
    ("low", "high", "uncertain"),
    [(0.98, 1.02, False), (0.9, 1.12, True), (None, None, True)],  # known to 2 % where 5 % counts; to 12 %; not at all
)
def test_a_pace_that_is_known_worse_than_its_range_shows_no_drift(
    low: float | None, high: float | None, uncertain: bool
) -> None:
    pace = None if low is None else LivePace(factor=1.0, low=low, high=high or 0.0, intervals=9, outside=False)
    state = ModelState(model="m", allowed=(0.9524, 1.05), pace=pace)
    assert is_pace_uncertain(state) is uncertain


def test_a_band_wider_than_a_gates_limit_is_not_within() -> None:
    rows = [
        TtftRow(cohort="all", level="p50", n=40, seen_ms=100.0, predicted=Estimate(100.0, *ends), at_pace=None)
        for ends in ((96.0, 104.0), (50.0, 150.0))
    ]
    said = command.describe(ModelState(model="m", allowed=(0.95, 1.05), ttft=rows))
    assert said[-2].endswith("within")
    assert said[-1].endswith("too uncertain to say")


def test_hits_and_times_at_half_and_twice_the_cache(tmp_path: Path, served: Any) -> None:
    """311 requests hit 80 of their 82 blocks where 640 fit; none does where 400 do: the prefixes come in turn."""
    _, state = watched(tmp_path, write(tmp_path / "t.jsonl", *served), engine_model())
    rate = 311 * 80 * BLOCK / (319 * (82 * BLOCK + 5))
    sizes = {row.cache: (row.num_gpu_blocks, row.hit_rate, row.ttft["p50"].middle) for row in state.caches}
    assert sizes == {
        "half": (401, 0.0, 93.575),
        "today": (801, pytest.approx(rate, abs=1e-5), 19.95),
        "twice": (1601, pytest.approx(rate, abs=1e-5), 19.95),
    }
    assert state.reported_hit_rate == pytest.approx(rate, abs=1e-5)


def test_upstreams_are_engines_of_their_own(tmp_path: Path, served: Any) -> None:
    """The same load on two engines at once: one queue or one cache for both would serve the second from the first's."""
    meta, records = served

    def went_to(upstream: str | None, record: Record, **changes: Any) -> Record:
        name = RequestId(f"{record.request_id}-{upstream}")
        return msgspec.structs.replace(record, request_id=name, upstream=upstream, **changes)

    both = [went_to(upstream, record) for record in records for upstream in ("http://a:1", "http://b:1")]
    refused = went_to(None, records[40], status="error", ttft_ms=None, itl_ms=[], itl_tokens=[], output_tokens=None)
    trace = write(tmp_path / "t.jsonl", meta, [*both[:81], refused, *both[81:]])
    code, state = watched(tmp_path, trace, engine_model())
    assert (code, state.requests, state.pace and state.pace.factor) == (0, 2 * 319, 1.0)
    assert state.notes == ["2 engines, each by its own requests; settings as of one"]
    # To the digit as of one engine alone: the tests above.
    seen = {(row.cohort, row.level): (row.n, row.seen_ms, row.predicted.middle) for row in state.ttft}
    assert (seen["all", "p50"], seen["all", "p99"]) == ((2 * 319, 19.95, 19.95), (2 * 319, 93.575, 93.575))
    rate = 311 * 80 * BLOCK / (319 * (82 * BLOCK + 5))
    sizes = {row.cache: (row.hit_rate, row.ttft["p50"].middle) for row in state.caches}
    warm = (pytest.approx(rate, abs=1e-5), 19.95)
    assert sizes == {"half": (0.0, 93.575), "today": warm, "twice": warm}


def test_a_model_that_is_too_slow_by_a_fifth_is_told_once(
    tmp_path: Path, served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, state = watched(tmp_path, write(tmp_path / "t.jsonl", *served), engine_model(1.2), "--every", "50s")
    assert code == 1
    assert state.pace is not None
    assert state.pace.factor == pytest.approx(1 / 1.2, abs=1e-3)
    assert (state.pace.outside, state.drifted) == (True, True)
    said = drift_sentence(state)
    assert said is not None
    assert said.startswith("the model has drifted: steps take 0.83 (0.83 to 0.83) of its time since 00:00:50 UTC")
    assert capsys.readouterr().err.count("the model has drifted") == 1
    # At the live pace the forecast is right again.
    row = next(row for row in state.ttft if (row.cohort, row.level) == ("all", "p50"))
    assert row.seen_ms == 19.95
    assert row.predicted.middle == pytest.approx(1.2 * 19.95, rel=0.02)
    assert row.at_pace is not None
    assert row.at_pace.middle == pytest.approx(19.95, rel=0.002)


def test_a_trace_without_cached_tokens_is_judged_by_its_hashes(tmp_path: Path, served: Any) -> None:
    meta, records = served
    untold = [msgspec.structs.replace(record, cached_tokens=None) for record in records]
    _, state = watched(tmp_path, write(tmp_path / "t.jsonl", meta, untold), engine_model())
    assert state.pace is not None
    assert state.pace.factor == 1.0
    assert state.reported_hit_rate is None
    assert state.notes == ["cached tokens: most records have none; taken from block hashes, at the cache's size"]


@pytest.mark.parametrize(
    ("changes", "engine", "notes"),
    [
        (
            {"cached_tokens": None},
            {"num_gpu_blocks": None},
            ["cached tokens: most records have none, nor is the cache's size known; nothing is judged (vLLM: ", "--e"],
        ),
        ({}, {"num_gpu_blocks": None}, ["other cache sizes: the trace does not tell num_gpu_blocks; give "]),
        ({"block_hashes": None}, {}, []),
        (
            {"cached_tokens": 0},
            {"enable_prefix_caching": False},
            ["other cache sizes: the engine's prefix caching is off"],
        ),
        (
            {"stream": False, "ttft_ms": None, "itl_ms": [], "itl_tokens": []},
            {},
            ["TTFT: no streamed request arrived and ended in the time"],
        ),
        ({"concurrency": 2}, {}, ["50% of requests in flight are not in the trace (sampled?): the pace is too high"]),
        ({}, {"max_num_seqs": 64}, ["of another engine than the trace (max_num_seqs 64, fitted under 32)"]),
    ],
)
def test_what_cannot_be_told_is_a_note(
    tmp_path: Path, served: Any, changes: dict[str, Any], engine: dict[str, Any], notes: list[str]
) -> None:
    meta, records = served
    meta = msgspec.structs.replace(meta, engine=msgspec.structs.replace(meta.engine, **engine))
    records = [msgspec.structs.replace(record, **changes) for record in records[:60]]
    _, state = watched(tmp_path, write(tmp_path / "t.jsonl", meta, records), engine_model())
    assert "".join(notes) in "".join(state.notes)


def test_after_a_pause_the_traffic_before_it_is_forgotten(tmp_path: Path, served: Any) -> None:
    meta, records = served
    later = [
        msgspec.structs.replace(one, request_id=RequestId(f"{one.request_id}b"), arrival_ms=one.arrival_ms + 3.6e6)
        for one in records[:100]
    ]
    _, state = watched(tmp_path, write(tmp_path / "t.jsonl", meta, [*records, *later]), engine_model())
    assert (state.requests, len(state.paces)) == (99, 1)
    assert state.from_ms == pytest.approx(3.6e6)


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
        code, state = watched(tmp_path, tmp_path / "t.jsonl.zst", engine_model(), "--follow", "--every", "1m")
    assert (code, state.requests) == (0, 319)
    told = capsys.readouterr()
    assert told.out.count("requests since") == 2
    assert told.err.splitlines() == [
        f"{tmp_path / 't.jsonl.zst'}: 160 requests read, until 1970-01-01 00:01 UTC; waiting for more"
    ]


def test_a_trace_that_grows_at_every_look_is_told_once(
    tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meta, records = served
    left = iter(records)
    with TraceWriter(tmp_path / "t.jsonl", meta) as writer:

        def wait(seconds: float) -> bool:
            record = next(left)
            writer.write(record)
            writer.flush()
            return record is not records[130]

        monkeypatch.setattr(command, "wait_for_more", wait)
        monkeypatch.setattr("os.nice", lambda by: by)
        watched(tmp_path, tmp_path / "t.jsonl", engine_model(), "--follow", "--every", "1m")
    assert capsys.readouterr().err.count("waiting for more") == 1


def test_a_followed_trace_that_rests_is_told_once_and_so_is_the_one_under_another_key(
    tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meta, records = served
    waits: list[float] = []
    with TraceWriter(tmp_path / "t.jsonl", meta) as writer:

        def wait(seconds: float) -> bool:
            waits.append(seconds)
            if len(waits) == 5:
                for record in records[160:]:
                    writer.write(record)
                writer.flush()
            if len(waits) == 10:  # SIGHUP: the tap goes on under another key
                (tmp_path / "t-k0123abcd-000001.jsonl.part").write_text("")
                os.utime(tmp_path / "t.jsonl", ns=(0, 0))
            return len(waits) < 200

        for record in records[:160]:
            writer.write(record)
        writer.flush()
        monkeypatch.setattr(command, "wait_for_more", wait)
        monkeypatch.setattr("os.nice", lambda by: by)
        watched(tmp_path, tmp_path / "t.jsonl", engine_model(), "--follow", "--every", "1m")
    first, second = [line for line in capsys.readouterr().err.splitlines() if "waiting" in line]
    assert first.endswith("t.jsonl: 160 requests read, until 1970-01-01 00:01 UTC; waiting for more")
    assert ": 320 requests read, until " in second
    assert second.endswith("the tap goes on under another key in t-k0123abcd.jsonl, which needs its own watch")


def test_a_model_that_goes_away_is_told_and_used_on(tmp_path: Path, served: Any) -> None:
    meta, records = served
    save_model(engine_model(1.2), tmp_path / "m.json")
    config = WatchConfig(tmp_path / "t.jsonl", tmp_path / "m.json", {}, 6e5, 6e4, members=2, seed=0)
    watch = ModelWatch(config)
    for record in records:
        watch.take(record, meta)
    (tmp_path / "m.json").unlink()
    state = watch.judge()
    assert state.notes == ["m.json: cannot be read any more; the one read before is still used"]
    save_model(engine_model(), tmp_path / "m.json")
    state = watch.judge()
    assert (state.notes, state.pace and state.pace.factor) == ([], 1.0)


def test_bad_input_is_one_line_and_kept_in_the_state(tmp_path: Path, served: Any) -> None:
    meta, records = served
    other = msgspec.structs.replace(meta, block_size=48)
    with pytest.raises(InputError, match="block size 32: not a multiple of the trace's 48"):
        watched(tmp_path, write(tmp_path / "t.jsonl", other, records[:40]), engine_model())
    problem = decode_state((tmp_path / "state.json").read_bytes()).problem
    assert problem is not None
    assert problem.startswith("block size 32")


def test_a_trace_of_requests_without_an_end_is_no_capture(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", Meta(source="tap", block_size=BLOCK), list(asked(2)))
    with pytest.raises(InputError, match=r"t\.jsonl: no request with an arrival and an end; expected a capture"):
        watched(tmp_path, trace, engine_model())
