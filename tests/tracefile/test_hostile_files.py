"""No file ends a command with a traceback, without bound, or with control characters on the terminal."""

import fcntl
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sim.__main__ import main as sim
from tracefile.__main__ import main as tracefile
from tracefile.commandline.exit_codes import run_command
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError
from tracefile.storage import lines

HEADER = {"meta": {"schema": "kvtape/1", "block_size": 4}}
RECORD: dict[str, Any] = {"request_id": "a", "arrival_ms": 1.0, "prompt_tokens": 9, "block_hashes": [1, 2]}
DEEP = "[" * 100_000 + "]" * 100_000


def text(*objects: dict[str, Any] | str) -> bytes:
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in objects).encode()


FILES = {
    "binary": (bytes(range(256)) * 9, "begins with"),
    "a bare CR": (b"a\rb\n", "begins with 'a\\rb'; expected a trace"),
    "a long word": (b"x" * 200_000 + b"\n", "begins with 'xxx"),
    "a deep header": (text('{"meta": {"schema": "kvtape/1", "x": ' + DEEP + "}}"), ":1: JSON nested too deeply"),
    "a deep record": (text(HEADER, '{"request_id": "a", "x": ' + DEEP + "}"), ":2: JSON nested too deeply"),
    "a deep Mooncake line": (
        text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ' + DEEP + "}"),
        ":1: JSON nested too deeply",
    ),
    "block size 0": (text({"meta": {"schema": "kvtape/1", "block_size": 0}}), "meta.block_size: 0; expected 1 to"),
    "a huge block size": (
        text({"meta": {"schema": "kvtape/1", "block_size": 2**40}}),
        "meta.block_size: 1099511627776",
    ),
    "an engine beyond 64 bits": (
        text({"meta": {"schema": "kvtape/1", "block_size": 4, "engine": {"block_size": 2**63}}}),
        "meta.engine.block_size: 9223372036854775808; expected 0 to 1,000,000,000,000,000",
    ),
    "an engine of negative blocks": (
        text({"meta": {"schema": "kvtape/1", "engine": {"num_gpu_blocks": -1}}}),
        "meta.engine.num_gpu_blocks: -1; expected 0 to",
    ),
    "a page": (b"<!DOCTYPE html>\n<p>hello\n", "an HTML page, not a trace"),
    "prose": (b"# kvtape\n\nRecords LLM traffic.\n", "begins with '# kvtape'; expected a trace"),
}


@pytest.mark.parametrize("command", ["info", "check", "convert"])
@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_one_line(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = FILES[name]
    path = tmp_path / "t"
    path.write_bytes(content)
    try:
        code = tracefile([command, str(path), *([str(tmp_path / "out.jsonl")] if command == "convert" else [])])
        output = capsys.readouterr().out
        assert (command, code) == ("check", 1)  # a record's fault is a finding
    except InputError as error:
        output = str(error)
    assert message.replace(":2: ", ":2: line: ") in output or message in output


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_endless_line_is_rejected_in_bounded_memory(
    compress: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "t").write_bytes(compress(text(HEADER) + b"0" * (5 << 20)))
    with pytest.raises(InputError, match=":2: a line of more than 1 MiB"):
        load_trace(tmp_path / "t")


ODD = [
    ("prompt_tokens", 2**40, "1099511627776; expected <= 16777216"),
    ("output_tokens", 10**15, "1000000000000000; expected <= 16777216"),
    ("cached_tokens", -1, "-1; expected >= 0"),
    ("hashable_blocks", -3, "-3; expected >= 0"),
    ("turn", 0, "0; expected >= 1"),
    ("max_tokens", -1, "-1; expected >= 0"),
    ("arrival_ms", 1e300, "1e+300; expected <= 1000000000000000.0"),
    ("itl_ms", [1.0, 1e308], "a value; expected <= 1000000000000000.0"),
]


@pytest.mark.parametrize(("field", "value", "what"), ODD)
def test_value_out_of_bounds_is_a_finding_and_read_as_null(
    field: str, value: Any, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(text(HEADER, RECORD, RECORD | {"request_id": "odd", field: value}))
    assert tracefile(["check", str(path)]) == 1
    assert f"{path}:3: {field}: {what}\n" in capsys.readouterr().out
    first, odd = load_trace(path)[1]
    assert first.prompt_tokens == 9
    assert not getattr(odd, field)
    output = capsys.readouterr().err
    assert output == (
        f"warning: {path}: 1 records have values out of bounds, read as unknown; the first: {path}:3: {field}: {what}\n"
    )


@pytest.mark.parametrize("command", ["curve", "misses", "pool"])
def test_impossible_count_affects_one_request_only(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, odd = tmp_path / "good.jsonl", tmp_path / "odd.jsonl"
    records = [RECORD, RECORD | {"request_id": "b"}]
    good.write_bytes(text(HEADER, *records))
    odd.write_bytes(text(HEADER, *records, RECORD | {"request_id": "c", "prompt_tokens": 2**40}))
    flags = () if command == "curve" else ("--num-gpu-blocks", "9")
    result = []
    for path in (good, odd):
        assert sim([command, str(path), *flags, "--json"]) == 0
        result.append(json.loads(capsys.readouterr().out) | {"trace": ""})
    assert result[0] == result[1]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_truncated_stream_is_a_finding_unless_it_is_being_written(
    compress: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t"
    path.write_bytes(compress(text(HEADER, *(RECORD | {"request_id": str(n)} for n in range(3000))))[:-5])
    assert tracefile(["check", str(path)]) == 1
    assert ": end: " in capsys.readouterr().out
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert tracefile(["check", str(path)]) == 0
        output = capsys.readouterr()
        assert "still being written; read up to this line" in output.err
        assert "cut short" not in output.err


HOSTILE = "\x1b]0;owned\x07\x9b31m\u202egnp.exe\x7f\u200b"


@pytest.mark.parametrize(
    "argv",
    [
        ["tracefile", "info"],
        ["tracefile", "info", "--json"],
        ["tracefile", "check"],
        ["sim", "curve"],
        ["sim", "misses", "--num-gpu-blocks", "9"],
        ["sim", "audit"],
    ],
)
def test_control_characters_of_a_trace_never_reach_a_terminal(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RECORD | {"model": HOSTILE, "endpoint": HOSTILE, "finish_reason": HOSTILE, "parent_id": HOSTILE}
    path = tmp_path / f"t{HOSTILE}"
    path.write_bytes(text(HEADER | {"meta": HEADER["meta"] | {"model": HOSTILE, HOSTILE: [HOSTILE]}}, record))
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(SystemExit):
        run_command(argv[0], {"tracefile": tracefile, "sim": sim}[argv[0]], [*argv[1:], str(path)])
    output = out.getvalue() + err.getvalue()
    assert output
    assert not set(output) & set("\x1b\x07\x9b\x7f\u202e\u200b")
