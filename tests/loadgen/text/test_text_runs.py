"""Loads of text on the embedded engine, over real sockets: every prompt as planned, to the token, on every API."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from loadgen.__main__ import main
from tests.fakes.translating_engine import translating
from tests.jsonoutput import json_of
from tracefile.files.reading import load_trace

SESSIONS = shlex.split(
    "--turns 3 --rate 40 --number 6 --prefix-count 2 --prefix-tokens 70 --prompt-tokens 20:50 --output-tokens 8:20"
)


def run(url: str, folder: Path, *flags: str) -> dict[str, Any]:
    """A run's summary."""
    trace = folder / "t.jsonl"
    arguments = ["--url", url, "-o", str(trace), "--overwrite"]
    summary: dict[str, Any] = json_of(main, [*arguments, *SESSIONS, *flags])
    return summary


@pytest.mark.parametrize(("api", "hashed"), [("chat", "engine"), ("responses", "tokenizer"), ("messages", "tokenizer")])
def test_prompts_have_the_planned_tokens(sim_server: str, tmp_path: Path, api: str, hashed: str) -> None:
    with translating(sim_server) as url:
        summary = run(url, tmp_path, "--api", api)
    truth = summary["prompt_check"]
    assert truth["verdict"].startswith("exact (")
    assert truth["tokenizer"] == "engine"
    counts = truth["counts"]
    assert (counts["planned"], counts["exact"], counts["off_tokens"]) == (18, 18, 0)
    assert (counts["outputs"], counts["outputs_changed"]) == (12, 0)
    assert counts["shared_tokens"] == counts["shared_cached"] > 0
    meta, records = load_trace(tmp_path / "t.jsonl")
    assert meta.tokenizer == "engine"
    # Chats are hashed over the ids that the engine says it saw, other first turns over those of words and template.
    assert {record.hash_source for record in records if record.turn == 1} == {hashed}


def test_output_blocks_have_equal_hashes_in_the_next_prompt(sim_server: str, tmp_path: Path) -> None:
    run(sim_server, tmp_path, "--api", "chat", "--seed", "5")
    _, records = load_trace(tmp_path / "t.jsonl")
    by_id = {record.request_id: record for record in records}
    followed = [(by_id[record.parent_id], record) for record in records if record.parent_id is not None]
    assert len(followed) == 12
    for parent, child in followed:
        chain = [*(parent.block_hashes or ()), *(parent.output_block_hashes or ())]
        assert (child.block_hashes or [])[: len(chain)] == chain
