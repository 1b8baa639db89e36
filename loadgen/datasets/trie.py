"""trie's workloads as datasets: rows as ``tracefile.importers.trie`` defines them, lengths and tools' latencies."""

from collections.abc import Iterator
from pathlib import Path

from loadgen.datasets.rows import decode, rows
from loadgen.datasets.session import DatasetOptions, DatasetSession, DatasetTurn
from tracefile.importers.trie import EXPECTED, TrieRow, TrieTurn, trie_turns


def read_trie(path: Path, options: DatasetOptions) -> Iterator[DatasetSession]:
    for where, row in rows(path):
        yield [_turn(turn) for turn in trie_turns(decode(row, TrieRow, where, EXPECTED), where)]


def _turn(turn: TrieTurn) -> DatasetTurn:
    return DatasetTurn(
        turn.new_tokens,
        from_tool=turn.tool_latency_ms is not None,
        output_tokens=turn.output_tokens,
        think_ms=turn.tool_latency_ms or 0.0,
    )
