"""Lines decoded a block at a time give what they give one by one: records, errors, warnings and places."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefile.files import reading
from tracefile.files.reading import TraceReader
from tracefile.records.decoding import without_times
from tracefile.records.errors import InputError
from tracefile.records.schema import Record
from tracefile.storage import compression

HEADER = b'{"meta":{"schema":"kvtape/1","block_size":16}}'
OURS = [
    b'{"request_id":"a","arrival_ms":1.5,"prompt_tokens":33,"block_hashes":[1,18446744073709551615]}',
    b'{"request_id":"b","itl_ms":[1,2.5],"itl_tokens":[1,2],"output_tokens":4,"status":"timeout"}',
    b'{"request_id":"c","later":[1],"block_hashes":[-3]}',
    b'{"request_id":"d","extra":5}',
    b'{"meta":1,"request_id":"e"}',
    b'{"meta":{"schema":"kvtape/1","block_size":16}}',
    b'{"meta":{"schema":"kvtape/1","block_size":32}}',
    b'{"request_id":"f","prompt_tokens":-1}',
    b'{"request_id":"g","prompt_tokens":"3"}',
    b'{"request_id":"h","block_hashes":[1,null]}',
    b'{"prompt_tokens":3}',
    b'{"request_id":"i","ttft_ms":NaN}',
    b'{"request_id":"j"} {"request_id":"k"}',
    b'{"request_id":"l",',
    b"[1]",
    b" ",
    b"",
]
ROW = b'{"timestamp":%d,"input_length":%d,"output_length":%d,"hash_ids":[%b]}'
MOONCAKE = [
    ROW % (3000, 1025, 7, b"0,1,2"),
    ROW % (27482, 512, 1, b"9"),
    ROW % (0, 100, 0, b""),
    ROW % (5, 600, 3, b"18446744073709551616,4"),
    ROW % (5, 600, 3, b"-1"),
    ROW % (5, 1024, 3, b"1"),
    ROW % (5, -1, 3, b"1"),
    ROW % (5, 600, 3, b"1.5"),
    b'{"meta":{"schema":"kvtape/1"},"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[]}',
    b'{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[],"more":1}',
    b'{"timestamp":0}',
    b"",
]


def lines_of(kinds: Sequence[bytes], good: int) -> st.SearchStrategy[list[bytes]]:
    """Mostly the first ``good`` kinds of line, so that whole blocks are plain, and then some of any kind."""
    plain = st.lists(st.sampled_from(kinds[:good]), max_size=12)
    return st.tuples(plain, st.lists(st.sampled_from(kinds), max_size=2), plain).map(
        lambda parts: [*parts[0], *parts[1], *parts[2]]
    )


def results(path: Path, *, by_line: bool) -> tuple[list[Any], list[str], list[tuple[int, str]]]:
    with TraceReader(path) as reader:
        if by_line:
            reader._decoder.decode_block = lambda lines: None  # type: ignore[method-assign]
        outcome = [
            (reader.line, reader.where(), str(result) if isinstance(result, InputError) else result)
            for result in reader.results()
        ]
        return outcome, reader.warnings, reader.faults


def records(path: Path, read: Callable[[TraceReader], Iterable[Record]]) -> tuple[list[Record] | str, list[str]]:
    with TraceReader(path) as reader:
        try:
            return list(read(reader)), reader.warnings
        except InputError as error:
            return str(error), []


@settings(max_examples=60, deadline=None)
@given(
    trace=st.one_of(
        st.tuples(st.just(HEADER), lines_of(OURS, 2)), st.tuples(st.just(MOONCAKE[0]), lines_of(MOONCAKE, 4))
    ),
    end=st.sampled_from([b"\n", b"", b'\n{"request_id":']),
    read_bytes=st.sampled_from([64, 300, 1 << 20]),
)
def test_decode_block_equals_decode(
    tmp_path_factory: pytest.TempPathFactory, trace: tuple[bytes, list[bytes]], end: bytes, read_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_bytes(b"\n".join([trace[0], *trace[1]]) + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "PLAIN_READ_BYTES", read_bytes)
        assert results(path, by_line=False) == results(path, by_line=True)
        patch.setattr(reading, "BATCH", 3)
        assert records(path, lambda reader: reader.requests()) == records(
            path, lambda reader: without_times(list(reader))
        )
