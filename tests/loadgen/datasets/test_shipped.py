"""Workloads that ship: what their files hold, and that loads find them by name."""

from itertools import islice
from pathlib import Path
from statistics import fmean, median

import msgspec
import pytest
import zstandard

from loadgen.datasets import SHIPPED, parse_dataset, shipped_path
from loadgen.datasets.traces import read_trie
from tracefile import open_trace
from tracefile.importers.trie import TrieRow


def rows(name: str) -> list[TrieRow]:
    """Rows of a shipped file."""
    lines = zstandard.ZstdDecompressor().decompress(shipped_path(name).read_bytes()).splitlines()
    return [msgspec.json.decode(line, type=TrieRow) for line in lines]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_is_read_as_sessions(name: str) -> None:
    shipped = rows(name)
    sessions = list(read_trie(shipped_path(name), None))
    assert [len(session) for session in sessions] == [row.num_turns + 1 for row in shipped]
    assert [session[0].new_tokens for session in sessions] == [row.input_prompt_length for row in shipped]
    pauses_ms = [turn.think_ms for session in sessions for turn in session[1:]]
    assert pauses_ms == [latency_s * 1000 for row in shipped for latency_s in row.tool_call_latency]


def test_the_shapes_are_those_that_the_article_states() -> None:
    coding, qa, office = (rows(name) for name in ("agentic-coding", "code-qa", "office-work"))
    assert fmean(row.num_turns for row in coding) == pytest.approx(20, abs=0.5)
    assert fmean(row.num_turns for row in office) == pytest.approx(41, abs=0.5)
    assert fmean(row.input_prompt_length for row in office) == pytest.approx(8_900, rel=0.01)
    assert max(row.num_turns for row in qa) == 200
    for made in (coding, qa, office):
        responses = [tokens for row in made for tokens in row.assistant_response_length]
        outputs = [tokens for row in made for tokens in row.tool_call_output_length]
        assert 200 <= median(responses) <= 300
        assert 400 <= median(outputs) <= 700
        assert max(outputs) > 10_000
    waits = [max(latency for row in made for latency in row.tool_call_latency) for made in (coding, qa, office)]
    assert waits[0] > waits[2] > waits[1]


def test_a_shipped_workload_is_called_by_its_name() -> None:
    assert parse_dataset("trie:code-qa") == ("trie", shipped_path("code-qa"))
    with open_trace(shipped_path("agentic-coding")) as reader:  # as a trace, too
        assert [record.turn for record in islice(reader, 3)] == [1, 2, 3]


def test_a_file_beside_it_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text("")
    assert parse_dataset("trie:mine.jsonl") == ("trie", Path("mine.jsonl"))
