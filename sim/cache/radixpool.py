"""SGLang's KV pool with one request at a time: the radix tree, and when its scheduler evicts from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sim.cache.pool import HitCounts
from sim.sglang.radix import RadixNode, RadixTree
from sim.sglang.radixconfig import RadixConfig
from sim.workload.chain import Chains, tokens_computed
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record


@dataclass(slots=True, kw_only=True)
class RadixCounts(HitCounts):
    """What the radix cache was worth. Blocks are the trace's, or pages where these are larger."""

    evicted_tokens: int = 0
    evicted_nodes: int = 0
    """Evictions: a node goes whole."""
    kv_tokens: int | None = None
    """Tokens that the pool has room for; null: endless."""
    page_size: int = 1

    @property
    def size(self) -> str:
        """The cache's size in words."""
        return "endless" if self.kv_tokens is None else f"{self.kv_tokens:,} tokens in pages of {self.page_size}"


class RadixPool:
    """The pool between requests. Everything in it is cached; what a request holds beside that ends with it."""

    __slots__ = ("_chunk", "_page", "_room", "tree")

    def __init__(self, config: RadixConfig, block_size: int) -> None:
        self.tree = RadixTree(block_size)
        self._page = config.page_size
        self._chunk = config.chunked_prefill_size
        room = config.max_total_num_tokens
        self._room = None if room is None else self._whole_pages(room)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether a request alone fits. SGLang keeps a page and a token back, and would cut its output short."""
        return self._room is None or self._started_pages(prompt_tokens) + output_tokens + self._page < self._room

    def run(self, keys: Sequence[int], prompt_tokens: int, computed_tokens: int) -> int:
        """Run a request that fits, from lookup to end; how many tokens of its prompt hit.

        ``keys`` are the hashes of every block it computes a token of, ``computed_tokens`` all of these.
        """
        tree = self.tree
        node = tree.match(keys, self._whole_pages(prompt_tokens - 1))
        tree.lock(node)
        hits = done = node.end
        while done < prompt_tokens:
            chunk = min(prompt_tokens - done, self._chunk or prompt_tokens)
            self._make_room(done, chunk + (self._page if self._page > 1 else 0))
            done += chunk
            if done < computed_tokens:
                node = self._checkpoint(node, keys, done)
        if computed_tokens > prompt_tokens:
            # Each decode step makes room for a page, whether it begins one or not: the last is the most demanding.
            begun = self._started_pages(computed_tokens - 1) - self._started_pages(prompt_tokens)
            self._make_room(prompt_tokens, begun + self._page)
        node = self._checkpoint(node, keys, computed_tokens)
        if 0 < self._whole_pages(prompt_tokens) < node.end:
            tree.insert(keys, self._whole_pages(prompt_tokens))
        tree.unlock(node)
        return hits

    def _checkpoint(self, node: RadixNode, keys: Sequence[int], tokens: int) -> RadixNode:
        """Cache the whole pages of what is computed, and lock that instead of ``node``."""
        reached = self.tree.insert(keys, self._whole_pages(tokens))
        self.tree.unlock(node)
        self.tree.lock(reached)
        return reached

    def _make_room(self, done: int, tokens: int) -> None:
        """Evict until ``tokens`` are free beside the tree and the started page of a request's ``done`` tokens."""
        if self._room is None:
            return
        started = self._started_pages(done) - self._whole_pages(done)
        self.tree.evict(tokens - (self._room - self.tree.tokens - started))

    def _whole_pages(self, tokens: int) -> int:
        return tokens // self._page * self._page

    def _started_pages(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page


def page_chains(meta: Meta, page_size: int, block_size: int | None) -> Chains:
    """Chains for a pool of such pages, at ``block_size`` or the trace's own, or at the pages' if they are larger.

    Raises InputError unless pages divide blocks, or blocks pages.
    """
    known = block_size or meta.block_size
    if known is not None and page_size % known and known % page_size:
        raise InputError(
            f"--page-size: {page_size} neither divides blocks of {known} tokens nor is a multiple of them; "
            f"expected 1, {known} or {2 * known}, for example"
        )
    return Chains(meta, max(page_size, known) if known else None)


def count_radix_hits(
    records: Iterable[Record], chains: Chains, config: RadixConfig, blocks: int | None = None
) -> RadixCounts:
    """Hits in SGLang's pool of ``config``, or of so many ``blocks``, one request at a time."""
    size = chains.block_size
    if config.max_total_num_tokens is None and blocks is not None:
        config = replace(config, max_total_num_tokens=blocks * size)
    room = config.max_total_num_tokens
    pool = RadixPool(config, size)
    counts = RadixCounts(
        block_size=size, blocks=None if room is None else room // size, kv_tokens=room, page_size=config.page_size
    )
    for record in records:
        counts.requests += 1
        prompt, computed = record.prompt_tokens or 0, tokens_computed(record)
        if not pool.fits(prompt, record.output_tokens or 0):
            counts.rejected += 1
            continue
        keys = chains.known(record)
        keys += chains.private(-(-computed // size) - len(keys))
        counts.count_tokens(record, pool.run(keys, prompt, computed))
    counts.evicted_nodes = pool.tree.evicted_nodes
    counts.evicted_tokens = pool.tree.evicted_tokens
    counts.evicted_blocks = counts.evicted_tokens // size
    return counts
