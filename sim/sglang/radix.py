"""SGLang's radix cache: cached prefixes as a tree whose nodes are runs of tokens, evicted leaf by leaf.

A node is a piece of a chain: the tokens from ``start`` to ``end``, under the hashes of the blocks these lie in. Equal
hashes mean equal tokens up to that block's end; different ones are taken to differ from the block's first token on.
Nodes are cut wherever a lookup or an insertion ends, inside a block too. Time is the number of touches.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from sim.sglang.config import RadixConfig


class RadixNode:
    """Tokens ``start`` to ``end`` of a chain; the root has none."""

    __slots__ = ("children", "end", "keys", "last_access", "locks", "parent", "queued", "start")

    def __init__(self, parent: "RadixNode | None", keys: list[int], start: int, end: int, last_access: int) -> None:
        self.parent = parent
        self.keys = keys
        """Hashes of the blocks that its tokens lie in."""
        self.start = start
        self.end = end
        self.last_access = last_access
        self.locks = 0
        """Requests in flight that stand here or below; a locked node is not evicted."""
        self.children: dict[int, RadixNode] = {}
        """By the hash of the block that a child's first token lies in."""
        self.queued = False
        """Whether the eviction queue has an entry for it, maybe an outdated one."""

    def __len__(self) -> int:
        return self.end - self.start

    def path(self) -> Iterator["RadixNode"]:
        """The node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixTree:
    """The cached prefixes. A chain is given as its blocks' hashes and how many of its tokens are meant."""

    __slots__ = ("_clock", "_queue", "block_size", "evictable_tokens", "evicted_nodes", "evicted_tokens",
                 "protected_tokens", "root")  # fmt: skip

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = RadixNode(None, [], 0, 0, 0)
        self.evictable_tokens = 0
        """Tokens of nodes without a lock, inner ones included: they can go once the nodes below them went."""
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
        """Node where the longest cached prefix of the first ``tokens`` ends; a node that matches in part is cut."""
        node = self.root
        while node.end < tokens and (child := self._child(node, keys)):
            agreed = self._agree(child, keys, tokens)
            if agreed < child.end:
                node = self._cut(child, agreed)
                break
            node = child
        for above in reversed(list(node.path())):
            above.last_access = self._tick()
        return node

    def insert(self, keys: Sequence[int], tokens: int) -> RadixNode:
        """Cache the first ``tokens`` of a chain; the node where they end. What is cached already is touched."""
        node = self.root
        while node.end < tokens and (child := self._child(node, keys)):
            child.last_access = self._tick()
            agreed = self._agree(child, keys, tokens)
            node = child if agreed == child.end else self._cut(child, agreed)
        if node.end == tokens:
            return node
        first, size = node.end // self.block_size, self.block_size
        leaf = RadixNode(node, list(keys[first : -(-tokens // size)]), node.end, tokens, self._tick())
        node.children[leaf.keys[0]] = leaf
        self.evictable_tokens += len(leaf)
        self._offer(leaf)
        return leaf

    def lock(self, node: RadixNode) -> None:
        """Keep ``node`` and all above it until they are unlocked as often."""
        for above in node.path():
            if above.locks == 0:
                self.evictable_tokens -= len(above)
                self.protected_tokens += len(above)
            above.locks += 1

    def unlock(self, node: RadixNode) -> None:
        for above in node.path():
            above.locks -= 1
            if above.locks == 0:
                self.evictable_tokens += len(above)
                self.protected_tokens -= len(above)
                self._offer(above)

    def evict(self, tokens: int) -> list[RadixNode]:
        """Evict whole leaves, the least recently used first, until ``tokens`` are free or no leaf is left."""
        evicted: list[RadixNode] = []
        freed = 0
        while freed < tokens and (leaf := self._next_leaf()):
            parent = leaf.parent
            assert parent is not None  # the root is never queued
            del parent.children[leaf.keys[0]]
            freed += len(leaf)
            evicted.append(leaf)
            self._offer(parent)
        self.evictable_tokens -= freed
        self.evicted_tokens += freed
        self.evicted_nodes += len(evicted)
        return evicted

    def _child(self, node: RadixNode, keys: Sequence[int]) -> RadixNode | None:
        return node.children.get(keys[node.end // self.block_size])

    def _agree(self, node: RadixNode, keys: Sequence[int], tokens: int) -> int:
        """Tokens from the root up to which ``node`` and a chain that reaches it agree; its first block does."""
        first, end = node.start // self.block_size, min(node.end, tokens)
        last = (end - 1) // self.block_size
        own = node.keys
        if own[last - first] == keys[last]:  # hashes are chained: then all before agree
            return end
        return (first + bisect_left(range(last - first), True, key=lambda at: own[at] != keys[first + at])) * (
            self.block_size
        )

    def _cut(self, node: RadixNode, at: int) -> RadixNode:
        """Cut ``node`` after token ``at``. The new upper part is returned; the lower counts as touched after it."""
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

    def _offer(self, node: RadixNode) -> None:
        if not (node.children or node.locks or node.queued or node is self.root):
            node.queued = True
            heapq.heappush(self._queue, (node.last_access, node))

    def _next_leaf(self) -> RadixNode | None:
        """Take the least recently used unlocked leaf out of the queue, whose entries may be outdated."""
        while self._queue:
            queued_at, node = heapq.heappop(self._queue)
            node.queued = False
            if node.last_access == queued_at and not (node.children or node.locks):
                return node
            self._offer(node)
        return None

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


class RadixPool:
    """SGLang's KV pool between requests, one at a time: the tree, and the scheduler's rule for evictions."""

    __slots__ = ("_chunk", "_page", "_room", "tree")

    def __init__(self, config: RadixConfig, block_size: int) -> None:
        self.tree = RadixTree(block_size)
        self._page = config.page_size
        self._chunk = config.chunked_prefill_size
        room = config.max_total_num_tokens
        self._room = None if room is None else self._whole_pages(room)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether a request alone fits. SGLang keeps a page and a token back, and would cut its output short."""
        return self._room is None or self._started_pages(prompt_tokens) + output_tokens + self._page < self._room

    def run(
        self,
        keys: Sequence[int],
        prompt_tokens: int,
        computed_tokens: int,
        *,
        prompt_logprobs: bool = False,
    ) -> int:
        """Run a request that fits; return the hit tokens of its prompt. ``keys``: hashes of all ``computed_tokens``.

        ``prompt_logprobs``: log probabilities of the prompt were asked for, so that all of it is computed.
        """
        tree = self.tree
        node = tree.match(keys, 0 if prompt_logprobs else self._whole_pages(prompt_tokens - 1))
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
        if 0 < (whole := self._whole_pages(prompt_tokens)) < node.end:
            tree.insert(keys, whole)  # the prompt outlives its output
        tree.unlock(node)
        return hits

    def _checkpoint(self, node: RadixNode, keys: Sequence[int], tokens: int) -> RadixNode:
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
