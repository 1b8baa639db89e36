"""``tracefile cut``: a day out of segments; segments without their manifest, and columns at a URL."""

from datetime import UTC, datetime
from pathlib import Path

import fsspec
import pytest

from tap.recorder.segments import SegmentedTrace
from tracefile import Engine, HashInfo, InputError, Meta, Record, RequestId, load_trace
from tracefile.__main__ import main
from tracefile.commandline.durations import moment
from tracefile.files.digest import trace_digest
from tracefile.files.writing import new_writer
from tracefile.storage.lines import LineReader
from tracefile.storage.segments import open_lines
from tracefile.study.summary import Summary

DAY_S = 86_400.0
BEGIN_S = datetime(2026, 11, 18, 12, tzinfo=UTC).timestamp()


def meta(key_id: str, version: str = "0.11") -> Meta:
    return Meta(
        source="tap",
        block_size=16,
        hash=HashInfo(algorithm="xxh3_64", key_id=key_id),
        epoch_unix_ns=int(BEGIN_S * 1e9),
        engine=Engine(name="vllm", version=version),
    )


def record(day: int) -> Record:
    return Record(request_id=RequestId(f"day-{day}"), arrival_ms=1000 * DAY_S * day)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A tap's trace with a segment a day, the fourth being written, beside one in columns and files of other kinds."""
    (tmp_path / "host-1").mkdir()
    trace = SegmentedTrace(tmp_path / "host-1" / "tap.jsonl", meta("ab"), rotate_bytes=1)
    for day in range(4):
        trace.write(record(day))
        trace.flush()
        if day < 3:
            trace.rotate_if_due()
    with new_writer(tmp_path / "day.parquet", meta("cd", "0.12"), inputs=[]) as writer:
        for day in (1, 2):
            writer.write(record(day))
    (tmp_path / "host-1" / "tap.jsonl.summary.json").write_text("{}\n")
    (tmp_path / "other.jsonl").write_text("no trace\n")
    return tmp_path


def test_a_day_out_of_segments_is_joined_and_cut(store: Path) -> None:
    paths = [str(store / "host-1" / f"tap-00000{number}.jsonl") for number in (2, 3)]
    assert main(["join", *paths, "-o", str(store / "days.jsonl")]) == 0
    cut = ["cut", str(store / "days.jsonl"), "--from", "2026-11-20", "-o", str(store / "cut.jsonl")]
    assert main(cut) == 0
    assert [found.request_id for found in load_trace(store / "cut.jsonl")[1]] == ["day-2"]
    assert main([*cut, "--to", "25h", "--overwrite"]) == 0, "a duration counts from the first arrival, not the header's"
    assert [found.request_id for found in load_trace(store / "cut.jsonl")[1]] == ["day-2"]
    with pytest.raises(InputError, match="expected a time after --from"):
        main([*cut, "--to", "2026-11-19", "--overwrite"])
    with pytest.raises(InputError, match="expected a time after --from"):
        main([*cut, "--to", "1h", "--overwrite"])


def test_a_cut_reads_no_segment_that_the_manifest_puts_outside_it(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def noted(path: str, *, growing: bool = False) -> LineReader:
        opened.append(Path(path).name.removesuffix(".part"))
        return open_lines(path, growing=growing)

    monkeypatch.setattr("tracefile.files.reading.open_lines", noted)
    cut = ["cut", str(store / "host-1"), "--from", "1d", "-o", str(store / "cut.jsonl")]
    first, second, third, fourth = (f"tap-{number:06}.jsonl" for number in range(1, 5))
    for until, found in (("36h", ["day-1"]), ("3d", ["day-1", "day-2"])):
        opened.clear()
        assert main([*cut, "--to", until, "--overwrite"]) == 0
        assert [one.request_id for one in load_trace(store / "cut.jsonl")[1]] == found
        # The header; beginnings up to the end; records from the begin on. The open segment is in no manifest.
        beginnings = [first, second, fourth] if until == "36h" else [first, second, third, fourth]
        assert opened[:-1] == [first, *beginnings, second, third, fourth]
    assert "of 3 sessions" in capsys.readouterr().err, "first, second and the open one"


def test_a_trace_in_columns_at_a_url_is_read_where_it_is(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/columns/day.parquet", (store / "day.parquet").read_bytes())
    files.pipe_file("/columns/no.parquet", b"no columns")
    try:
        assert load_trace("memory://columns/day.parquet") == load_trace(store / "day.parquet")
        assert trace_digest("memory://columns/day.parquet") == trace_digest(store / "day.parquet")
        assert main(["info", "memory://columns/day.parquet", "--json"]) == 0
        with pytest.raises(InputError, match=r"no\.parquet: damaged or cut short .*; expected a whole Parquet file"):
            load_trace("memory://columns/no.parquet")
        with pytest.raises(InputError, match=r"none\.parquet: nothing is there"):
            load_trace("memory://columns/none.parquet")
    finally:
        files.rm("/columns", recursive=True)


def test_segments_without_their_manifest_are_one_trace(store: Path) -> None:
    (store / "host-1" / "tap.segments.json").unlink()
    records = load_trace(store / "host-1")[1]
    assert [record.request_id for record in records] == ["day-0", "day-1", "day-2", "day-3"]


def test_a_date_is_utc_unless_it_says_its_zone() -> None:
    assert moment("2026-11-20T01:00+01:00") == moment("2026-11-20") == 1_795_132_800.0


def test_a_summary_of_nothing_counts_nothing() -> None:
    assert not any(getattr(Summary(), name) for name in Summary.__dataclass_fields__)
