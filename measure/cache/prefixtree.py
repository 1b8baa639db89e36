"""Prompts as a tree of prefixes: runs of blocks that the same requests have, and the tokens that each run saves.

A chained hash names its whole prefix, so block hashes form a tree. A block saves its tokens for each request that finds
it in an unlimited cache (``measure.cache.reusable``): the tree's sum is that cache's hits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from measure.cache.chains import Chains
from measure.machinecode.entries import entry
from tracefile.records.arrays import BoolArray, Int32Array, IntArray

_ROOT: Final = -1
_UNSEEN: Final = -2
_NOT_CHAINED: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixNode:
    """A run of blocks that follow one another in the same requests; or several small subtrees together."""

    parent: int | None
    """Place of the node before it. Null: prompts begin with it."""
    name: str
    """First 8 hexadecimal digits of the hash that ends the run. Empty: several subtrees."""
    prefixes: int
    """Subtrees: 1, or as many as are summed."""
    from_tokens: int
    to_tokens: int
    """End of its tokens in a prompt; of several subtrees, at their mean length."""
    requests: int
    sessions: int | None
    """Null: several subtrees, or no session is named."""
    saved_tokens: int
    """Tokens of its blocks that requests find in an unlimited cache; of several subtrees, with all that follows."""
    below_tokens: int
    """The same with all that follows it."""
    served_tokens: int
    """Of these, tokens that the engine reports as cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """Runs that save the most, parents before their children; the others are summed by parent."""

    nodes: list[PrefixNode]
    saved_tokens: int
    """Of all."""
    own_session_tokens: int
    """Of these, tokens that earlier requests of the same session had brought."""


class TreeRequests(NamedTuple):
    """Findings and sessions of the requests of ``Chains``."""

    hits: IntArray
    """Leading blocks in an unlimited cache, by request."""
    served: IntArray
    """Leading blocks in the engine's, as it reports."""
    rows: IntArray
    """Requests by session and arrival."""
    firsts: BoolArray
    """True where a place in ``rows`` begins a session; a request without a session is one of its own."""
    named: bool
    """True: the trace names sessions."""


class _Visits(NamedTuple):
    """Counts by number of block."""

    requests: Int32Array
    sessions: Int32Array
    saved: Int32Array
    served: Int32Array
    parent: Int32Array
    """Number of the block before it; _ROOT: none."""
    last: Int32Array
    """Session of the latest request with it."""
    brought: Int32Array
    """The same, an output that holds it included."""


class _Runs(NamedTuple):
    """Runs of blocks that save anything, parents before children."""

    parent: IntArray
    first: IntArray
    """Blocks before the run."""
    blocks: IntArray
    last: IntArray
    """Number of its last block."""
    saved: IntArray
    served: IntArray
    below: IntArray
    """Saved by the run and all that follows it."""
    served_below: IntArray


def prefix_tree(chains: Chains, requests: TreeRequests, most: int = 200) -> PrefixTree | None:
    """Return the ``most`` runs of blocks that save the most; null: the hashes are no chains.

    Numbers of ``chains`` have to be in order of first occurrence, so that a block's is above its parent's.
    """
    distinct = len(chains.hashes)
    counts, places = np.zeros((4, distinct), np.int32), np.full((3, distinct), _UNSEEN, np.int32)
    visits = _Visits(*counts, *places)
    own = _count_visits(chains, requests, visits)
    if own == _NOT_CHAINED:
        return None
    run_of = np.full(distinct, _ROOT, np.int32)
    runs = _Runs(*np.zeros((len(_Runs._fields), _number_runs(visits, run_of)), np.int64))
    _fill_runs(visits, run_of, runs)
    return PrefixTree(
        nodes=list(_nodes(chains, visits, runs, most, named=requests.named)),
        saved_tokens=int(runs.saved.sum()) * chains.block_size,
        own_session_tokens=own * chains.block_size,
    )


