"""``tracefile info``, ``check`` and ``convert`` as they are called."""

import json
from pathlib import Path
from typing import Any

import pytest

from tracefile.__main__ import main
from tracefile.files.reading import load_trace
from tracefile.records.errors import InputError

HEADER = '{"meta": {"schema": "kvtape/1", "block_size": 4, "model": "m"}}'


def trace(path: Path, *lines: dict[str, Any] | str) -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join([HEADER, *texts]) + "\n")
    return str(path)


def findings(path: Path, capsys: pytest.CaptureFixture[str], *lines: dict[str, Any] | str) -> list[str]:
    code = main(["check", trace(path, *lines)])
    result = [line.removeprefix(f"{path}:") for line in capsys.readouterr().out.splitlines()]
    assert code == (1 if result else 0)
    return result


GOOD: dict[str, Any] = {
    "request_id": "a",
    "arrival_ms": 1.0,
    "first_byte_ms": 2.0,
    "ttft_ms": 2.0,
    "itl_ms": [3.0],
    "itl_tokens": [1],
    "e2e_ms": 6.0,
    "prompt_tokens": 9,
    "output_tokens": 4,
    "cached_tokens": 4,
    "block_hashes": [1, 2],
    "output_block_hashes": [3],
    "hashable_blocks": 2,
}


def test_a_good_trace_has_no_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = GOOD | {"request_id": "b", "parent_id": "a", "turn": 2, "arrival_ms": 8.0, "think_ms": 1.0}
    assert findings(tmp_path / "t", capsys, GOOD, second) == []


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"prompt_tokens": -1, "block_hashes": None, "output_block_hashes": None}, "prompt_tokens: -1; expected >= 0"),
        ({"block_hashes": [1, 2, 3]}, "block_hashes: 3; expected at most prompt_tokens // block_size = 2"),
        ({"output_block_hashes": [1, 2]}, "output_block_hashes: 2; expected at most 1"),  # (9 + 4 − 1) // 4 − 2
        ({"itl_tokens": [0]}, "itl_tokens: 0 tokens in a read"),
        ({"itl_ms": [9.0]}, "itl_ms: the last token at 11.0; expected it by e2e_ms 6.0"),
        ({"parent_id": "z"}, "parent_id: not in this trace"),
    ],
)
def test_violation_has_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], finding: str
) -> None:
    result = findings(tmp_path / "t", capsys, GOOD | change)
    assert result[0].startswith("2: " + finding), result


def test_violations_between_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = {"request_id": "a", "arrival_ms": 0.0, "e2e_ms": 100_000.0, "parent_id": "b"}
    lines: list[dict[str, Any]] = [
        first,
        {"request_id": "b", "arrival_ms": 0.0, "e2e_ms": 5.0, "parent_id": "a"},
        {"request_id": "a"},
        {"request_id": "c", "arrival_ms": 0.0, "e2e_ms": 99_000.0},  # a tap's workers hand over each for itself
    ]
    result = findings(tmp_path / "t", capsys, *lines)
    assert [line.split(":")[:2] for line in result] == [["3", " e2e_ms"], ["4", " request_id"], ["2", " parent_id"]]


