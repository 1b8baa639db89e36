"""trie's workloads as traces: a row is a session of ``num_turns`` + 1 requests, by lengths and tool latencies.

Source: applied-compute/trie (trie/types.py, ``Workload.from_jsonl_row``). Prompts of a run are random for each row, so
sessions share nothing, and a later prompt begins with all before it: the hashes are made to say that. Rows have no
arrivals: all sessions begin at once. A later turn comes its tool's latency after the response before; its arrival is
that of responses without a duration.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from tracefile.hashing.blockhash import invented_blocks
from tracefile.records.decoding import checked_prompt, decode_row
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Count, HashInfo, Meta, Record, RequestId, SessionId

TRIE_BLOCK_SIZE = 16
TRIE_KEYS = frozenset({"num_turns", "input_prompt_length", "assistant_response_length"})
MOST_ROW_BLOCKS = 1 << 24
"""Bound for the blocks of a row's prompts, each of which repeats all before it: 500 turns up to 1M tokens."""
EXPECTED = "a trie workload of lengths of 0 or more"

Latency = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class TrieRow(msgspec.Struct, kw_only=True):
    """Workload row as published."""

    input_prompt_length: Count
    num_turns: Count
    assistant_response_length: list[Count]
    tool_call_output_length: list[Count]
    tool_call_latency: list[Latency]
    final_assistant_response_length: Count


@dataclass(frozen=True, slots=True)
class TrieTurn:
    """Request of a row; a length of 0 is 1 token."""

    new_tokens: int
    output_tokens: int
    tool_latency_ms: float | None
    """Null: the first turn, after no tool."""


def trie_turns(row: TrieRow, where: str) -> Iterator[TrieTurn]:
    """Turns of a row; raises InputError if its lists are not as long as ``num_turns`` says."""
    for name in ("assistant_response_length", "tool_call_output_length", "tool_call_latency"):
        if (count := len(getattr(row, name))) != row.num_turns:
            raise InputError(f"{where}: {name}: {count} of them; expected {row.num_turns}, as num_turns says")
    outputs = [max(1, tokens) for tokens in (*row.assistant_response_length, row.final_assistant_response_length)]
    yield TrieTurn(max(1, row.input_prompt_length), outputs[0], None)
    tools = zip(row.tool_call_output_length, row.tool_call_latency, outputs[1:], strict=True)
    for tokens, latency_s, output_tokens in tools:
        yield TrieTurn(max(1, tokens), output_tokens, latency_s * 1000)


def trie_row(turns: Sequence[TrieTurn]) -> TrieRow:
    """Return the row that ``trie_turns`` makes these turns of; latencies to the microsecond."""
    outputs = [turn.output_tokens for turn in turns]
    later = turns[1:]
    return TrieRow(
        num_turns=len(later),
        input_prompt_length=turns[0].new_tokens,
        assistant_response_length=outputs[:-1],
        tool_call_output_length=[turn.new_tokens for turn in later],
        tool_call_latency=[round((turn.tool_latency_ms or 0.0) / 1000, 6) for turn in later],
        final_assistant_response_length=outputs[-1],
    )


class TrieDecoder:
    """Rows as records under ids ``trie-1.1``, ``trie-1.2``, …: row, then turn."""

    def __init__(self) -> None:
        self.meta = Meta(block_size=TRIE_BLOCK_SIZE, hash=HashInfo(algorithm="trie"))
        self.warnings: Sequence[str] = ()
        self._rows = 0
        self._decoder = msgspec.json.Decoder(TrieRow)

    def decode_all(self, line: bytes, where: str) -> list[Record]:
        row = decode_row(self._decoder.decode, line, where, EXPECTED)
        self._rows += 1
        return list(self._records(trie_turns(row, where), where))

    def _records(self, turns: Iterator[TrieTurn], where: str) -> Iterator[Record]:
        name = f"trie-{self._rows}"
        tokens, arrival_ms = 0, 0.0
        blocks: list[BlockHash] = []
        row_blocks = 0
        for number, turn in enumerate(turns, start=1):
            arrival_ms += turn.tool_latency_ms or 0.0
            prompt_tokens = checked_prompt(tokens + turn.new_tokens, where)
            tokens = prompt_tokens + turn.output_tokens
            num_blocks = prompt_tokens // TRIE_BLOCK_SIZE
            row_blocks += num_blocks
            if row_blocks > MOST_ROW_BLOCKS:
                raise InputError(
                    f"{where}: num_turns: the prompts of {number:,} turns have {row_blocks:,} blocks;"
                    f" expected at most {MOST_ROW_BLOCKS:,} in a row"
                )
            blocks += invented_blocks(self._rows, len(blocks), (tokens - 1) // TRIE_BLOCK_SIZE)
            yield Record(
                request_id=RequestId(f"{name}.{number}"),
                session_id=SessionId(name),
                session_source="explicit",
                parent_id=RequestId(f"{name}.{number - 1}") if number > 1 else None,
                turn=number,
                arrival_ms=arrival_ms,
                think_ms=turn.tool_latency_ms,
                prompt_tokens=prompt_tokens,
                output_tokens=turn.output_tokens,
                tokens_source="estimate",
                block_hashes=blocks[:num_blocks],
                output_block_hashes=blocks[num_blocks:],
            )
