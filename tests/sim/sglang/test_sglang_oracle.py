"""Our radix tree and pool against SGLang's own: every operation and request of many random workloads."""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sim.sglang.config import RadixConfig
from sim.sglang.radix import RadixPool, RadixTree
from tests.sim.oracles.integrity import check_tree

SCRIPT = Path(__file__).parents[1] / "oracles" / "sglang_radix.py"
SIZES = [(1, 1), (4, 1), (4, 2), (4, 4), (8, 4)]
"""Tokens in a block, as a trace would know it, and in a page."""

Load = dict[str, Any]


def random_path(rng: random.Random) -> list[int]:
    """A chain in a small tree, as its blocks' keys: an integer identifies a block and all blocks before it."""
    path, key = [], 0
    for _ in range(rng.randrange(1, 7)):
        key = key * 3 + rng.choice([1, 1, 2, 3])
        path.append(key)
    return path


def tokens_of(keys: list[int], block_size: int) -> list[int]:
    """Token ids of which no two different blocks share even the first."""
    return [key * block_size + at for key in keys for at in range(block_size)]


def make_operations(seed: int) -> Load:
    """Lookups, insertions and evictions, with locks that are held for a while."""
    rng = random.Random(seed)
    block_size, page_size = rng.choice(SIZES)
    operations: list[Any] = []
    for _ in range(rng.randrange(20, 80)):
        name = rng.choice(["match", "match", "insert", "insert", "insert", "evict", "unlock"])
        keys = random_path(rng)
        number = rng.randrange(1, len(keys) * block_size + 1) if name in ("match", "insert") else rng.randrange(12)
        operations.append((name, keys, number, rng.random() < 0.3))
    return {"block_size": block_size, "page_size": page_size, "operations": operations}


def make_requests(seed: int) -> Load:
    """Requests one at a time on a pool too small for all that they share."""
    rng = random.Random(seed)
    block_size, page_size = rng.choice(SIZES)
    chunk = rng.choice([None, 4, 8, 20])
    config = RadixConfig(
        max_total_num_tokens=rng.randrange(24, 90),
        page_size=page_size,
        chunked_prefill_size=chunk,
    )
    pool = RadixPool(config, block_size)
    requests: list[tuple[list[int], int, int]] = []
    for _ in range(rng.randrange(10, 60)):
        keys = random_path(rng)
        computed = rng.randrange(1, len(keys) * block_size + 1)
        prompt = max(computed - rng.choice([0, 0, 1, 5, 12]), 1)
        if pool.fits(prompt, computed - prompt + 1):
            requests.append((keys, prompt, computed))
    return {"block_size": block_size, "config": config, "requests": requests}


def as_tokens(load: Load) -> Load:
    """The same for SGLang, which sees tokens and knows no blocks."""
    size = load["block_size"]
    if "operations" in load:
        operations = [
            (name, tokens_of(keys, size)[:number] if name in ("match", "insert") else [], number, hold)
            for name, keys, number, hold in load["operations"]
        ]
        return {"page_size": load["page_size"], "operations": operations}
    config: RadixConfig = load["config"]
    return {
        "room": config.max_total_num_tokens,
        "page_size": config.page_size,
        "chunk": config.chunked_prefill_size,
        "requests": [
            {"tokens": tokens_of(keys, size)[:computed], "prompt": prompt}
            for keys, prompt, computed in load["requests"]
        ],
    }


class Watched(RadixTree):
    """Records evictions in the format of the SGLang script: each node's last token and length."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.gone: list[list[int]] = []

    def evict(self, tokens: int) -> list[Any]:
        evicted = super().evict(tokens)
        size = self.block_size
        self.gone += [[node.keys[-1] * size + (node.end - 1) % size, len(node)] for node in evicted]
        return evicted

    def state(self, hits: int) -> Load:
        check_tree(self)
        return {
            "hits": hits,
            "evictable": self.evictable_tokens,
            "protected": self.protected_tokens,
            "evicted": list(self.gone),
        }


def our_states(load: Load) -> list[Load]:
    tree, states = Watched(load["block_size"]), []
    if "requests" in load:
        pool = RadixPool(load["config"], load["block_size"])
        pool.tree = tree = Watched(load["block_size"])
        return [tree.state(pool.run(*request)) for request in load["requests"]]
    held: list[Any] = []
    for name, keys, number, hold in load["operations"]:
        hits = 0
        if name == "evict":
            tree.evict(number)
        elif name == "unlock" and held:
            tree.unlock(held.pop(number % len(held)))
        elif name in ("match", "insert"):
            before = tree.tokens
            complete = number // load["page_size"] * load["page_size"]
            node = getattr(tree, name)(keys, complete)
            hits = node.end - (tree.tokens - before)
            if hold:
                tree.lock(node)
                held.append(node)
        states.append(tree.state(hits))
    return states


@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_states_equal_sglang() -> None:
    python = os.environ.get("KVTAPE_SGLANG")
    if not python:
        pytest.skip("KVTAPE_SGLANG does not name a Python with SGLang")
    first, count = int(os.environ.get("KVTAPE_SEED", "0")), int(os.environ.get("KVTAPE_WORKLOADS", "60"))
    loads = [make(seed) for seed in range(first, first + count) for make in (make_operations, make_requests)]
    answer = subprocess.run(
        [python, SCRIPT],
        input=json.dumps([as_tokens(load) for load in loads]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    evictions = 0
    for number, (load, theirs) in enumerate(zip(loads, json.loads(answer.stdout), strict=True)):
        for step, (our, their) in enumerate(zip(our_states(load), theirs, strict=True)):
            assert our == their, f"workload {number}, step {step} of {load}"
        evictions += len(theirs[-1]["evicted"]) if theirs else 0
    assert evictions > count
