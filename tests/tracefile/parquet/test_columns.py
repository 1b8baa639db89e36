"""A trace in columns is the trace: every record comes back as it was, streamed, and what is wrong is named."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefile import BlockHash, Engine, HashInfo, InputError, Meta, Record, RequestId, TraceWriter, trace_digest
from tracefile.__main__ import main
from tracefile.files.reading import load_trace, open_trace
from tracefile.records.decoding import record_bounds
from tracefile.records.encoding import known_fields

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
columnswriting = pytest.importorskip("tracefile.parquet.writing")

META = Meta(source="tap", model="m", block_size=16, hash=HashInfo(algorithm="xxh3_64", key_id="ab"), extra={"note": 1})


def write(path: Path, records: list[Record], meta: Meta = META) -> Path:
    with columnswriting.ColumnsWriter(path, meta, overwrite=True) as writer:
        for record in records:
            writer.write(record)
    return path


numbers = st.integers(-(2**63), 2**63 - 1)
times = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(max_size=5)
hashes = st.lists(st.integers(0, 3) | st.integers(0, 2**64 - 1) | st.integers(-5, -1), max_size=6)
json_values = st.none() | st.booleans() | numbers | times | words | st.lists(numbers, max_size=2)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "request_id": words,
    "itl_ms": st.lists(st.floats(-1e15, 1e15), max_size=3),
    "itl_tokens": st.lists(numbers, max_size=3),
    "status": st.sampled_from(["ok", "error", "client_abort", "upstream_abort", "timeout"]),
    "session_source": st.sampled_from(["explicit", "inferred"]),
    "tokens_source": st.sampled_from(["usage", "tokenizer", "estimate"]),
    "hash_source": st.sampled_from(["engine", "tokenizer", "bytes"]),
    "output_hash_source": st.sampled_from(["engine", "tokenizer", "inferred", "text"]),
    "continuation": st.sampled_from(["exact", "altered"]),
    "stream": st.booleans(),
    "held": st.booleans(),
    "prompt_logprobs": st.booleans(),
    "headers": st.dictionaries(words, words, max_size=2),
    "injected": st.lists(words, max_size=2),
    "block_hashes": hashes,
    "output_block_hashes": hashes,
}
TEXTS = {"session_id", "parent_id", "error", "finish_reason", "endpoint", "model", "lora", "upstream"}


def values_of(name: str) -> st.SearchStrategy[Any]:
    if name in FIELDS:
        return FIELDS[name]
    if name in record_bounds():
        least, most = record_bounds()[name]
        return st.floats(least, most) if name.endswith("_ms") else st.integers(int(least), int(most))
    found: st.SearchStrategy[Any] = times if name.endswith("_ms") else words if name in TEXTS else numbers
    return found


records = st.fixed_dictionaries(
    {"request_id": words},
    optional={name: values_of(name) for name in sorted(known_fields(Record) - {"request_id"})}
    | {"extra": st.dictionaries(words.filter(lambda name: name not in known_fields(Record)), json_values, max_size=2)},
).map(lambda fields: Record(**cast("dict[str, Any]", fields)))


@settings(max_examples=30, deadline=None)
@given(st.lists(records, max_size=8))
def test_every_record_comes_back(tmp_path_factory: pytest.TempPathFactory, given_records: list[Record]) -> None:
    path = write(tmp_path_factory.getbasetemp() / "property.parquet", given_records)
    assert load_trace(path) == (META, given_records)


def chained(count: int) -> list[Record]:
    return [
        Record(
            request_id=RequestId(f"r{place}"),
            arrival_ms=place * 1.5,
            prompt_tokens=48,
            output_tokens=20,
            block_hashes=[BlockHash(2**64 - 1), BlockHash(place // 3), BlockHash(1000 + place)],
            extra={"note": place} if place % 2 else {},
        )
        for place in range(count)
    ]


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnswriting, "GROUP_ROWS", 4)


@pytest.mark.usefixtures("small_groups")
def test_row_groups_are_read_one_by_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", chained(11))
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [4, 4, 3]
    assert file.read_row_group(2).column("block_hashes")[0].as_py() == chained(9)[-1].block_hashes
    with open_trace(path) as reader:
        assert list(reader) == chained(11)
        assert reader.line == 11
        assert reader.where(3) == f"{path}: row 3"


@pytest.mark.usefixtures("small_groups")
def test_later_headers_stand_where_they_stood(tmp_path: Path) -> None:
    later = msgspec.structs.replace(META, engine=Engine(name="vllm"))
    with columnswriting.ColumnsWriter(tmp_path / "a.parquet", META) as writer:
        for place, record in enumerate(chained(6)):
            writer.change_meta(META if place < 3 else later)
            writer.write(record)
    with open_trace(tmp_path / "a.parquet") as reader:
        seen = [reader.latest_meta for _ in reader]
    assert seen == [META] * 3 + [later] * 3


def test_convert_there_and_back_is_the_same_file_and_the_same_digest(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a.jsonl", META) as writer:
        for record in chained(50):
            writer.write(record)
        writer.change_meta(msgspec.structs.replace(META, engine=Engine(name="vllm")))  # as the end of a run does
    assert main(["convert", str(tmp_path / "a.jsonl"), str(tmp_path / "a.parquet")]) == 0
    assert main(["convert", str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")]) == 0
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()
    assert trace_digest(tmp_path / "a.parquet") == trace_digest(tmp_path / "a.jsonl")


def test_info_check_and_join_take_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path / "a.parquet", chained(5)))
    more = [Record(request_id=RequestId("late"), arrival_ms=-1.0)]
    other = str(write(tmp_path / "b.parquet", more))
    assert main(["info", path, "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["records"] == 5
    assert main(["convert", path, other, str(tmp_path / "c.parquet")]) == 0
    assert load_trace(tmp_path / "c.parquet")[1] == [*chained(5), *more]
    assert main(["check", str(tmp_path / "c.parquet")]) == 1
    assert f"{tmp_path / 'c.parquet'}: row 6: arrival_ms: -1.0" in capsys.readouterr().out


def test_nothing_is_overwritten_unasked_and_no_half_file_is_left(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", chained(2))
    with pytest.raises(InputError, match="already has"):
        columnswriting.ColumnsWriter(path, META)
    with pytest.raises(InputError, match="known field's name"):
        write(tmp_path / "b.parquet", [Record(request_id=RequestId("a"), extra={"n": 1})])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.parquet"]


def rewritten(path: Path, name: str, values: list[Any]) -> Path:
    """The file as another tool would write it, one column changed."""
    table = pq.read_table(path)
    table = table.set_column(table.column_names.index(name), name, pa.array(values, table.schema.field(name).type))
    return store(table, path)


def store(table: Any, path: Path) -> Path:
    pq.write_table(table.replace_schema_metadata(pq.read_metadata(path).metadata), path)
    return path


@pytest.mark.parametrize(
    ("name", "values", "what"),
    [
        ("status", ["ok", "fine", "ok"], "row 2: status: Invalid enum value 'fine'"),
        ("request_id", ["a", "b", None], "row 3: request_id: missing"),
        ("rest", ["{}", "[", None], "row 2: rest"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, name: str, values: list[Any], what: str) -> None:
    path = rewritten(write(tmp_path / "a.parquet", chained(3)), name, values)
    with pytest.raises(InputError, match=f"{path}: {what}"):
        load_trace(path)


def test_a_writer_of_lines_takes_no_name_of_columns(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.parquet: lines are written here; expected \.jsonl"):
        TraceWriter(tmp_path / "a.parquet", META)


def test_other_parquet_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(InputError, match=r"not of a trace; expected one that tracefile wrote"):
        open_trace(path)
    table = pq.read_table(write(path, chained(3)))
    store(table.slice(0, 2), path)
    with pytest.raises(InputError, match="2 rows; expected the 3"):
        open_trace(path)
    path.write_bytes(write(path, chained(3)).read_bytes()[:-40])
    with pytest.raises(InputError, match="damaged or cut short"):
        open_trace(path)
