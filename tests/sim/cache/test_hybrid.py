"""Hits of several KV groups, one request at a time: against the scheduler and the readable cache."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.__main__ import main
from sim.cache.pool import empty_group_cache
from sim.vllm.kvgroups import parse_groups
from sim.workload.prompts import Prompts
from tests.sim.oracles.hybrid_pool import HybridPool
from tests.sim.oracles.readable.request import Request
from tests.sim.vllm.test_hybrid_oracle import make_hybrid
from tests.sim.vllm.test_vllm_oracle import Keys

SIX = str(Path(__file__).parent.parent / "data" / "six_requests.jsonl")


def system_prompts(folder: Path) -> str:
    """Twenty requests of 300 tokens that share the first 240."""
    hashes_by = {"algorithm": "xxh3_64", "key_id": "synthetic"}
    meta = {"schema": "kvtape/1", "source": "client", "block_size": 16, "hash": hashes_by}
    lines: list[dict[str, Any]] = [{"meta": meta}]
    for number in range(20):
        hashes = [*range(1, 16), *(1000 * (number + 1) + position for position in range(3))]
        lines.append(
            {
                "request_id": f"r{number}",
                "arrival_ms": 10.0 * number,
                "prompt_tokens": 300,
                "output_tokens": 2,
                "block_hashes": hashes,
            }
        )
    path = folder / "system.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return " ".join(capsys.readouterr().out.split())


def test_short_system_prompt_has_no_hits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = system_prompts(tmp_path)
    text = output_of(capsys, "pool", trace, "--kv-groups", "full:784+mamba:784*3")
    assert "hits of multiples of 784 tokens: 0 of 6,000 input tokens hit (0.00%)" in text
    # A finer match unit does not help: inside a block only the end of a complete prompt is cached.
    text = output_of(capsys, "pool", trace, "--kv-groups", "full:784+mamba:784*3+match=16")
    assert "hits of multiples of 16 tokens: 0 of 6,000 input tokens hit (0.00%)" in text


def test_windows_without_retention_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "pool", system_prompts(tmp_path), "--kv-groups", "full:16+window(64):16*3")
    assert "4,320 of 6,000 input tokens hit (72.00%)" in text


@pytest.mark.parametrize(("blocks", "hits"), [("inf", 36), ("5", 28)])
def test_a_single_group_equals_the_simple_pool(blocks: str, hits: int, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["pool", SIX, "--num-gpu-blocks", blocks, "--json"]
    simple = json.loads(output_of(capsys, *flags))
    grouped = json.loads(output_of(capsys, *flags, "--kv-groups", "full:4"))
    assert (grouped.pop("kv_groups"), grouped.pop("alignment")) == ("full:4", 4)
    assert grouped == simple
    assert grouped["hit_tokens"] == hits


def as_requests(prompts: Prompts) -> list[Request]:
    """The same requests for the readable cache."""
    columns = (prompts.prompt_tokens, prompts.computed_tokens, prompts.unread)
    return [
        Request(
            str(position), tokens, computed + 1 - tokens, prompts.keys[first:end].tolist(), prompt_logprobs=bool(unread)
        )
        for position, (tokens, computed, unread, first, end) in enumerate(
            zip(*(column.tolist() for column in columns), prompts.starts[:-1], prompts.starts[1:], strict=True)
        )
    ]


def make_prompts(unit: int, tokens: list[int], outputs: list[int], unread: list[bool], chains: Any) -> Prompts:
    """Requests of these lengths and known keys."""
    prompt_tokens = np.array(tokens, np.int64)
    return Prompts(
        block_size=unit,
        prompt_tokens=prompt_tokens,
        computed_tokens=prompt_tokens + np.array(outputs, np.int64) - 1,
        unread=np.array(unread, np.int64),
        turn=np.zeros(len(tokens), np.int64),
        arrival_ms=np.zeros(len(tokens)),
        hashed_blocks=np.array([len(chain) for chain in chains], np.int64),
        keys=np.array([key for chain in chains for key in chain], np.uint64),
    )


def prompts_of(workload: dict[str, Any]) -> Prompts:
    keys, unit, specs = Keys(), workload["config"]["block_size"], workload["requests"]
    tokens, outputs = ([len(spec[name]) for spec in specs] for name in ("prompt", "output"))
    unread = [spec["prompt_logprobs"] for spec in specs]
    return make_prompts(unit, tokens, outputs, unread, [keys.chain(spec, unit) for spec in specs])


@given(seed=st.integers(0, 10**6), blocks=st.sampled_from([60, 90, 150]))
@settings(max_examples=60, deadline=None)
def test_hits_equal_the_readable_cache(seed: int, blocks: int) -> None:
    """Groups and workloads at random: hits, and then the complete free queue."""
    workload = make_hybrid(seed)
    layout, prompts = parse_groups(workload["config"]["kv_groups"]), prompts_of(workload)
    cache, readable = empty_group_cache(layout, blocks), HybridPool(layout, blocks)
    for request, again in zip(as_requests(prompts), prompts.requests(), strict=True):
        tokens = cache.serve_alone(again)
        assert readable.run(request) == (None if tokens < 0 else tokens)
    queue, block = [], cache.pool.null.after
    while block is not cache.pool.null:
        queue.append((block.number, block.first_key is not None))
        block = block.after
    theirs = readable.scheduler.pool
    hashed = [number for number, _ in queue if number > 0]
    expected = [number for number in theirs.free_order() if number in hashed]  # absent blocks were never allocated
    assert hashed == expected
    assert [is_cached for number, is_cached in queue if number > 0] == [
        theirs.key_of(number) is not None for number in hashed
    ]
    assert cache.pool.evicted_blocks == theirs.evicted_blocks


@pytest.mark.parametrize("seed", range(3))
def test_hits_of_sequential_requests_equal_the_schedulers(seed: int) -> None:
    workload = make_hybrid(seed)
    layout, prompts = parse_groups(workload["config"]["kv_groups"]), prompts_of(workload)
    alone, stepped = HybridPool(layout, 400), HybridPool(layout, 400).scheduler
    for again, request in zip(as_requests(prompts), as_requests(prompts), strict=True):
        stepped.add(request)
        while stepped.has_work:
            stepped.finish_step(stepped.schedule())
        assert alone.run(again) == request.cached_tokens
    assert alone.scheduler.pool.num_free == stepped.pool.num_free