def test_info_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = GOOD | {"request_id": "b", "arrival_ms": 8.0, "status": "timeout", "session_id": "s", "parent_id": "a"}
    path = trace(tmp_path / "t", GOOD | {"endpoint": "/v1/completions"}, second)
    assert main(["info", path, "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["format"], info["records"], info["statuses"]) == ("kvtape", 2, {"ok": 1, "timeout": 1})
    assert info["endpoints"] == {"/v1/completions": 1, "unknown": 1}
    assert (info["first_arrival_ms"], info["last_end_ms"]) == (1.0, 14.0)
    assert (info["prompt_tokens"], info["output_tokens"], info["cached_tokens"]) == (18, 8, 8)
    assert (info["hashed_tokens"], info["hit_tokens"], info["distinct_blocks"]) == (16, 8, 3)
    assert (info["named_sessions"], info["inferred_sessions"], info["later_turns"]) == (1, 0, 1)
    assert info["meta"] == {"schema": "kvtape/1", "block_size": 4, "model": "m"}
    assert main(["info", path]) == 0
    assert "hit potential" in capsys.readouterr().out


def test_info_compares_prompt_counts_by_endpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"prompt_tokens": 8, "block_hashes": [1, 2], "hash_source": "tokenizer", "tokens_source": "usage"}
    chat, other = {"endpoint": "/v1/chat/completions"}, {"endpoint": "/v1/completions"}
    path = trace(
        tmp_path / "t",
        {"request_id": "a"} | shape | chat,
        {"request_id": "b", "prompt_tokens_by_tokenizer": 7, "hashable_blocks": 1} | shape | chat,
        {"request_id": "c"} | shape | other,
        {"request_id": "d"} | shape | other | {"hash_source": "bytes"},
        {"request_id": "e", "hashable_blocks": 1} | shape | other,
        {"request_id": "f"} | shape | other | {"tokens_source": "tokenizer"},
    )
    main(["info", path, "--json"])
    info = json.loads(capsys.readouterr().out)
    assert info["prompt_counts"] == {"/v1/chat/completions": 2, "/v1/completions": 1}
    assert info["prompt_mismatches"] == {"/v1/chat/completions": 1, "/v1/completions": 0}
    main(["info", path])
    message = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "66.7% of 3 records (/v1/chat/completions 50.0%, /v1/completions 100.0%); hashes of the rest" in message


def test_a_prompt_s_last_token_is_never_a_hit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Eight tokens are two full blocks, both seen before; one token must be computed, so only one block can be hit.
    shape = {"prompt_tokens": 8, "block_hashes": [1, 2]}
    path = trace(tmp_path / "t", {"request_id": "a"} | shape, {"request_id": "b"} | shape)
    main(["info", path, "--json"])
    assert json.loads(capsys.readouterr().out)["hit_tokens"] == 4


def test_convert_infers_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = GOOD | {"request_id": "b", "arrival_ms": 8.0, "block_hashes": [1, 2, 3, 4], "prompt_tokens": 17}
    second |= {"output_block_hashes": None, "hashable_blocks": None, "new_field": 1}
    path = trace(tmp_path / "t", GOOD, second)
    assert main(["convert", path, str(tmp_path / "o.zst")]) == 0
    assert load_trace(tmp_path / "o.zst") == load_trace(path)
    assert main(["convert", path, str(tmp_path / "s.gz"), "--infer-sessions"]) == 0
    assert load_trace(tmp_path / "s.gz")[1][1].parent_id == "a"
    assert "1 later turns of sessions" in capsys.readouterr().err
    assert main(["convert", trace(tmp_path / "alone", GOOD), str(tmp_path / "alone.gz"), "--infer-sessions"]) == 0
    assert "no request continues another" in capsys.readouterr().err
    with pytest.raises(InputError, match="already has"):
        main(["convert", path, str(tmp_path / "o.zst")])


def test_torn_trace_gives_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(tmp_path / "t", GOOD)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"request_id": "to')
    assert main(["check", path]) == 1
    message = capsys.readouterr()
    assert message.out == f"{path}:3: end: torn last line skipped; its writer was cut short\n"
    assert message.err == f"{path}: 1 finding\nwarning: {path}:3: torn last line skipped; its writer was cut short\n"


def test_long_work_shows_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trace(tmp_path / "t", GOOD, GOOD | {"request_id": "b"})
    main(["check", path])
    assert "records checked" not in capsys.readouterr().err  # two records are no long work
    monkeypatch.setattr("tracefile.commandline.progress.LOG_INTERVAL_S", 0.0)
    main(["check", path])
    assert "records checked: 1\nrecords checked: 2\n" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.zst"])
def test_cat_prints_any_format_as_lines(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = trace(tmp_path / "t", GOOD, GOOD | {"request_id": "b"}), tmp_path / f"other.{suffix}"
    assert main(["convert", path, str(other)]) == 0
    capsys.readouterr()
    assert main(["cat", str(other)]) == 0
    again = tmp_path / "again"
    again.write_text(capsys.readouterr().out)
    assert load_trace(again) == load_trace(path)
    assert main(["cat", str(other), "--head", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == again.read_text().splitlines()[:2]
    with pytest.raises(InputError, match="--head: -1; expected 0 or more"):
        main(["cat", path, "--head", "-1"])
