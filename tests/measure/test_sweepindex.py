"""Index of a sweep: literal lines, and errors that name line and field."""

import os
from pathlib import Path

import msgspec
import pytest

from measure.sweepindex import INDEX, SweepRun, read_sweep, write_sweep
from tracefile.records.errors import InputError

DONE = SweepRun(
    run="A-p8-r1",
    label="A",
    parallel=8,
    rate=None,
    repeat=1,
    trace="A-p8-r1.jsonl.zst",
    status="done",
    reason=None,
    command="loadgen --url http://a --parallel 8",
    started="2026-11-22T17:00:00Z",
    duration_s=60.0,
)
LINE = (
    b'{"run":"A-p8-r1","label":"A","parallel":8,"rate":null,"repeat":1,"trace":"A-p8-r1.jsonl.zst","status":"done",'
    b'"reason":null,"command":"loadgen --url http://a --parallel 8","started":"2026-11-22T17:00:00Z",'
    b'"duration_s":60.0}\n'
)


def test_an_index_has_a_line_for_each_run_and_reads_back(tmp_path: Path) -> None:
    cut = msgspec.structs.replace(DONE, run="B-p8-r1", label="B", status="cut", reason="killed")
    write_sweep(tmp_path, [DONE, cut])
    first, second = (tmp_path / INDEX).read_bytes().splitlines(keepends=True)
    assert first == LINE
    assert msgspec.json.decode(second)["status"] == "cut"
    assert read_sweep(tmp_path) == [DONE, cut]


def test_interrupted_write_keeps_the_old_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sweep(tmp_path, [DONE])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_sweep(tmp_path, [])
    assert read_sweep(tmp_path) == [DONE]
    assert os.listdir(tmp_path) == [INDEX]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (LINE.replace(b'"parallel":8', b'"parallel":"8"'), r"sweep.jsonl:2: parallel: Expected `int \| null`, got"),
        (LINE.replace(b'"label":"A",', b""), "sweep.jsonl:2: label: missing; expected in every record"),
        (
            LINE.replace(b'"A-p8-r1.jsonl', b'"../a.jsonl'),
            "sweep.jsonl:2: trace: '../a.jsonl.zst'; expected a file name",
        ),
    ],
)
def test_an_error_names_line_and_field(tmp_path: Path, line: bytes, error: str) -> None:
    (tmp_path / INDEX).write_bytes(LINE + line)
    with pytest.raises(InputError, match=error):
        read_sweep(tmp_path)
