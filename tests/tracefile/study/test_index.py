"""``tracefile ls``: a store's index from names, manifests, headers and footers, and a day out of it."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from tap.recorder.segments import SegmentedTrace
from tracefile import Engine, HashInfo, InputError, Meta, Record, RequestId, load_trace
from tracefile.__main__ import main
from tracefile.commandline.durations import moment
from tracefile.files.digest import trace_digest
from tracefile.files.writing import new_writer
from tracefile.storage.lines import LineReader
from tracefile.storage.remote import files_under
from tracefile.storage.segments import open_lines
from tracefile.study.index import IndexedFile, by_trace, index_store, traces_below
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
    (tmp_path / "host-1" / "tap.jsonl.engine.jsonl").write_text("{}\n")
    (tmp_path / "host-1" / "tap.jsonl.summary.json").write_text("{}\n")
    (tmp_path / "other.jsonl").write_text("no trace\n")
    return tmp_path


def test_a_store_is_listed_from_manifests_headers_and_footers(store: Path) -> None:
    (store / "host-1" / "tap-000002.jsonl").write_text("its body is not read")
    columns, tap = by_trace(index_store(str(store)))
    assert (columns.trace, columns.files, columns.requests) == (f"{store}/day", 1, 2)
    assert (columns.from_unix_s, columns.until_unix_s) == (BEGIN_S + DAY_S, BEGIN_S + 2 * DAY_S)
    assert (columns.key_ids, columns.engines) == (("cd",), ("vllm 0.12",))
    assert (tap.trace, tap.files, tap.requests, tap.uncounted) == (f"{store}/host-1/tap", 4, 3, 1)
    assert (tap.from_unix_s, tap.until_unix_s) == (BEGIN_S, BEGIN_S + 2 * DAY_S)
    assert (tap.key_ids, tap.engines) == (("ab",), ("vllm 0.11",))
    assert [file.open for file in index_store(f"{store}/host-1")] == [False, False, False, True]
    with pytest.raises(InputError, match="no trace is there; expected a folder of traces"):
        index_store(str(store / "none"))


def test_a_day_out_of_a_store_is_joined_and_cut(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    day = ["--from", "2026-11-19", "--until", "2026-11-21T00:00Z"]
    assert main(["ls", str(store / "host-1"), *day, "--paths"]) == 0
    paths = capsys.readouterr().out.split()
    assert [Path(path).name for path in paths] == ["tap-000002.jsonl", "tap-000003.jsonl"]
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
        (there,) = by_trace(index_store("memory://columns"))
        assert (there.trace, there.requests, there.key_ids) == ("memory://columns/day", 2, ("cd",))
        assert main(["info", "memory://columns/day.parquet", "--json"]) == 0
        with pytest.raises(InputError, match=r"no\.parquet: damaged or cut short .*; expected a whole Parquet file"):
            load_trace("memory://columns/no.parquet")
        with pytest.raises(InputError, match=r"none\.parquet: nothing is there"):
            load_trace("memory://columns/none.parquet")
    finally:
        files.rm("/columns", recursive=True)


def test_the_table_and_the_object_name_files_from_the_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(store), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert ([one["requests"] for one in told["traces"]], len(told["files"])) == ([2, 3], 5)
    with pytest.raises(SystemExit):
        main(["ls", str(store), "--json", "--paths"])
    assert "--paths: not allowed with argument --json" in capsys.readouterr().err
    assert main(["ls", str(store), "--segments"]) == 0
    assert str(store / "host-1") not in capsys.readouterr().out.partition("bytes")[2]


def test_a_store_at_a_url_is_that_of_its_files(store: Path) -> None:
    files = fsspec.filesystem("memory")
    for file in (store / "host-1").iterdir():
        files.pipe_file(f"/store/host-1/{file.name}", file.read_bytes())
    try:
        (there,), (here,) = by_trace(index_store("memory://store")), by_trace(index_store(str(store / "host-1")))
        assert (there.trace, there.files, there.requests) == ("memory://store/host-1/tap", here.files, here.requests)
        assert (there.from_unix_s, there.key_ids, there.engines) == (here.from_unix_s, here.key_ids, here.engines)
    finally:
        files.store.clear()


def test_segments_without_their_manifest_are_one_trace(store: Path) -> None:
    assert traces_below(str(store / "host-1")) == [f"{store}/host-1/tap.segments.json"]
    (store / "host-1" / "tap.segments.json").unlink()
    (found,) = traces_below(str(store / "host-1"))
    assert [found.request_id for found in load_trace(found)[1]] == ["day-0", "day-1", "day-2", "day-3"]


def test_columns_without_their_package_are_told_of_not_left_out(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"day\.parquet: Parquet needs pyarrow: pip install"):
        index_store(str(store))


def test_a_store_whose_names_are_urls_of_unknown_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"https://host/a.jsonl": {"size": None}, "bucket/b.jsonl": {"size": 3}}
    files = SimpleNamespace(find=lambda path, detail: names)
    monkeypatch.setattr("tracefile.storage.remote.file_system", lambda url, expected: (files, "host"))
    assert list(files_under("https://host")) == [("https://host/a.jsonl", 0), ("https://bucket/b.jsonl", 3)]


def test_spans_hold_their_first_moment_and_not_their_last() -> None:
    file = IndexedFile("f", "f", 1, from_unix_s=10.0, until_unix_s=20.0)
    assert [file.overlaps(*span) for span in ((20, 30), (20.1, 30), (0, 10), (0, 10.1))] == [True, False, False, True]
    assert moment("2026-11-20T01:00+01:00") == moment("2026-11-20") == 1_795_132_800.0


def test_a_summary_of_nothing_counts_nothing() -> None:
    assert not any(getattr(Summary(), name) for name in Summary.__dataclass_fields__)
