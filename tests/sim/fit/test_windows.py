"""Rolling fits of a known engine: a window at a time, an index, and a rerun that continues."""

from pathlib import Path

import msgspec
import pytest

from measure.fitindex import FittedWindow, read_windows, write_windows
from report.rolling.drift import make_page
from sim.__main__ import main
from sim.fit import windows as windows_module
from sim.fit.fitting import FitConfig, fit_records, fit_traces
from sim.fit.windows import Windows
from sim.latency.modelfile import load_model, save_model
from tests.sim.fit import knownengine
from tracefile import BlockHash, InputError, Meta, Record, RequestId, load_trace

PIECE_S = 120.0
NOON_NS = 1_763_812_800 * 10**9
"""2025-11-22, 12:00 UTC."""


def day(folder: Path, factors: list[float], seed: int = 1) -> Path:
    """Two minutes of sessions for each factor, which is the engine's slowness meanwhile."""
    engine, records, meta = knownengine.known_engine(), list[Record](), Meta()
    for number, factor in enumerate(factors):
        piece, own = folder / f"piece-{seed}-{number}.jsonl", 100 * seed + number
        meta, found = load_trace(
            knownengine.capture(piece, knownengine.sessions(own), knownengine.scaled(engine, factor), own)
        )
        for one in found:
            one.arrival_ms = (one.arrival_ms or 0.0) + 1e3 * PIECE_S * number
            one.block_hashes, one.output_block_hashes = (
                [BlockHash(block + 10**6 * number) for block in blocks or ()]
                for blocks in (one.block_hashes, one.output_block_hashes)
            )
            one.request_id, one.session_id = RequestId(f"{number}-{one.request_id}"), None
            one.parent_id = None
        records += found
    meta = msgspec.structs.replace(meta, epoch_unix_ns=NOON_NS)
    return knownengine.write(folder / f"day-{seed}.jsonl", meta, records)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lender, and a day of four windows: the engine is slower by 1.3 from the third on."""
    folder = tmp_path_factory.mktemp("windows")
    path = knownengine.capture(folder / "c.jsonl", knownengine.calibration(1), knownengine.known_engine(), 1)
    config = FitConfig((path,), folder / "m.json", {}, frontend="parallel", extra_terms=(), bootstrap=50)
    save_model(fit_traces(config).model, folder / "lender.json")
    day(folder, [1.0, 1.0, 1.3, 1.3])
    return folder


def test_a_rerun_fits_only_what_is_new_and_each_window_has_its_pace(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C comes in the third window; the same command then fits the last two."""
    fits, fitted, real = tmp_path / "fits", list[str](), fit_records

    def interrupted(*arguments: object) -> object:
        if len(fitted) == 2:
            fitted.append("interrupt")
            raise KeyboardInterrupt
        fitted.append("fit")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(windows_module, "fit_records", interrupted)
    argv = ["fit", str(folder / "day-1.jsonl"), "--window", "2m", "--bootstrap", "50", "-o", str(fits)]
    argv += ["--borrow-from", str(folder / "lender.json")]
    assert main(argv) == 130
    assert len(read_windows(fits)) == 2
    assert f"2 windows are in {fits}, the same command continues" in capsys.readouterr().out
    assert main(argv) == 0
    assert fitted == ["fit", "fit", "interrupt", "fit", "fit"]
    found = read_windows(fits)
    assert [one.window for one in found] == [f"2025-11-22T12:0{minute}:00Z" for minute in (0, 2, 4, 6)]
    assert [one.requests for one in found] == [120] * 4
    paces = [one.pace.value for one in found if one.pace is not None]
    assert paces == pytest.approx([1.0, 1.0, 1.3, 1.3], rel=0.04)
    for one in found:
        model = load_model(fits / (one.model or ""))
        assert {name: two.value for name, two in model.parameters.items()} == {
            name: two.value for name, two in one.parameters.items()
        }
        assert one.parameters["per_prefill_token_ms"].state == "borrowed"
    before = [one.errors["before"].median_abs for one in found[1:]]
    assert before[1] > 2 * max(before[0], before[2])  # of the model that does not know the engine of noon
    assert "2025-11-22T12:04:00Z: 120 requests: pace 1." in capsys.readouterr().out
    changes = make_page(found).changes
    assert {one.window for one in changes} == {"2025-11-22T12:04:00Z"}
    assert changes[0].number == "pace"


