"""SGLang's radix cache: a tree of cached prefixes whose nodes are runs of tokens, evicted leaf by leaf.

A node has the tokens from ``start`` to ``end`` of a chain, and the hashes of the blocks that contain them. Equal hashes
mean equal tokens up to the end of the block; different hashes count as different from the first token of the block on.
A lookup or an insertion splits the node in which it ends, also inside a block. Time is the number of accesses.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from sim.sglang.config import RadixConfig


class RadixNode:
    """Radix tree node (SGLang's ``TreeNode``): tokens ``start`` to ``end`` of a cached prefix; none in the root."""

    __slots__ = ("children", "end", "keys", "last_access", "locks", "parent", "queued", "start")

    def __init__(self, parent: "RadixNode | None", keys: list[int], start: int, end: int, last_access: int) -> None:
        self.parent = parent
        self.keys = keys
        """Hashes of the blocks that contain its tokens."""
        self.start = start
        self.end = end
        self.last_access = last_access
        self.locks = 0
        """Requests in flight at this node or below (``lock_ref``); a locked node is not evicted."""
        self.children: dict[int, RadixNode] = {}
        """Children by the hash of the block of their first token."""
        self.queued = False
        """True: the eviction queue has an entry for the node, perhaps outdated."""

    def __len__(self) -> int:
        return self.end - self.start

    def path(self) -> Iterator["RadixNode"]:
        """Yield the node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixTree:
    """Radix tree of cached prefixes (SGLang's ``RadixCache``). A prefix is given by block hashes and a token count."""

    __slots__ = ("_clock", "_queue", "block_size", "evictable_tokens", "evicted_nodes", "evicted_tokens",
                 "protected_tokens", "root")  # fmt: skip

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = RadixNode(None, [], 0, 0, 0)
        self.evictable_tokens = 0
        """Tokens of unlocked nodes, including inner nodes, which become leaves by eviction of their children."""
        self.protected_tokens = 0
        """Tokens of locked nodes."""
        self.evicted_nodes = 0
        self.evicted_tokens = 0
        self._clock = 0
        self._queue: list[tuple[int, RadixNode]] = []

    @property
    def tokens(self) -> int:
        return self.evictable_tokens + self.protected_tokens

    def match(self, keys: Sequence[int], tokens: int) -> RadixNode:
        """Return the node at the end of the longest cached prefix (``match_prefix``); split a partial match."""
        node = self.root
        while node.end < tokens and (child := self._child(node, keys)):
            matched = self._matching_end(child, keys, tokens)
            if matched < child.end:
                node = self._split(child, matched)
                break
            node = child
        for ancestor in reversed(list(node.path())):
            ancestor.last_access = self._tick()
        return node

    def insert(self, keys: Sequence[int], tokens: int) -> RadixNode:
        """Cache the first ``tokens`` of a chain and return their last node; access the nodes of the cached prefix."""
        node = self.root
        while node.end < tokens and (child := self._child(node, keys)):
            child.last_access = self._tick()
            matched = self._matching_end(child, keys, tokens)
            node = child if matched == child.end else self._split(child, matched)
        if node.end == tokens:
            return node
        first, size = node.end // self.block_size, self.block_size
        leaf = RadixNode(node, list(keys[first : -(-tokens // size)]), node.end, tokens, self._tick())
        node.children[leaf.keys[0]] = leaf
        self.evictable_tokens += len(leaf)
        self._queue_if_leaf(leaf)
        return leaf

    def lock(self, node: RadixNode) -> None:
        """Protect a node and its ancestors from eviction (``inc_lock_ref``)."""
        for ancestor in node.path():
            if ancestor.locks == 0:
                self.evictable_tokens -= len(ancestor)
                self.protected_tokens += len(ancestor)
            ancestor.locks += 1

    def unlock(self, node: RadixNode) -> None:
        for ancestor in node.path():
            ancestor.locks -= 1
            if ancestor.locks == 0:
                self.evictable_tokens += len(ancestor)
                self.protected_tokens -= len(ancestor)
                self._queue_if_leaf(ancestor)

    def evict(self, tokens: int) -> list[RadixNode]:
        """Evict complete leaves, least recently used first, until ``tokens`` are freed or no leaf is left."""
        evicted: list[RadixNode] = []
        freed = 0
        while freed < tokens and (leaf := self._next_leaf()):
            parent = leaf.parent
            assert parent is not None  # the root is never queued
            del parent.children[leaf.keys[0]]
            freed += len(leaf)
            evicted.append(leaf)
            self._queue_if_leaf(parent)
        self.evictable_tokens -= freed
        self.evicted_tokens += freed
        self.evicted_nodes += len(evicted)
        return evicted

    def _child(self, node: RadixNode, keys: Sequence[int]) -> RadixNode | None:
        return node.children.get(keys[node.end // self.block_size])

    def _matching_end(self, node: RadixNode, keys: Sequence[int], tokens: int) -> int:
        """Return the tokens from the root up to which a node matches the prefix; its first block matches."""
        first, end = node.start // self.block_size, min(node.end, tokens)
        last = (end - 1) // self.block_size
        node_keys = node.keys
        if node_keys[last - first] == keys[last]:  # hashes are chained: all earlier blocks match
            return end
        return (first + bisect_left(range(last - first), True, key=lambda at: node_keys[at] != keys[first + at])) * (
            self.block_size
        )

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Split a node after token ``at`` (``_split_node``); return the new parent. The child is accessed after it."""
        parent = node.parent
        assert parent is not None
        first = node.start // self.block_size
        upper = RadixNode(parent, node.keys[: -(-at // self.block_size) - first], node.start, at, self._tick())
        upper.locks = node.locks
        parent.children[upper.keys[0]] = upper
        node.keys = node.keys[at // self.block_size - first :]
        node.start, node.parent, node.last_access = at, upper, self._tick()
        upper.children[node.keys[0]] = node
        return upper

    def _queue_if_leaf(self, node: RadixNode) -> None:
        if not (node.children or node.locks or node.queued or node is self.root):
            node.queued = True
            heapq.heappush(self._queue, (node.last_access, node))

    def _next_leaf(self) -> RadixNode | None:
        """Pop the least recently used unlocked leaf from the eviction queue; skip outdated entries."""
        while self._queue:
            queued_at, node = heapq.heappop(self._queue)
            node.queued = False
            if node.last_access == queued_at and not (node.children or node.locks):
                return node
            self._queue_if_leaf(node)
        return None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


class RadixPool:
    """SGLang's KV cache for one request at a time: the radix tree and the scheduler's eviction rule."""

    __slots__ = ("_capacity", "_chunk", "_page", "tree")

    def __init__(self, config: RadixConfig, block_size: int) -> None:
        self.tree = RadixTree(block_size)
        self._page = config.page_size
        self._chunk = config.chunked_prefill_size
        capacity = config.max_total_num_tokens
        self._capacity = None if capacity is None else self._full_pages(capacity)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether a request alone fits. SGLang reserves a page and a token, and would truncate the output."""
        return (
            self._capacity is None or self._started_pages(prompt_tokens) + output_tokens + self._page < self._capacity
        )

    def run(
        self,
        keys: Sequence[int],
        prompt_tokens: int,
        computed_tokens: int,
        *,
        prompt_logprobs: bool = False,
    ) -> int:
        """Run a request that fits; return its prefix hit in tokens. ``keys``: block hashes of all ``computed_tokens``.

        ``prompt_logprobs``: log probabilities of the prompt are requested, so the complete prompt is computed.
        """
        tree = self.tree
        node = tree.match(keys, 0 if prompt_logprobs else self._full_pages(prompt_tokens - 1))
        tree.lock(node)
        hits = computed = node.end
        while computed < prompt_tokens:
            chunk = min(prompt_tokens - computed, self._chunk or prompt_tokens)
            self._evict_for(computed, chunk + (self._page if self._page > 1 else 0))
            computed += chunk
            if computed < computed_tokens:
                node = self._checkpoint(node, keys, computed)
        if computed_tokens > prompt_tokens:
            # Every decode step evicts for a page, also inside a page: the last step needs the most.
            new_pages = self._started_pages(computed_tokens - 1) - self._started_pages(prompt_tokens)
            self._evict_for(prompt_tokens, new_pages + self._page)
        node = self._checkpoint(node, keys, computed_tokens)
        if 0 < (full := self._full_pages(prompt_tokens)) < node.end:
            tree.insert(keys, full)  # a separate node: the prompt is evicted after its output
        tree.unlock(node)
        return hits

    def _checkpoint(self, node: RadixNode, keys: Sequence[int], tokens: int) -> RadixNode:
        reached = self.tree.insert(keys, self._full_pages(tokens))
        self.tree.unlock(node)
        self.tree.lock(reached)
        return reached

    def _evict_for(self, computed: int, tokens: int) -> None:
        """Evict until ``tokens`` are free, besides the tree and the partial page of the ``computed`` tokens."""
        if self._capacity is None:
            return
        started = self._started_pages(computed) - self._full_pages(computed)
        self.tree.evict(tokens - (self._capacity - self.tree.tokens - started))

    def _full_pages(self, tokens: int) -> int:
        return tokens // self._page * self._page

    def _started_pages(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page
