"""``report show`` of traces in which fields are missing, for every request or for some: no figure or table fails."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from report.__main__ import main
from sim.__main__ import main as sim_main
from tests.jsonoutput import json_of
from tests.report.browser import page_figures
from tracefile.__main__ import main as tracefile_main
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import BlockHash, Engine, Meta, Record, RequestId, SessionId

BLOCK = 16
META: dict[str, Any] = {
    "block_size": BLOCK,
    "engine": Engine(name="vllm", block_size=BLOCK, num_gpu_blocks=9),
    "source": "client",
}
KINDS = 3
"""Kinds of requests: what one lacks, others may have, as streams lack usage that complete responses have."""


def complete(number: int) -> dict[str, Any]:
    """Every field that a metric reads: three sessions, whose prompts grow by a block each turn."""
    session, turn = number % 3, 1 + number // 3
    return {
        "arrival_ms": 40.0 * number,
        "scheduled_ms": 40.0 * number,
        "held": number % 5 == 0,
        "session_id": SessionId(f"s{session}"),
        "parent_id": f"r{number - 3}" if turn > 1 else None,
        "turn": turn,
        "ttft_ms": 5.0 + number % 4,
        "itl_ms": [2.0, 3.0],
        "itl_tokens": [1, 1],
        "e2e_ms": 20.0 + number % 7,
        "status": ("ok", "ok", "ok", "error", "client_abort")[number % 5],
        "stream": True,
        "prompt_tokens": BLOCK * turn + 1,
        "planned_prompt_tokens": BLOCK * turn + 1,
        "max_tokens": 4,
        "output_tokens": 4 + number % 2,
        "cached_tokens": BLOCK * (turn - 1),
        "concurrency": 1 + number % 3,
        "upstream": f"http://engine-{number % 2}",
        "block_hashes": [BlockHash(100 * session + block) for block in range(turn)],
        "output_block_hashes": [],
    }


MISSING = ("without_hashes", "without_usage", "without_cached_tokens", "without_token_times")
COMPLETE: dict[str, Any] = {"stream": False, "ttft_ms": None, "itl_ms": [], "itl_tokens": []}
Kind = tuple[frozenset[str], bool]
"""Fields that a kind of requests lacks; true: its responses are not streamed."""
kinds: st.SearchStrategy[Kind] = st.tuples(
    st.frozensets(st.sampled_from(sorted(complete(0))), max_size=8), st.booleans()
)


def lacking(number: int, kind: Kind) -> Record:
    fields, total = kind
    known = {
        name: value for name, value in (complete(number) | (COMPLETE if total else {})).items() if name not in fields
    }
    return Record(request_id=RequestId(f"r{number}"), **known)


@given(
    st.lists(kinds, min_size=KINDS, max_size=KINDS),
    st.lists(st.integers(0, KINDS - 1), min_size=1, max_size=18),
    st.frozensets(st.sampled_from(sorted(META))),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_trace_without_optional_fields(
    tmp_path: Path, each: list[Kind], kind_of: list[int], unknown: frozenset[str]
) -> None:
    path, page = tmp_path / "run.jsonl", tmp_path / "page.html"
    path.unlink(missing_ok=True)
    with TraceWriter(path, Meta(**{name: value for name, value in META.items() if name not in unknown})) as writer:
        for number, kind in enumerate(kind_of):
            writer.write(lacking(number, each[kind]))
    result = json_of(main, ["show", str(path), "--html", str(page)])
    assert result["requests"]["n"] == len(kind_of)
    page_figures(page.read_text())
    info = json_of(tracefile_main, ["info", str(path)])
    assert {name: info[name] for name in MISSING} == {name: result["requests"][name] for name in MISSING}


@pytest.fixture
def partly_known(tmp_path: Path) -> Path:
    """72 requests: 31 with block hashes, 20 complete responses, the only ones with usage."""
    path = tmp_path / "run.jsonl"
    with TraceWriter(path, Meta(**META)) as writer:
        for number in range(72):
            total = number % 18 < 5
            usage = set[str]() if total else {"cached_tokens", "prompt_tokens", "output_tokens"}
            hashes = set[str]() if number < 31 else {"block_hashes", "output_block_hashes"}
            record = lacking(number, (frozenset(usage | hashes), total))
            record.status, record.prompt_tokens = "ok", record.prompt_tokens or BLOCK * (1 + number // 3) + 1
            writer.write(record)
    return path


def test_partial_counts_have_their_denominator(
    partly_known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["show", str(partly_known), "--html", str(tmp_path / "page.html")])
    shown = " ".join(capsys.readouterr().out.split())
    of_20 = "(of 20 of 72 requests: the others have no reported cached tokens)"
    assert "85.0 % of 20 of 72 requests had a hit" in shown
    assert f"prompt tokens {of_20}" in shown
    assert "(of 52 of 72 requests: the others have no time of a first token)" in shown
    for name, lacking_ones in (("block hashes", 41), ("usage", 52), ("cached tokens", 52), ("token times", 20)):
        assert f"bad {name} {lacking_ones} of 72 requests have none; see" in shown
    assert of_20.strip("()") in (tmp_path / "page.html").read_text().replace("\u00a0", " ")
    tracefile_main(["info", str(partly_known)])
    message = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert (
        "requests without block hashes 41 (56.9%), usage 52 (72.2%), cached tokens 52 (72.2%), "
        "token times (not streamed) 20 (27.8%)" in message
    )


@pytest.mark.parametrize("command", [["curve"], ["misses"], ["pool"], ["pool", "--engine", "sglang"]])
def test_partial_hits_have_their_denominator(
    partly_known: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    sim_main([*command, str(partly_known)])
    assert "warning: hits are of 31 of 72 requests: the others have no block hashes\n" in capsys.readouterr().err