def test_windows_without_enough_traffic_say_why(folder: Path, tmp_path: Path) -> None:
    meta, records = load_trace(folder / "day-1.jsonl")
    few = [one for place, one in enumerate(records) if not 120 <= place < 235 and place < 360]
    trace = knownengine.write(tmp_path / "few.jsonl", meta, few)
    argv = ["fit", str(trace), "--window", "2m", "--bootstrap", "0", "-o", str(tmp_path / "fits")]
    assert main([*argv, "--borrow-from", str(folder / "lender.json")]) == 0
    found = read_windows(tmp_path / "fits")
    assert [one.status for one in found] == ["fitted", "skipped", "fitted"]
    assert (found[1].reason or "").startswith("only 5 requests have a TTFT and a prompt length; expected at least 20")
    assert "before" in found[2].errors


def test_the_first_window_lends_where_no_model_is_given(folder: Path, tmp_path: Path) -> None:
    argv = ["fit", str(folder / "day-1.jsonl"), "--window", "4m", "--bootstrap", "50", "-o", str(tmp_path / "fits")]
    assert main([*argv, "--api-server", "parallel", "--term", "none"]) == 0
    found = read_windows(tmp_path / "fits")
    assert [one.lender for one in found] == ["model-2025-11-22T120000Z.json"] * 2
    assert [one.pace.value for one in found if one.pace] == pytest.approx([1.0, 1.3], rel=0.04)


def request(name: str, arrival_ms: float, e2e_ms: float) -> Record:
    return Record(request_id=RequestId(name), arrival_ms=arrival_ms, e2e_ms=e2e_ms)


def test_requests_in_flight_at_a_windows_ends_are_beside_it(tmp_path: Path) -> None:
    records = [
        request("a", 100.0, 50.0),
        request("b", 900.0, 400.0),  # ends in the second window
        request("c", 1_200.0, 100.0),  # came while b was there
        request("d", 1_600.0, 100.0),
        request("e", 5_000.0, 10.0),
    ]
    path = knownengine.write(tmp_path / "t.jsonl", Meta(), records)
    windows = Windows([path], 1.0)
    found = {
        windows.clock.name(one.number): [
            [record.request_id for record in part.get(str(path), [])] for part in (one.before, one.records, one.after)
        ]
        for one in windows
    }
    assert found == {
        "t+0s": [[], ["a", "b"], ["c"]],
        "t+1s": [["b"], ["c", "d"], []],
        "t+5s": [[], ["e"], []],
    }
    assert windows.late == 0


def test_a_folder_of_segments_is_read_across_its_files(tmp_path: Path) -> None:
    meta = Meta(epoch_unix_ns=NOON_NS)
    for number, records in enumerate(
        ([request("a", 100.0, 50.0)], [request("b", 900.0, 5.0), request("c", 1_200.0, 5.0)])
    ):
        knownengine.write(tmp_path / f"captured-{number + 1:06}.jsonl", meta, records)
    windows = Windows([tmp_path], 1.0)
    found = {
        windows.clock.name(one.number): [record.request_id for record in one.records[str(tmp_path)]] for one in windows
    }
    assert found == {"2025-11-22T12:00:00Z": ["a", "b"], "2025-11-22T12:00:01Z": ["c"]}


def test_a_request_of_a_window_that_is_over_is_counted(tmp_path: Path) -> None:
    late = [request("a", 100.0, 1.0), request("b", 2_500.0, 1.0), request("c", 200.0, 1.0)]
    windows = Windows([knownengine.write(tmp_path / "t.jsonl", Meta(), late)], 1.0)
    assert [one.requests for one in windows] == [1, 1]
    assert windows.late == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--window", "0"], "--window: 0; expected a duration such as 1h"),
        (["--window", "1h", "--cached", "simulated"], "--cached simulated: expected factual with --window"),
    ],
)
def test_windows_that_make_no_sense_are_refused(folder: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        main(["fit", str(folder / "day-1.jsonl"), "-o", str(tmp_path / "fits"), *flags])


def test_a_folder_of_other_files_and_traces_on_no_clock_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").touch()
    with pytest.raises(InputError, match="a folder of other files; expected a new one"):
        main(["fit", str(folder / "day-1.jsonl"), "--window", "1h", "-o", str(tmp_path)])
    other = FittedWindow(
        window="t", begin_s=0.0, length_s=120.0, status="skipped", reason="few", traces=[], requests=1, digest="0"
    )
    write_windows(tmp_path, [other])
    with pytest.raises(InputError, match=r"--window: 3600 s; .* holds windows of 120 s: expected that length"):
        main(["fit", str(folder / "day-1.jsonl"), "--window", "1h", "-o", str(tmp_path)])
    path = knownengine.write(tmp_path / "t.jsonl", Meta(), [request("a", 1.0, 1.0)])
    with pytest.raises(InputError, match=r"t\.jsonl: a trace without a wall clock"):
        Windows([path, folder / "day-1.jsonl"], 1.0)
