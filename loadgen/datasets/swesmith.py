"""SWE-smith style builds: conversations of given lengths, cut out of the user and tool texts of agents' trajectories.

Two kinds of file, as in evalscope's ``swe_smith`` (evalscope/perf/plugin/datasets/swe_smith.py): trajectories, JSON
Lines or an array of ``{"messages": [...]}`` (an array, or one as JSON in a string, as SWE-bench/SWE-smith-trajectories
has it), or one object ``{"conversations": [[{"messages": [...]}, …], …]}`` built already. A turn takes messages up to
its length and cuts the last one; turns after the first are tool outputs. A trajectory that ends before its turns are
full is skipped.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.core.lengths import LengthDistribution, quantities
from loadgen.datasets.openaimessages import messages_of
from loadgen.datasets.rows import decode, rows
from loadgen.datasets.session import DatasetOptions, DatasetSession, DatasetTurn, TextLengths
from loadgen.text.messages import VerbatimMessage
from tracefile import InputError
from tracefile.records.latenames import LateModule

if TYPE_CHECKING:
    import numpy as np

    from loadgen.core import draws
else:  # the names of the datasets need neither
    np = LateModule("numpy")
    draws = LateModule("loadgen.core.draws")

FIRST_TURN = LengthDistribution(65_000, 65_000)
SUBSEQUENT_TURN = LengthDistribution(500, 500)

EXPECTED = "a trajectory with messages, or an object with conversations"


class BuiltTurn(msgspec.Struct):
    """A turn of a conversation that is built already."""

    messages: list[dict[str, Any]]


def read_swe_smith(path: Path, options: DatasetOptions) -> Iterator[DatasetSession]:
    """Sessions of long enough trajectories, or of conversations built already."""
    for index, (where, row) in enumerate(rows(path)):
        yield from row_sessions(row, where, options, index)


def row_sessions(row: bytes, where: str, options: DatasetOptions, index: int) -> Iterator[DatasetSession]:
    """Sessions of the file's row number ``index``: of a trajectory one, or none where it is too short."""
    found = decode(row, dict[str, msgspec.Raw], where, EXPECTED)
    if "conversations" in found:
        yield from _built(bytes(found["conversations"]), where, options.max_turns)
        return
    texts = [text for text in _texts(found, where) if text]
    if session := _cut(texts, options, index):
        yield session


def _built(conversations: bytes, where: str, most: int | None) -> Iterator[DatasetSession]:
    found = decode(conversations, list[list[BuiltTurn]], f"{where}: conversations", EXPECTED)
    for turns in found:
        yield [
            DatasetTurn(quoted=[VerbatimMessage(message) for message in turn.messages], from_tool=number > 0)
            for number, turn in enumerate(turns[:most])
        ]


def _texts(found: dict[str, msgspec.Raw], where: str) -> Iterator[str]:
    """Texts of users and tools; tool results become user messages, because the model has made no call."""
    if "messages" not in found:
        raise InputError(f"{where}: messages: missing; expected {EXPECTED}")
    messages = decode(bytes(found["messages"]), object, f"{where}: messages", EXPECTED)
    if isinstance(messages, str):
        messages = decode(messages.encode(), object, f"{where}: messages", EXPECTED)
    for message in messages_of(messages, where):
        if message["role"] in ("user", "tool"):
            yield VerbatimMessage(message).text


def _cut(texts: Sequence[str], options: DatasetOptions, index: int) -> DatasetSession | None:
    first, subsequent = _drawn_lengths(options, index)
    wanted = _drawn_turns(options, index)
    turns: list[DatasetTurn] = []
    at = 0
    while wanted is None or len(turns) < wanted:
        taken, at = take(texts, at, subsequent if turns else first, options.lengths)
        if not taken:
            break
        quoted = [VerbatimMessage({"role": "user", "content": text}) for text in taken]
        turns.append(DatasetTurn(quoted=quoted, from_tool=bool(turns)))
    return None if wanted is not None and len(turns) < wanted else turns or None


def take(texts: Sequence[str], at: int, tokens: int, lengths: TextLengths) -> tuple[list[str], int]:
    """Texts from number ``at`` on, up to ``tokens`` tokens, and the first unused number."""
    taken: list[str] = []
    left = tokens
    while at < len(texts) and left > 0:
        length = lengths.count(texts[at])
        taken.append(texts[at] if length <= left else lengths.cut(texts[at], left))
        left -= length
        at += 1
    return [text for text in taken if text], at


def _drawn_lengths(options: DatasetOptions, index: int) -> tuple[int, int]:
    spans = (options.first_turn_tokens or FIRST_TURN, options.subsequent_turn_tokens or SUBSEQUENT_TURN)
    first, subsequent = (
        _draw(span, options.seed, draws.Stream.PROMPT_LENGTH, index, turn) for turn, span in enumerate(spans)
    )
    return first, subsequent


def _drawn_turns(options: DatasetOptions, index: int) -> int | None:
    """Turns between the flags' bounds; null: as many as the texts make."""
    if options.max_turns is None:
        return options.min_turns
    return _draw(
        LengthDistribution(options.min_turns or 1, options.max_turns), options.seed, draws.Stream.TURN_COUNT, index
    )


def _draw(span: LengthDistribution, seed: int, stream: "draws.Stream", *counters: int) -> int:
    positions = (np.array([counter], dtype=np.uint64) for counter in counters)
    return int(quantities(span, draws.draw_each(seed, stream, *positions))[0])