@entry
def _count_visits(chains: Chains, requests: TreeRequests, visits: _Visits) -> int:  # pragma: no cover - compiled
    """Count each block's requests; return the hits that a request's own session brought, or _NOT_CHAINED."""
    own = 0
    session = -1
    for place in range(len(requests.rows)):
        row = requests.rows[place]
        session += requests.firsts[place]
        start = chains.starts[row]
        before = _ROOT
        for depth in range(max(chains.true[row], 0)):
            number = chains.numbers[start + depth]
            if visits.requests[number] == 0:
                visits.parent[number] = before
            elif visits.parent[number] != before:
                return _NOT_CHAINED
            visits.requests[number] += 1
            if depth < requests.hits[row]:
                visits.saved[number] += 1
                visits.served[number] += depth < requests.served[row]
                own += visits.brought[number] == session
            if visits.sessions[number] == 0 or visits.last[number] != session:
                visits.sessions[number] += 1
            visits.last[number] = visits.brought[number] = session
            before = number
        if chains.true[row] == chains.prompts[row]:
            for depth in range(chains.prompts[row], chains.prompts[row] + chains.outputs[row]):
                visits.brought[chains.numbers[start + depth]] = session
    return own


@entry
def _number_runs(visits: _Visits, run_of: Int32Array) -> int:  # pragma: no cover - compiled
    """Write the run of each block, and return how many there are: a block goes on with its parent's run if it has the
    same requests."""
    count = 0
    for number in range(len(run_of)):
        if visits.saved[number] == 0:
            continue
        parent = visits.parent[number]
        if parent >= 0 and visits.requests[parent] == visits.requests[number]:
            run_of[number] = run_of[parent]
        else:
            run_of[number] = count
            count += 1
    return count


@entry
def _fill_runs(visits: _Visits, run_of: Int32Array, runs: _Runs) -> None:  # pragma: no cover - compiled
    parents, first, blocks, last = runs.parent, runs.first, runs.blocks, runs.last
    saved, served, below, served_below = runs.saved, runs.served, runs.below, runs.served_below
    for number in range(len(run_of)):
        run = run_of[number]
        if run < 0:
            continue
        if blocks[run] == 0:
            parent = visits.parent[number]
            parents[run] = run_of[parent] if parent >= 0 else _ROOT
            first[run] = first[parents[run]] + blocks[parents[run]] if parent >= 0 else 0
        blocks[run] += 1
        last[run] = number
        saved[run] += visits.saved[number]
        served[run] += visits.served[number]
    for run in range(len(parents) - 1, -1, -1):
        below[run] += saved[run]
        served_below[run] += served[run]
        if parents[run] >= 0:
            below[parents[run]] += below[run]
            served_below[parents[run]] += served_below[run]


def _nodes(chains: Chains, visits: _Visits, runs: _Runs, most: int, *, named: bool) -> Iterator[PrefixNode]:
    """Yield the kept runs, then the others by parent: below a kept run, or at the beginning of prompts."""
    size, count = chains.block_size, len(runs.parent)
    kept_runs = np.sort(np.argsort(-runs.below, kind="stable")[:most])
    node_of = np.full(count + 1, _ROOT)  # one more, for the parent of those that begin prompts
    node_of[kept_runs] = np.arange(len(kept_runs))
    for run in kept_runs.tolist():
        number, parent, first = int(runs.last[run]), int(node_of[runs.parent[run]]), int(runs.first[run])
        yield PrefixNode(
            parent=None if parent == _ROOT else parent,
            name=f"{int(chains.hashes[number]):016x}"[:8],
            prefixes=1,
            from_tokens=first * size,
            to_tokens=(first + int(runs.blocks[run])) * size,
            requests=int(visits.requests[number]),
            sessions=int(visits.sessions[number]) if named else None,
            saved_tokens=int(runs.saved[run]) * size,
            below_tokens=int(runs.below[run]) * size,
            served_tokens=int(runs.served[run]) * size,
        )
    dropped = np.flatnonzero(node_of[:count] == _ROOT)
    tops = dropped[(runs.parent[dropped] == _ROOT) | (node_of[runs.parent[dropped]] != _ROOT)]
    for parent in np.unique(node_of[runs.parent[tops]]).tolist():
        some = tops[node_of[runs.parent[tops]] == parent]
        requests, below = int(visits.requests[runs.last[some]].sum()), int(runs.below[some].sum())
        first = 0 if parent == _ROOT else int((runs.first + runs.blocks)[kept_runs[parent]])
        yield PrefixNode(
            parent=None if parent == _ROOT else parent,
            name="",
            prefixes=len(some),
            from_tokens=first * size,
            to_tokens=(first + -(-below // requests)) * size,
            requests=requests,
            sessions=None,
            saved_tokens=below * size,
            below_tokens=below * size,
            served_tokens=int(runs.served_below[some].sum()) * size,
        )
