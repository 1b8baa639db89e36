"""Requests one at a time through vLLM's block pool. mypyc compiles this module; it runs uncompiled, too."""

from librt.vecs import vec
from mypy_extensions import i64, u8

from sim.vllm.segments import BlockTable, SegmentPool


class Columns:
    """Requests as numbers: ``known_keys`` blocks of a chain have known keys, from the pool's ``keys[first_key]`` on,
    ``prompt_blocks`` of these in the prompt, ``most_hits`` of which may hit (rule 6). At its end a request holds
    ``num_blocks``, ``full_blocks`` of them full (rule 11)."""

    def __init__(
        self,
        *,
        first_key: vec[i64],
        known_keys: vec[i64],
        prompt_blocks: vec[i64],
        most_hits: vec[i64],
        full_blocks: vec[i64],
        num_blocks: vec[i64],
    ) -> None:
        self.first_key = first_key
        self.known_keys = known_keys
        self.prompt_blocks = prompt_blocks
        self.most_hits = most_hits
        self.full_blocks = full_blocks
        self.num_blocks = num_blocks


class RequestHits:
    """By request: hit blocks; where evictions are noted, also leading blocks of its ``prompt_blocks`` that were cached
    at its arrival, and that ever were."""

    def __init__(self) -> None:
        self.hits: list[int] = []
        self.cached_blocks: list[int] = []
        self.seen_blocks: list[int] = []


def run_requests(pool: SegmentPool, columns: Columns, evicted: vec[u8]) -> RequestHits:
    """Look each request up, give it its blocks, fill and release them; stop where the keys are not chained.

    ``evicted``: by key, where keys are numbers from 0 on, 1 if it ever was; empty: evictions are not noted.
    """
    result = RequestHits()
    request = BlockTable()
    for row in range(i64(len(columns.num_blocks))):
        request.first_key = columns.first_key[row]
        request.known_keys = columns.known_keys[row]
        request.num_blocks = columns.num_blocks[row]
        if len(evicted) > 0:
            cached = pool.lookup(request, columns.prompt_blocks[row])
            result.cached_blocks.append(cached)
            result.seen_blocks.append(_seen_until(pool, request, cached, columns.prompt_blocks[row], evicted))
        hits = pool.hold(request, columns.most_hits[row])
        request.tail = None  # a new segment behind the hits, where the next requests branch off too
        if len(evicted) > 0:
            pool.note_evictions(request.num_blocks - hits, evicted)
        pool.take(request.num_blocks - hits)
        pool.publish(request, hits, columns.full_blocks[row])
        pool.release(request)
        result.hits.append(hits)
        if pool.not_chained:
            break
    return result


def _seen_until(pool: SegmentPool, request: BlockTable, depth: i64, end: i64, evicted: vec[u8]) -> i64:
    """Depth up to which the request's blocks from ``depth`` on were evicted before, at most ``end``."""
    while depth < end and evicted[pool.keys[request.first_key + depth]] == 1:
        depth += 1
    return depth
