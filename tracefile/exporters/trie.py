"""Traces by session: trie's rows, a session each.

A session's turns are its requests from parent to child. Where several continue one, the branch that goes on longest is
taken and the others begin sessions of their own; a prompt shorter than the context before (compaction) begins one, too.
A request that gave no output (an abort, an error) is left out, and what was new in it counts as new in the next turn.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from tracefile.exporters.loss import Loss, with_lengths
from tracefile.importers.trie import TrieTurn, trie_row
from tracefile.records.schema import Record, RequestId

BRANCHES = "branch off from a session: they begin sessions of their own"
COMPACTED = "are shorter than the context before: they begin sessions of their own"


@dataclass(slots=True)
class Node:
    """Request in the tree of its session."""

    record: Record
    children: list["Node"] = field(default_factory=list)
    depth: int = 1
    """Requests on the longest path from here."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Request of a linear session."""

    record: Record
    new_tokens: int
    """Prompt tokens beyond the prompt and the output before."""


def linear_sessions(records: Iterable[Record], loss: Loss) -> Iterator[list[Turn]]:
    """Sessions without branches, by arrival of their first requests."""
    kept = sorted(_with_output(records, loss), key=lambda record: (record.arrival_ms or 0.0, record.turn or 0))
    nodes = {record.request_id: Node(record) for record in kept}
    parents = _parents(kept, nodes)
    roots: list[Node] = []
    for node in reversed(nodes.values()):
        # A child arrives after its parent, so that its depth is final here.
        parent = parents.get(node.record.request_id)
        if parent is None:
            roots.append(node)
        else:
            parent.children.insert(0, node)
            parent.depth = max(parent.depth, node.depth + 1)
    for root in reversed(roots):
        yield from _paths(root, loss)


def _with_output(records: Iterable[Record], loss: Loss) -> Iterator[Record]:
    for record in with_lengths(records, loss):
        if record.prompt_tokens and record.output_tokens:
            yield record
        else:
            loss.left_out["no prompt, or no output"] += 1


def _parents(records: Sequence[Record], nodes: dict[RequestId, Node]) -> dict[RequestId, Node]:
    """Parents by request: as recorded or, where that was left out, the session's turn before."""
    found = {}
    last: dict[str, Node] = {}
    for record in records:
        node = nodes[record.request_id]
        parent = None if record.parent_id is None else nodes.get(record.parent_id)
        if parent is None and record.session_id is not None and (record.turn or 1) > 1:
            parent = last.get(record.session_id)
        if parent is not None and parent is not node:
            found[record.request_id] = parent
        if record.session_id is not None:
            last[record.session_id] = node
    return found


def _paths(root: Node, loss: Loss) -> Iterator[list[Turn]]:
    """The longest path from a root, cut where a prompt gets shorter, then its branches."""
    starts = [root]
    while starts:
        node: Node | None = starts.pop(0)
        turns: list[Turn] = []
        while node is not None:
            context = 0 if not turns else turns[-1].record.context_tokens()
            new_tokens = (node.record.prompt_tokens or 0) - context
            if turns and new_tokens <= 0:
                loss.changed[COMPACTED] += 1
                yield turns
                turns, new_tokens = [], node.record.prompt_tokens or 0
            turns.append(Turn(node.record, new_tokens))
            longest = max(node.children, key=lambda child: child.depth, default=None)
            branches = [child for child in node.children if child is not longest]
            loss.changed[BRANCHES] += len(branches)
            starts += branches
            node = longest
        yield turns


def trie_lines(records: Iterable[Record], loss: Loss) -> Iterator[bytes]:
    """trie's rows; a tool's latency is the think time, 0 where it is unknown."""
    for turns in linear_sessions(records, loss):
        loss.kept += len(turns)
        row = trie_row(
            [TrieTurn(turn.new_tokens, turn.record.output_tokens or 1, turn.record.think_ms) for turn in turns]
        )
        yield msgspec.json.encode(row) + b"\n"
