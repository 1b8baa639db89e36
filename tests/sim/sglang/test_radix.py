"""SGLang's radix cache: states worked by hand, and random workloads against the rules written down slowly."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.__main__ import main
from sim.sglang.config import RadixConfig
from sim.sglang.radix import RadixPool, RadixTree
from tests.sim.cache.test_pool_command import SIX
from tests.sim.oracles import slow_radix
from tests.sim.oracles.integrity import check_tree, radix_nodes

Path_ = tuple[int, ...]


class Interned:
    """Chained hashes of paths in a small tree: equal numbers mean equal paths."""

    def __init__(self) -> None:
        self._keys: dict[Path_, int] = {}

    def keys(self, path: Path_) -> list[int]:
        return [self._keys.setdefault(path[: end + 1], len(self._keys)) for end in range(len(path))]

    def tokens(self, path: Path_, block_size: int) -> list[tuple[int, int]]:
        """Tokens of which no two different blocks share even the first."""
        return [(key, at) for key in self.keys(path) for at in range(block_size)]


def state(tree: RadixTree) -> list[tuple[int, int, int, int]]:
    """Each node as its span, its last block's key and its locks."""
    return sorted((node.start, node.end, node.keys[-1], node.locks) for node in radix_nodes(tree))


def test_nodes_split_where_chains_diverge() -> None:
    tree = RadixTree(block_size=4)
    tree.insert([1, 2, 3], 12)
    assert state(tree) == [(0, 12, 3, 0)]
    tree.insert([1, 2, 4, 5], 14)  # parts after block 2; its last block is started only
    assert state(tree) == [(0, 8, 2, 0), (8, 12, 3, 0), (8, 14, 5, 0)]
    assert tree.match([1, 2, 4, 5], 13).end == 13  # a lookup cuts too, here inside a block
    assert state(tree) == [(0, 8, 2, 0), (8, 12, 3, 0), (8, 13, 5, 0), (13, 14, 5, 0)]
    assert tree.match([1, 2, 4, 6], 16).end == 12  # another block 6: nothing of 5 hits
    assert state(tree) == [(0, 8, 2, 0), (8, 12, 3, 0), (8, 12, 4, 0), (12, 13, 5, 0), (13, 14, 5, 0)]
    assert tree.evictable_tokens == 18
    check_tree(tree)


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["match", "insert"]), PATHS, st.integers(0, 24), st.booleans()),
        st.tuples(st.sampled_from(["evict", "unlock"]), st.just(()), st.integers(0, 12), st.just(False)),
    ),
    max_size=40,
)


@settings(max_examples=120, deadline=None)
@given(sizes=st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)]), operations=OPERATIONS)
def test_radix_tree_equals_the_slow_tree(sizes: tuple[int, int], operations: list[Any]) -> None:
    block_size, page_size = sizes
    ours, slow, interned = RadixTree(block_size), slow_radix.SlowTree(page_size), Interned()
    held: list[tuple[Any, Any]] = []
    gone: list[tuple[Any, int]] = []
    for name, path, number, hold in operations:
        tokens = interned.tokens(path, block_size)[:number]
        if name == "evict":
            gone += [((node.keys[-1], (node.end - 1) % block_size), len(node)) for node in ours.evict(number)]
            slow.evict(number)
        elif name == "unlock" and held:
            node, other = held.pop(number % len(held))
            ours.unlock(node)
            slow.lock(other, -1)
        elif name in ("match", "insert"):
            complete = len(tokens) // page_size * page_size
            node, other = getattr(ours, name)(interned.keys(path), complete), getattr(slow, name)(tokens)
            assert node.end == other.depth()
            if hold:
                held.append((node, other))
                ours.lock(node)
                slow.lock(other)
        check_tree(ours)
        assert gone == slow.evicted
        assert (ours.evictable_tokens, ours.protected_tokens) == (slow.size(locked=False), slow.size(locked=True))
        assert state(ours) == sorted(
            (node.depth() - len(node.tokens), node.depth(), node.tokens[-1][0], node.locks)  # type: ignore[index]
            for node in slow.nodes()
        )


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4)]),
    capacity=st.integers(20, 60),
    chunk=st.sampled_from([None, 4, 8, 20]),
    requests=st.lists(st.tuples(PATHS, st.integers(1, 24), st.integers(0, 8)), max_size=25),
)
def test_pool_equals_the_slow_radix_pool(
    sizes: tuple[int, int], capacity: int, chunk: int | None, requests: list[Any]
) -> None:
    block_size, page_size = sizes
    config = RadixConfig(max_total_num_tokens=capacity, page_size=page_size, chunked_prefill_size=chunk)
    ours, slow, interned = RadixPool(config, block_size), slow_radix.SlowPool(capacity, page_size, chunk), Interned()
    for path, length, decoded in requests:
        tokens = interned.tokens(path, block_size)[:length]
        prompt = max(len(tokens) - decoded, 1)
        if not ours.fits(prompt, len(tokens) - prompt + 1):
            continue
        assert ours.run(interned.keys(path), prompt, len(tokens)) == slow.run(tokens, prompt)
        check_tree(ours.tree)
        assert (ours.tree.evicted_nodes, ours.tree.evicted_tokens) == (
            len(slow.tree.evicted),
            sum(length for _, length in slow.tree.evicted),
        )
        assert ours.tree.tokens == slow.tree.size()
        assert ours.tree.protected_tokens == 0


def pool(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["pool", *arguments, "--engine", "sglang", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_unlimited_cache_on_six_requests(capsys: pytest.CaptureFixture[str]) -> None:
    # As in vLLM's pool, but r3 hits three tokens of its third block too: all but the prompt's last.
    in_blocks = pool(capsys, SIX, "--page-size", "4")
    assert (in_blocks["hit_blocks"], in_blocks["hit_tokens"], in_blocks["evicted_nodes"]) == (9, 36, 0)
    in_tokens = pool(capsys, SIX)
    assert (in_tokens["hit_blocks"], in_tokens["hit_tokens"], in_tokens["evicted_nodes"]) == (9, 39, 0)


@pytest.mark.parametrize(
    ("blocks", "page_size", "expected"),
    [
        ("inf", "1", (105_592, 54_063_104, 0)),
        ("1001", "1", (12_821, 6_564_352, 35_985)),
        ("10001", "1", (59_827, 30_631_424, 34_331)),
        ("50001", "1", (102_004, 52_226_048, 25_691)),
        ("1001", "512", (12_853, 6_580_736, 29_663)),
        ("10001", "512", (61_104, 31_285_248, 25_892)),
        ("50001", "512", (102_226, 52_339_712, 17_797)),
    ],
)
def test_mooncake(
    mooncake: Path, capsys: pytest.CaptureFixture[str], blocks: str, page_size: str, expected: tuple[int, int, int]
) -> None:
    result = pool(capsys, str(mooncake), "--num-gpu-blocks", blocks, "--page-size", page_size)
    assert (result["hit_blocks"], result["hit_tokens"], result["evicted_nodes"]) == expected


def test_a_prompt_with_log_probabilities_has_no_hit() -> None:
    pool = RadixPool(RadixConfig(), block_size=4)
    assert pool.run([1, 2, 3], 12, 12) == 0
    assert pool.run([1, 2, 3], 12, 12, prompt_logprobs=True) == 0
    assert pool.run([1, 2, 3], 12, 12) == 11  # all but the last token, in pages of one
