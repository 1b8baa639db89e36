"""The tree of prefixes: literal states, and every count against sets of prefixes."""

from collections import defaultdict
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from measure.cache.chains import Chains
from measure.cache.prefixtree import PrefixNode, PrefixTree, TreeRequests, prefix_tree

BLOCK = 16
Request = tuple[str, list[int], int, int]
"""Session, forks of the prompt's blocks, hits in an unlimited cache, hits of the engine."""


def tree_of(found: list[Request], most: int = 200, *, chained: bool = True) -> PrefixTree | None:
    """Blocks are named by the forks up to them."""
    names = [
        [tuple(forks[: at + 1]) if chained else (fork,) for at, fork in enumerate(forks)] for _, forks, *_ in found
    ]
    numbers: dict[tuple[int, ...], int] = {}
    values = [numbers.setdefault(block, len(numbers)) for blocks in names for block in blocks]
    lengths = np.array([len(blocks) for blocks in names], np.int64)
    none = np.zeros(len(found), np.int64)
    hashes = np.array([(number + 1) << 32 for number in range(len(numbers))], np.uint64)
    starts = np.cumsum(lengths) - lengths
    chains = Chains(BLOCK, np.array(values, np.int32), hashes, starts, lengths, lengths, none, none)
    sessions = [session for session, *_ in found]
    rows = np.array(sorted(range(len(found)), key=lambda row: (sessions.index(sessions[row]), row)), np.int64)
    firsts = np.array([not at or sessions[rows[at]] != sessions[rows[at - 1]] for at in range(len(rows))])
    hits, served = (np.array([one[place] for one in found], np.int64) for place in (2, 3))
    return prefix_tree(chains, TreeRequests(hits, served, rows, firsts, named=True), most)


SHARED = [
    # Two sessions on a prefix of three blocks; the second turn of each finds its first turn's block, too.
    ("a", [0, 0, 0, 1], 0, 0),
    ("b", [0, 0, 0, 2], 3, 3),
    ("a", [0, 0, 0, 1, 0, 0], 4, 3),
    ("b", [0, 0, 0, 2, 0, 0], 4, 4),
]


def node(**fields: Any) -> PrefixNode:
    return PrefixNode(**{"parent": None, "prefixes": 1, "sessions": None, **fields})


def test_a_run_is_a_node_and_width_is_what_follows_too() -> None:
    found = tree_of(SHARED)
    assert found is not None
    root, first, second = found.nodes
    shared = {"name": "00000003", "from_tokens": 0, "to_tokens": 48, "requests": 4, "sessions": 2}
    assert root == node(**shared, saved_tokens=9 * 16, below_tokens=11 * 16, served_tokens=9 * 16)
    own = {"parent": 0, "from_tokens": 48, "to_tokens": 64, "requests": 2, "sessions": 1}
    assert first == node(**own, name="00000004", saved_tokens=16, below_tokens=16, served_tokens=0)
    assert second == node(**own, name="00000005", saved_tokens=16, below_tokens=16, served_tokens=16)
    assert found.saved_tokens == 11 * 16
    # Session b's first turn found three blocks of a's; everything else was its own session's.
    assert found.own_session_tokens == 8 * 16


@st.composite
def requests_of(draw: Any) -> list[Request]:
    """Hits as an unlimited cache has them, or fewer; the engine may have any."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for _ in range(draw(st.integers(1, 14))):
        forks = draw(st.lists(st.integers(0, 1), max_size=6))
        hits = next((at for at in range(len(forks)) if tuple(forks[: at + 1]) not in seen), len(forks))
        seen |= {tuple(forks[: at + 1]) for at in range(len(forks))}
        found.append((draw(st.sampled_from("abc")), forks, draw(st.integers(0, hits)), draw(st.integers(0, 7))))
    return found


@given(requests_of(), st.integers(0, 6))
def test_every_count_by_sets_of_prefixes(found: list[Request], most: int) -> None:
    members: dict[tuple[int, ...], set[int]] = defaultdict(set)
    saved: dict[tuple[int, ...], int] = defaultdict(int)
    served: dict[tuple[int, ...], int] = defaultdict(int)
    for row, (_, forks, hits, engine) in enumerate(found):
        for at in range(len(forks)):
            block = tuple(forks[: at + 1])
            members[block].add(row)
            saved[block] += at < hits
            served[block] += at < min(hits, engine)
    worth = [block for block in members if saved[block]]
    below = {block: sum(saved[other] for other in worth if other[: len(block)] == block) for block in worth}
    # A run begins where the requests are others than the parent's; it ends before the next that does.
    heads = [block for block in worth if len(block) == 1 or members[block[:-1]] != members[block]]
    runs = {}
    for head in heads:
        inside = [other for other in worth if other[: len(head)] == head and members[other] == members[head]]
        runs[head] = (
            (len(head) - 1) * BLOCK,
            max(map(len, inside)) * BLOCK,
            len(members[head]),
            len({found[row][0] for row in members[head]}),
            sum(saved[block] for block in inside) * BLOCK,
            below[head] * BLOCK,
            sum(served[block] for block in inside) * BLOCK,
        )
    tree = tree_of(found)
    assert tree is not None
    assert tree.saved_tokens == sum(saved.values()) * BLOCK
    fields = ("from_tokens", "to_tokens", "requests", "sessions", "saved_tokens", "below_tokens", "served_tokens")
    assert sorted(tuple(getattr(one, name) for name in fields) for one in tree.nodes) == sorted(runs.values())
    fewer = tree_of(found, most)
    assert fewer is not None
    # Whatever is summed, nothing is lost, and a node's parts lie in it.
    tops = [one for one in fewer.nodes if one.parent is None]
    assert sum(one.below_tokens for one in tops) == tree.saved_tokens
    for place, one in enumerate(fewer.nodes):
        parts = sum(part.below_tokens for part in fewer.nodes if part.parent == place)
        assert one.saved_tokens + parts == one.below_tokens
    largest = sorted((one.below_tokens for one in tree.nodes), reverse=True)[:most]
    assert sorted((one.below_tokens for one in fewer.nodes if one.name), reverse=True) == largest
