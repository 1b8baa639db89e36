"""Requests one at a time through vLLM's block pool. mypyc compiles this module; it runs uncompiled, too."""

from librt.vecs import vec
from mypy_extensions import i64, u8

from sim.vllm.segments import BlockTable, SegmentPool

FIELDS = ("first_key", "known_keys", "prompt_blocks", "most_hits", "full_blocks", "num_blocks")
"""Numbers of a request: ``known_keys`` blocks of its chain have known keys, from the pool's ``keys[first_key]`` on,
``prompt_blocks`` of these in the prompt, ``most_hits`` of which may hit (rule 6). At its end it holds ``num_blocks``,
``full_blocks`` of them full (rule 11)."""


def run_requests(pool: SegmentPool, requests: vec[i64], evicted: vec[u8]) -> list[list[int]]:
    """Look each request up, give it its blocks, fill and release them; stop where the keys are not chained.

    Return the hit blocks of each request; where evictions are noted, also its leading prompt blocks that were cached at
    its arrival, and those that ever were.

    ``requests``: their ``FIELDS``, one request after another.
    ``evicted``: by key, where keys are numbers from 0 on, 1 if it ever was; empty: evictions are not noted.
    """
    all_hits: list[int] = []
    cached: list[int] = []
    seen: list[int] = []
    request = BlockTable()
    for at in range(i64(0), i64(len(requests)), i64(6)):
        request.first_key = requests[at]
        request.known_keys = requests[at + 1]
        prompt_blocks = requests[at + 2]
        request.num_blocks = requests[at + 5]
        if len(evicted) > 0:
            depth = pool.lookup(request, prompt_blocks)
            cached.append(depth)
            while depth < prompt_blocks and evicted[pool.keys[request.first_key + depth]] == 1:
                depth += 1
            seen.append(depth)
        hits = pool.hold(request, requests[at + 3])
        request.tail = None  # a new segment behind the hits, where the next requests branch off too
        if len(evicted) > 0:
            pool.note_evictions(request.num_blocks - hits, evicted)
        pool.take(request.num_blocks - hits)
        pool.publish(request, hits, requests[at + 4])
        pool.release(request)
        all_hits.append(hits)
        if pool.not_chained:
            break
    return [all_hits, cached, seen]
